package faults

import (
	"context"
	"hash/fnv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/stretchr/testify/require"
)

// delayStep is what due times are rounded up to, so that many events are due at once.
const delayStep = 2 * time.Second

// isDelayed chooses keys whose events are all delayed.
func isDelayed(e oracle.Event) bool {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(e.Key)) // never fails
	return hash.Sum32()%64/8 == 0    // of both topics
}

// dueTime returns when events are due that are recorded now: after as much as delayStep. Whoever records them has
// locked their key, so the due times of a key are in the order of its versions, and its events have to arrive in that
// order.
func dueTime() time.Time { return time.Now().Truncate(delayStep).Add(delayStep) }

// delay makes an event one that is due at a time.
func delay(e outbox.DomainEvent, due time.Time) outbox.DomainEvent {
	return outbox.With(e, outbox.EventOptions{NotBefore: due, Headers: map[string]string{dueHeader: due.UTC().Format(time.RFC3339Nano)}})
}

// dueHeader keeps the due time of an event, which outbox has not.
const dueHeader = "due"

// delayedResult is what became of delayed events. They are late while no mover runs, or PostgreSQL is away.
type delayedResult struct {
	Events  int   `json:"events"` // that were moved
	Waiting int   `json:"waiting"`
	Early   int   `json:"early"` // moved before they were due
	P99     int64 `json:"late_p99_ms"`
	Worst   int64 `json:"late_worst_ms"`
}

// wrong counts what must not be, at the end of a run.
func (v delayedResult) wrong() int { return v.Waiting + v.Early }

// sqlDelayed compares due times with the begin of the transactions that moved the events.
const sqlDelayed = `
SELECT count(*), (SELECT count(*) FROM outbox_delayed), count(*) FILTER (WHERE late < 0),
       coalesce(percentile_disc(0.99) WITHIN GROUP (ORDER BY late), 0), coalesce(max(late), 0)
  FROM (SELECT round(1000 * extract(epoch FROM created_at - (headers->>$1)::timestamptz))::bigint AS late FROM outbox WHERE headers ? $1) AS moved`

func delayedOf(ctx context.Context, t *testing.T, db *pgxpool.Pool) (v delayedResult) {
	t.Helper()
	require.NoError(t, db.QueryRow(ctx, sqlDelayed, dueHeader).Scan(&v.Events, &v.Waiting, &v.Early, &v.P99, &v.Worst))
	return v
}
