package faults

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// stream commits events of ten keys, the versions of each in their order, until
// stop is called. It lives through outages. stop returns the ids of the events
// whose commit was confirmed.
func (s *site) stream(t *testing.T) (stop func() map[string]struct{}) {
	t.Helper()
	const keys = 10
	ctx, cancel := context.WithCancel(context.Background())
	var writers sync.WaitGroup
	confirmed := make([]map[string]struct{}, keys)
	for i := range keys {
		confirmed[i] = map[string]struct{}{}
		writers.Go(func() { s.write(ctx, fmt.Sprintf("key-%d", i), confirmed[i]) })
	}
	stop = sync.OnceValue(func() map[string]struct{} {
		cancel()
		writers.Wait()
		all := map[string]struct{}{}
		for _, ids := range confirmed {
			maps.Copy(all, ids)
		}
		return all
	})
	t.Cleanup(func() { stop() })
	return stop
}

// write commits one version of key after another until ctx ends. A version whose commit fails may
// be there all the same; the next has a higher version in any case.
func (s *site) write(ctx context.Context, key string, confirmed map[string]struct{}) {
	for version := int64(1); ctx.Err() == nil; version++ {
		e := oracle.Event{ID: uuid.NewString(), Key: key, Version: version}
		err := pgx.BeginFunc(context.WithoutCancel(ctx), s.db, func(tx pgx.Tx) error { return s.rec.Record(ctx, tx, e) })
		if err == nil {
			confirmed[e.ID] = struct{}{}
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// awaitArrivals waits until n more records have arrived.
func (s *site) awaitArrivals(t *testing.T, n int) {
	t.Helper()
	count := func() int {
		arrived, err := s.reader.Arrived()
		require.NoError(t, err)
		return len(arrived)
	}
	first := count()
	require.Eventually(t, func() bool { return count() >= first+n }, testenv.Patience, 5*time.Millisecond)
}

// requireRight requires that everything that outbox holds arrives, and nothing
// else, each key in its order, and that outbox holds what was confirmed.
func (s *site) requireRight(t *testing.T, confirmed map[string]struct{}) oracle.Result {
	t.Helper()
	committed := s.recorded(t)
	for id := range confirmed {
		_, there := committed[id]
		require.True(t, there, "a confirmed event is not there")
	}
	v := s.compare(t, committed)
	t.Logf("%s", v)
	require.Zero(t, v.Lost+v.Phantom+v.Inversions, "%s", v)
	return v
}

// compare waits until all committed events have arrived, and compares them with all that
// arrived.
func (s *site) compare(t *testing.T, committed map[string]struct{}) (v oracle.Result) {
	t.Helper()
	require.Eventually(t, func() bool { return s.reader.Missing(committed) == 0 }, testenv.Patience, 10*time.Millisecond, "events are missing")
	ends, err := oracle.Ends(context.Background(), s.brokers, s.topic, s.as...)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return s.reader.CaughtUp(ends) }, testenv.Patience, 10*time.Millisecond)
	arrived, err := s.reader.Arrived()
	require.NoError(t, err)
	v.Compare(committed, arrived)
	return v
}

// recorded returns the ids of all events of the topic in outbox.
func (s *site) recorded(t *testing.T) map[string]struct{} {
	t.Helper()
	rows, err := s.db.Query(context.Background(), `SELECT payload->>'id' FROM outbox WHERE topic = $1`, s.topic)
	require.NoError(t, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	all := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		all[id] = struct{}{}
	}
	return all
}
