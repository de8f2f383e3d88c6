package delivery

import (
	"context"
	"errors"
	"slices"
	"time"
)

// A suspect is a delivery that was taken over: its event may have ended its last process. If this process ends, too, an
// attempt counts for each suspect that has begun in it. Therefore suspects begin one at a time, and each one waits
// until the last one has ended.
//
// Suspects that take long must not keep all others waiting, so fresh ones may begin beside them. A fresh suspect has
// used up no attempt and has more than one. An event that ends its process is fresh only once, so it costs each event
// beside it at most one attempt, and never the last one: beside a suspect in its last attempt none begins.

// suspectRoom says which suspects may be claimed.
type suspectRoom int

const (
	noSuspects suspectRoom = iota
	freshSuspects
	anySuspects
)

// roomForSuspects returns which suspects may be claimed, given those that this process has. Lost claims do not count,
// because their handlers may hang for ever.
func (s *claimedSet) roomForSuspects() (room suspectRoom) {
	s.mu.Lock()
	defer s.mu.Unlock()
	room = anySuspects
	for _, c := range s.rows {
		switch d := &c.batch[0]; {
		case !c.suspect || c.ctx.Err() != nil:
		case c.begun.IsZero() || time.Since(c.begun) < slowBatch || d.Attempt >= d.MaxAttempts:
			return noSuspects
		default:
			room = freshSuspects
		}
	}
	return room
}

// noteBegun notes that the row of a suspect says that its attempt begins.
func (s *claimedSet) noteBegun(r Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.rows[r]; c != nil {
		c.begun = time.Now()
	}
}

// claimSuspect claims a single suspect, if this process may have one more. It reports whether there may be other ones,
// which wait until this one is handled or takes long.
func (d *Dispatcher) claimSuspect(ctx context.Context, k *LaneKind) (more bool, err error) {
	now := time.Now()
	var rows int
	switch d.Claimed.roomForSuspects() {
	case anySuspects:
		rows, err = d.claim(ctx, k, claimRequest{pairs: d.claimablePairs(k), limit: 1, suspects: anySuspects})
		if rows == 0 {
			return false, err
		}
	case freshSuspects:
		if now.Before(k.freshAt) {
			break
		}
		rows, err = d.claim(ctx, k, claimRequest{pairs: k.withShare(d.claimablePairs(k)), limit: 1, suspects: freshSuspects})
		if rows == 0 {
			k.freshAt = now.Add(slowBatch)
		}
	case noSuspects:
	}
	d.pollBy(now.Add(slowBatch))
	return true, err
}

// withShare returns the pairs without those of slow actions that have their share of the lanes.
func (k *LaneKind) withShare(pairs []Claimable) []Claimable {
	const othersDue = true
	return slices.DeleteFunc(pairs, func(p Claimable) bool { return k.IsSlow(p.Action) && k.shareOf(p.Action, othersDue) <= 0 })
}

// beginSuspect notes in the row that the attempt begins, so that it counts if the event ends this process, too. It
// returns false if the delivery is lost or the lane stops.
func (l *lane) beginSuspect(it *laneItem) bool {
	err := l.write(func(ctx context.Context) error { return l.store.Begin(ctx, []Delivery{it.Delivery}) })
	if errors.Is(err, ErrLost) {
		l.lose(it.Ref)
	}
	if err == nil {
		l.claimed.noteBegun(it.Ref)
	}
	return err == nil
}
