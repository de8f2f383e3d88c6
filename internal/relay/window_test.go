package relay

import (
	"context"
	"testing"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// busyStore cancels every fetch of more than most events.
type busyStore struct {
	windowStore
	most    int
	fetches []int
}

func (s *busyStore) Fetch(_ context.Context, _ cursor.Position, ids []int64) ([]envelope.Event, int64, error) {
	s.fetches = append(s.fetches, len(ids))
	if len(ids) > s.most {
		return nil, 0, &pgconn.PgError{Code: "57014"}
	}
	events := make([]envelope.Event, len(ids))
	for i, id := range ids {
		events[i].ID = id
	}
	return events, ids[len(ids)-1], nil
}

// What PostgreSQL has cancelled is asked for in halves, and once in many fetches it is
// tried again: the lock or the load that made it slow may be gone.
func TestFetchesGrowAgain(t *testing.T) {
	t.Parallel()
	store := &busyStore{most: 300}
	w := NewWindowReader(store, 1000)
	p, statement := cursor.Position{}, func() (context.Context, context.CancelFunc) { return t.Context(), func() {} }
	take := func(n int) {
		for range n {
			for id := w.IDs.Len() + 1; w.IDs.Len() < 4000; id++ {
				w.IDs.Add(int64(len(store.fetches))*10_000 + int64(id))
			}
			_, err := w.Take(p, statement)
			require.NoError(t, err)
		}
	}
	take(2 + manyReads + 1)
	require.Equal(t, []int{1000, 500, 250}, store.fetches[:3])
	require.Equal(t, 250, store.fetches[2+manyReads-1])
	require.Equal(t, 500, store.fetches[2+manyReads], "tried again")
	store.most = 5000
	take(3*manyReads + 1)
	require.Equal(t, 1000, store.fetches[len(store.fetches)-1])
	require.Equal(t, 1000, w.Limits.Events.Most, "never above the configuration")
}

// lateStore ends no fetch in time. It reads an event without its payload at once.
type lateStore struct{ windowStore }

func (s *lateStore) Fetch(context.Context, cursor.Position, []int64) ([]envelope.Event, int64, error) {
	return nil, 0, context.DeadlineExceeded
}

func (s *lateStore) FetchBare(_ context.Context, _ cursor.Position, id int64, _ bool) (envelope.Event, error) {
	return envelope.Event{ID: id}, nil
}

// Each event may take too long as often as the one before: an unreadable event makes the next one die no sooner.
func TestEachEventMayTakeTooLong(t *testing.T) {
	t.Parallel()
	w := NewWindowReader(new(lateStore), 1)
	w.IDs.Add(1)
	w.IDs.Add(2)
	statement := func() (context.Context, context.CancelFunc) { return t.Context(), func() {} }
	for range 2 {
		for range maxTooLong - 1 {
			_, err := w.Take(cursor.Position{}, statement)
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		events, err := w.Take(cursor.Position{}, statement)
		require.NoError(t, err)
		require.Len(t, events, 1)
		require.Error(t, events[0].Unreadable)
	}
}
