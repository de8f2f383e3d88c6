package delivery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// usedTx is a transaction whose handlers may have changed settings.
type usedTx struct{ changed bool }

func (usedTx) Call(string, func(pgx.Tx) error) error { return nil }
func (x usedTx) ChangedSettings() bool               { return x.changed }
func (x usedTx) Used() bool                          { return true }
func (usedTx) Own() pgx.Tx                           { return nil }

// The end of a transaction that its handlers have prevented is a failure of the handlers, and counts as an attempt. A
// transaction that has taken longer than an administrator permits would be repeated for ever as an outage.
func TestUnfinishedIsOfTheHandler(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]struct{ plain, changed bool }{
		"25P04": {true, true},   // transaction_timeout
		"25P02": {true, true},   // a statement of the handler has failed
		"40001": {false, false}, // a conflict is tried again
		"57P01": {false, true},  // PostgreSQL stops, unless a setting of the handler ends the session
		"55P03": {false, true},  // a lock, or the handler's lock_timeout
		"":      {false, false}, // the connection
	} {
		err := fmt.Errorf("complete: %w", &pgconn.PgError{Code: code})
		require.Equal(t, want.plain, errors.Is(AsUnfinished(usedTx{false}, err), handling.ErrUnfinished), code)
		require.Equal(t, want.changed, errors.Is(AsUnfinished(usedTx{true}, err), handling.ErrUnfinished), code)
		require.ErrorIs(t, AsUnfinished(usedTx{true}, err), err)
	}
	wait := &pg.LockError{Err: &pgconn.PgError{Code: "55P03"}}
	require.NotErrorIs(t, AsUnfinished(usedTx{true}, wait), handling.ErrUnfinished)
}

// A delivery that comes back to a process that has given it to others is in the log, once for each kind.
func TestComesAgain(t *testing.T) {
	t.Parallel()
	var y yielded
	d := func(id int64, action string) *Delivery { return &Delivery{Ref: Ref{ID: id}, Action: action} }
	require.False(t, y.comesAgain(d(1, "COUNTED")))
	require.False(t, y.comesAgain(d(2, "COUNTED")))
	require.True(t, y.comesAgain(d(1, "COUNTED")))
	require.False(t, y.comesAgain(d(2, "COUNTED")), "of the same kind")
	require.False(t, y.comesAgain(d(3, "SUMMED")))
	require.True(t, y.comesAgain(d(3, "SUMMED")))
	for id := range int64(2 * maxYielded) {
		y.comesAgain(d(id+10, "COUNTED"))
	}
	require.LessOrEqual(t, len(y.again), maxYielded)
}

// A stop may come while a process cannot find out whether another one has a handler for the type of a delivery. The
// delivery is released then: it is not dead.
func TestUnknownInAStopIsReleased(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	ended, end := context.WithCancel(t.Context())
	end()
	log := slog.New(slog.DiscardHandler)
	rules := &Rules{Lease: time.Minute}
	l := &lane{laneParts: laneParts{cfg: rules, store: NewStore(db, schema, "g", "w", time.Minute), outages: outage.NewLogs(log), stopping: ended, cut: ended, log: log}, ctx: ended}
	_, err := db.Exec(t.Context(), pg.InSchema(`ALTER TABLE {schema}.event_member RENAME TO elsewhere`, schema))
	require.NoError(t, err)
	it := &laneItem{Delivery: Delivery{FromKafka: true, MaxAttempts: 1, Attempt: 1}}
	require.True(t, l.yield(it, handling.Outcome{Result: handling.Dead, Class: handling.ClassUnknownType, Err: errors.New("no handler")}))
	require.False(t, it.ended)
}

// A row with several tasks is locked by the transaction of the first one, under a strict isolation level, and is not
// renewed meanwhile. So it is renewed before the next task: its handler may have no transaction.
func TestRenewedBetweenTasks(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	exec := func(sql string) {
		_, err := db.Exec(t.Context(), pg.InSchema(sql, schema))
		require.NoError(t, err)
	}
	store := NewStore(db, schema, "g", "w", time.Minute)
	exec(`INSERT INTO {schema}.event_delivery (consumer_group, action, stream, position, status, attempt_count, max_attempts, next_retry_at, locked_by, locked_until, event_id, event_type, source, aggregate_type, aggregate_id, content_type, size, occurred_at, recorded_at, created_at, updated_at, payload)
		VALUES ('g', 'a', 's', 1, 'PROCESSING', 1, 5, now(), 'w/1', now() - interval '1 s', gen_random_uuid(), 't.t.t.v1', 'shop', 'T', '1', 'application/json', 2, now(), now(), now(), now(), '{}')`)
	own, err := store.Own(t.Context())
	require.NoError(t, err)
	require.Len(t, own, 1)
	live := t.Context()
	l := &lane{laneParts: laneParts{cfg: &Rules{Lease: time.Minute}, store: store, claimed: newClaimedSet(), stopping: live, cut: live, outages: outage.NewLogs(slog.New(slog.DiscardHandler)), log: slog.New(slog.DiscardHandler)}}
	l.ctx = l.claimed.add(live, own, time.Now(), nil)
	l.finishing = &handling.Processor{Begin: l.lockRows}
	l.plain = &handling.Processor{Begin: l.lockRows}
	l.attempts = &handling.Attempts{Processor: l.plain}
	isOver := func() (over bool) {
		require.NoError(t, db.QueryRow(t.Context(), pg.InSchema(`SELECT locked_until < clock_timestamp() FROM {schema}.event_delivery`, schema)).Scan(&over))
		return over
	}
	laneScheduler{l}.Exit(&handling.Task{Handler: &handling.Handler{Kind: handling.NoTx}}, time.Now(), nil)
	require.True(t, isOver(), "it was not locked")
	laneScheduler{l}.Exit(&handling.Task{Handler: &handling.Handler{Kind: handling.InTx}}, time.Now(), nil)
	require.False(t, isOver())
}
