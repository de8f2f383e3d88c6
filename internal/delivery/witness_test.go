package delivery_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/delivery"
)

// The latest success of an action, in any process, is a witness for what has failed before. It is none for another
// action or another group.
func TestWitness(t *testing.T) {
	t.Parallel()
	f := newTable(t)
	one, two := f.store("one", time.Minute), f.store("two", time.Minute)
	stranger := delivery.NewStore(f.db, f.schema, "another", "three", time.Minute)
	sees := func(s *delivery.Store, action string, ago time.Duration) bool {
		seen, err := s.Witness(t.Context(), action, ago)
		require.NoError(t, err)
		return seen
	}
	require.False(t, sees(two, action, time.Hour))
	now := time.Now()
	require.NoError(t, one.SaveSuccesses(t.Context(), map[string]time.Time{action: now.Add(-10 * time.Minute), "OTHER": now}))
	require.True(t, sees(two, action, 11*time.Minute))
	require.False(t, sees(two, action, 9*time.Minute), "it has failed first after that")
	require.False(t, sees(stranger, action, time.Hour))
	require.NoError(t, two.SaveSuccesses(t.Context(), map[string]time.Time{action: now.Add(-20 * time.Minute)}))
	require.True(t, sees(one, action, 11*time.Minute), "the later one counts")
	require.NoError(t, two.SaveSuccesses(t.Context(), map[string]time.Time{action: now.Add(-5 * time.Minute)}))
	require.True(t, sees(one, action, 6*time.Minute))
}

// A row says since when its event has been failing: from the first failure on, that of a trial too. An outage of
// PostgreSQL is no failure, and a row that is requeued has not failed yet.
func TestFirstFailure(t *testing.T) {
	t.Parallel()
	f := newTable(t)
	s := f.store("one", time.Minute)
	claimed := f.insert(s, delivery.Processing, f.record("a"), "a")
	again := func(fail delivery.Failure) time.Duration {
		fail.Of, fail.Code, fail.MaxAttempts = claimed[0], "handler", 3
		_, err := s.Fail(t.Context(), fail, nil)
		require.NoError(t, err)
		claimed, err = s.Claim(t.Context(), pairs, 1, 0, false, 1<<20)
		require.NoError(t, err)
		require.Len(t, claimed, 1)
		if claimed[0].FirstFailed.IsZero() {
			return 0
		}
		return time.Since(claimed[0].FirstFailed)
	}
	require.Zero(t, claimed[0].FirstFailed)
	require.Zero(t, again(delivery.Failure{Uncounted: true, Postponed: true}))
	require.Less(t, again(delivery.Failure{Uncounted: true}), time.Minute)
	require.Equal(t, 1, claimed[0].Attempt, "the others are uncounted")
	f.exec(`UPDATE {schema}.event_delivery SET failed_at = failed_at - interval '1 hour'`)
	require.Greater(t, again(delivery.Failure{}), 59*time.Minute)
	require.Equal(t, 2, claimed[0].Attempt)

	require.False(t, claimed[0].WitnessAfter.IsZero())
	_, err := s.Fail(t.Context(), delivery.Failure{Of: claimed[0], Code: "handler", Dead: true}, nil)
	require.NoError(t, err)
	f.exec(`SELECT {schema}.outbox_requeue_deliveries(ARRAY(SELECT id FROM {schema}.event_delivery), 'kim', 'again')`)
	claimed, err = s.Claim(t.Context(), pairs, 1, 0, false, 1<<20)
	require.NoError(t, err)
	require.Zero(t, claimed[0].FirstFailed)
	require.Zero(t, claimed[0].WitnessAfter)
}

// A failure that does not count uses up no attempt, and does not change when a failure counted last.
func TestFailuresThatDoNotCount(t *testing.T) {
	t.Parallel()
	f := newTable(t)
	s := f.store("one", time.Minute)
	claimed := f.insert(s, delivery.Processing, f.record("a"), "a")
	again := func(fail delivery.Failure) (attempt int, hours float64) {
		fail.Of, fail.Code, fail.MaxAttempts = claimed[0], "handler", 3
		_, err := s.Fail(t.Context(), fail, nil)
		require.NoError(t, err)
		claimed, err = s.Claim(t.Context(), pairs, 1, 0, false, 1<<20)
		require.NoError(t, err)
		require.Len(t, claimed, 1)
		if !claimed[0].WitnessAfter.IsZero() {
			hours = math.Round(time.Since(claimed[0].WitnessAfter).Hours())
		}
		f.exec(`UPDATE {schema}.event_delivery SET witness_after = witness_after - interval '1 hour'`)
		return claimed[0].Attempt, hours
	}
	for _, tt := range []struct {
		fail    delivery.Failure
		attempt int
		hours   float64
	}{
		{fail: delivery.Failure{Uncounted: true}, attempt: 1},
		{fail: delivery.Failure{}, attempt: 2},
		{fail: delivery.Failure{Uncounted: true, Postponed: true}, attempt: 2, hours: 1},
		{fail: delivery.Failure{Uncounted: true}, attempt: 2, hours: 2},
		{fail: delivery.Failure{}, attempt: 3},
		{fail: delivery.Failure{Uncounted: true}, attempt: 3, hours: 1},
	} {
		attempt, hours := again(tt.fail)
		require.Equal(t, []any{tt.attempt, tt.hours}, []any{attempt, hours}, "%+v", tt.fail)
	}
}
