// Package pauses knows what a consumer must not handle for a while: what its own process has
// paused, and what operators have, which is in the table consumer_pause.
package pauses

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/pg"
)

// All is the topic of a pause of everything that a group reads.
const All = ""

// Pause is what an operator has paused.
type Pause struct {
	Topic            string // or All
	Operator, Reason string
	At               time.Time // by Clock
	Clock            pg.Clock  // of the database
}

// Lasts returns for how long it has been paused.
func (p Pause) Lasts() time.Duration { return p.Clock.Since(p.At) }

// Set is the set of paused topics at the moment. It is safe for concurrent use.
type Set struct {
	mu      sync.Mutex
	own     map[string]bool // topics, by this process
	stored  []Pause         // by operators
	current atomic.Pointer[state]
}

// state is a Set at one time. It does not change.
type state struct {
	topics  map[string]bool
	changed chan struct{} // closed when there is a newer state
}

// NewSet returns a set without pauses.
func NewSet() *Set {
	s := &Set{own: map[string]bool{}}
	s.current.Store(&state{changed: make(chan struct{})})
	return s
}

// Pause pauses topics for this process, [All] for everything.
func (s *Set) Pause(topics ...string) {
	s.change(func() {
		for _, t := range topics {
			s.own[t] = true
		}
	})
}

// Resume ends pauses of this process.
func (s *Set) Resume(topics ...string) {
	s.change(func() {
		for _, t := range topics {
			delete(s.own, t)
		}
	})
}

// SetStored replaces the pauses of operators. It returns the pauses from before.
func (s *Set) SetStored(now []Pause) (before []Pause) {
	s.change(func() { before, s.stored = s.stored, now })
	return before
}

// change changes the set, and wakes its waiters if the paused topics have changed.
func (s *Set) change(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
	topics := maps.Clone(s.own)
	for _, p := range s.stored {
		topics[p.Topic] = true
	}
	if before := s.current.Load(); !maps.Equal(before.topics, topics) {
		s.current.Store(&state{topics, make(chan struct{})})
		close(before.changed)
	}
}

// IsPaused reports whether nothing of a topic is to be handled.
func (s *Set) IsPaused(topic string) bool {
	return s.current.Load().isPaused(topic)
}

func (s *state) isPaused(topic string) bool { return s.topics[All] || s.topics[topic] }

// AwaitResume waits while a topic is paused, and reports whether it is not any more before
// ctx has ended.
func (s *Set) AwaitResume(ctx context.Context, topic string) bool {
	for {
		now := s.current.Load()
		if !now.isPaused(topic) {
			return true
		}
		select {
		case <-now.changed:
		case <-ctx.Done():
			return false
		}
	}
}

// Watch calls see with those of some topics that are paused, and again after each change,
// until ctx is cancelled.
func (s *Set) Watch(ctx context.Context, topics []string, see func(paused, others []string)) {
	for ctx.Err() == nil {
		now := s.current.Load()
		var paused, others []string
		for _, t := range topics {
			if now.isPaused(t) {
				paused = append(paused, t)
			} else {
				others = append(others, t)
			}
		}
		see(paused, others)
		select {
		case <-now.changed:
		case <-ctx.Done():
		}
	}
}

// Own returns the topics that this process has paused, sorted.
func (s *Set) Own() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.own))
}

// Stored returns what operators have paused.
func (s *Set) Stored() []Pause {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.stored)
}
