// Package places remembers which topics and partitions accept nothing. A failure belongs
// to a place: a record, a partition, a topic, or Kafka as a whole. Events for a place that
// is known to be bad need not be tried, so they delay no others.
package places

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// Bad is a topic or a partition that accepts nothing.
type Bad struct {
	// Name is the topic, or topic/number.
	Name string
	// Class and Err say why.
	Class string
	Err   error
	// Elsewhere is set once another place has accepted an event. Until then it may be an
	// outage of Kafka.
	Elsewhere bool
	// Since is when it failed first.
	Since time.Time
}

// Registry has the bad places of a relay. It is safe for concurrent use.
type Registry struct {
	log     *outage.Logs
	failing atomic.Bool // there is a bad place; saves the lock where there is none

	mu       sync.Mutex
	bad      map[string]*Bad
	accepted map[string]time.Time // when a place that was bad was last good
	claimed  map[string]bool      // places whose waiting events somebody sends
}

// NewRegistry returns a registry without bad places. It reports to log what becomes bad
// and good.
func NewRegistry(log *outage.Logs) *Registry {
	return &Registry{log: log, bad: map[string]*Bad{}, accepted: map[string]time.Time{}, claimed: map[string]bool{}}
}

// Failing reports whether there is a bad place, or one that the log has not heard is good.
// While there is none, a success need not be reported.
func (r *Registry) Failing() bool { return r.failing.Load() || r.log.Failing() }

// Load adds places for which events wait since before the registry was made. It leaves
// alone what has been good since.
func (r *Registry) Load(loaded []Bad) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range loaded {
		if b.Name == "" { // nothing in particular
			continue
		}
		if _, good := r.accepted[b.Name]; !good && r.bad[b.Name] == nil {
			b.Since = time.Now()
			r.bad[b.Name] = &b
		}
	}
	r.failing.Store(len(r.bad) > 0)
}

// Fail makes a place bad. A try that began before the place was last good is out of date
// and ignored, because several clients need not notice the end of an outage at the same
// time.
func (r *Registry) Fail(at kafka.Partition, began time.Time, class string, err error) {
	r.log.Report(at.String(), began, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	name := at.Name()
	switch b := r.bad[name]; {
	case began.Before(r.accepted[name]):
	case b != nil:
		b.Class, b.Err = class, err
	default:
		r.bad[name] = &Bad{Name: name, Class: class, Err: err, Since: time.Now()}
		r.failing.Store(true)
	}
}

// Accept says that a partition has accepted an event, in a try that began at a time. It
// and its topic are good now, and every other place knows that Kafka works elsewhere. It
// reports whether a bad place has become good.
func (r *Registry) Accept(at kafka.Partition, began time.Time) (recovered bool) {
	topic := at.WholeTopic()
	r.log.Report(topic.String(), began, nil)
	r.log.Report(at.String(), began, nil)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range []string{topic.Name(), at.Name()} {
		if r.bad[name] != nil {
			r.makeGood(name)
			recovered = true
		}
	}
	for _, b := range r.bad {
		b.Elsewhere = true
	}
	return recovered
}

// makeGood is called with the lock held.
func (r *Registry) makeGood(name string) {
	delete(r.bad, name)
	r.accepted[name] = time.Now()
	r.failing.Store(len(r.bad) > 0)
}

// Forget makes a place good that nothing waits for, so that nothing can show when it
// recovers. The next event is tried.
func (r *Registry) Forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bad[name] != nil {
		r.makeGood(name)
	}
}

// Find returns the bad place that a partition is, or is in.
func (r *Registry) Find(at kafka.Partition) (Bad, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.bad[at.Topic]
	if b == nil && at.Number != kafka.Unassigned {
		b = r.bad[at.Name()]
	}
	if b == nil {
		return Bad{}, false
	}
	return *b, true
}

// All returns the bad places, sorted by name.
func (r *Registry) All() (all []Bad) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(r.bad)) {
		all = append(all, *r.bad[name])
	}
	return all
}

// Topics returns the topics with bad partitions.
func (r *Registry) Topics() (topics []string) {
	for _, b := range r.All() {
		if topic, _, partition := strings.Cut(b.Name, "/"); partition && !slices.Contains(topics, topic) {
			topics = append(topics, topic)
		}
	}
	return topics
}

// Claim reports whether the caller may send the events that wait for a place, until it
// releases the place. A bad place is for those who probe it, a good one for the others.
func (r *Registry) Claim(name string, probe bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if bad := r.bad[name] != nil; r.claimed[name] || bad != probe {
		return false
	}
	r.claimed[name] = true
	return true
}

// Release ends a claim.
func (r *Registry) Release(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.claimed, name)
}
