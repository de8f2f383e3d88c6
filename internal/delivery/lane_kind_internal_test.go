package delivery

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pauses"
)

// newIdleLane returns a lane that does not run, and its kind.
func newIdleLane(pairs []Claimable, tx bool) (*LaneKind, *lane) {
	rules := &Rules{Rules: &handling.Rules{HandlerTimeout: time.Minute, Log: slog.New(slog.DiscardHandler)}, Concurrency: 1, MaxPoll: 100}
	parts := laneParts{
		cfg: rules, processor: handling.NewProcessor(*rules.Rules, handling.Routes{}, nil), store: &Store{}, claimed: newClaimedSet(),
		log: rules.Log, pauses: pauses.NewSet(), breakers: &handling.ActionBreakers{}, stopping: context.Background(), cut: context.Background(),
	}
	k := newLaneKind(pairs, firstBatch, rules)
	k.lanes = []*lane{newLane(parts, tx)}
	return k, k.lanes[0]
}

// Deliveries that were released before they began count as not handled, so the batches of a lane do not grow with them.
func TestReleasedDeliveriesAreNotHandled(t *testing.T) {
	t.Parallel()
	k, l := newIdleLane([]Claimable{{Pair: Pair{"A", "s"}}}, false)
	var batch []Delivery
	for id := range int64(firstBatch) {
		batch = append(batch, Delivery{Ref: Ref{ID: id + 1, Holder: "h"}, Action: "A", Stream: "s"})
	}
	l.readEvent = func(*Delivery, *envelope.Received) (*envelope.Message, string, error) {
		l.progress.takeAhead() // as relieve does
		return nil, "", nil
	}
	for range 3 {
		l.claimed.add(l.cut, batch, time.Now(), nil)
		k.enqueue(batch)
		queued, _ := l.queue.next()
		l.began = time.Now()
		n := l.handle(queued)
		require.Zero(t, n)
		k.noteHandled(l, n, len(queued), 300*time.Millisecond, 100)
	}
	require.LessOrEqual(t, k.Batch(), firstBatch)
}

// A lane whose batch was released during its first call gets no larger batches, however short the call was.
func TestRelievedLaneKeepsSmallBatches(t *testing.T) {
	t.Parallel()
	k, l := newIdleLane([]Claimable{{Pair: Pair{"A", "s"}}}, false)
	const of, most = 4, 100
	for range 10 {
		k.load[l], k.slow[l] = 1, true
		k.noteHandled(l, 1, of, 300*time.Millisecond, most)
		require.Equal(t, 1, k.Batch())
		k.load[l], k.slow[l] = 1, true
		k.noteHandled(l, 1, 1, 300*time.Millisecond, most)
		require.Equal(t, 1, k.Batch())
	}
}

// Few deliveries are claimed at a time while other processes claim most, or while many wait behind others of their
// keys. The batches may grow all the same if a delivery takes little time.
func TestBatchesGrowAlthoughNoneIsFull(t *testing.T) {
	t.Parallel()
	k, l := newIdleLane([]Claimable{{Pair: Pair{"A", "s"}}}, true)
	const most = 100
	note := func(n int, took time.Duration) {
		k.load[l] = 1
		k.noteHandled(l, n, n, took, most)
	}
	for range 100 {
		note(1, 2*time.Millisecond)
	}
	require.Equal(t, firstBatch, k.Batch(), "single events say nothing about large batches")
	for k.Batch() < most {
		before := k.Batch()
		note(before*3/4, 50*time.Millisecond)
		require.Equal(t, min(2*before, most), k.Batch())
	}
	before := k.perDelivery
	note(0, 0)
	require.Equal(t, before, k.perDelivery, "nothing was handled")
}

// What waits in a lane that reads a large payload goes to other lanes, as behind a slow call. The pace of its action
// does not change.
func TestSlowReadGivesBackWhatWaits(t *testing.T) {
	t.Parallel()
	k, l := newIdleLane([]Claimable{{Pair: Pair{"A", "s"}}}, true)
	k.spareAfter = time.Nanosecond
	k.enqueue([]Delivery{{Ref: Ref{ID: 1}, Action: "A"}})
	waiting, _ := k.takeFromSlow()
	require.Empty(t, waiting)
	l.reading.Begin(handling.Call{Context: context.Background(), Action: "A", Events: 1})
	time.Sleep(time.Millisecond)
	waiting, replaced := k.takeFromSlow()
	require.Len(t, waiting, 1)
	require.True(t, replaced)
	require.Zero(t, k.pace["A"])
}
