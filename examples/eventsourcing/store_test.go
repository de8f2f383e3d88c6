package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

// newApp returns the parts of the program on a schema of the test's own, with its event store.
// Nothing relays.
func newApp(t *testing.T) (*app, *EventStore) {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	_, schema := testenv.Schema(t)
	a := &app{schema: schema, source: "/order-service", kafka: []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, log: slog.New(slog.DiscardHandler)}
	a.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	})
	var err error
	a.events, err = registry(a.source)
	require.NoError(t, err)
	require.NoError(t, a.migrate(t.Context()))
	waker, err := outbox.NewWaker(a.db, outbox.WakerConfig{Schema: schema})
	require.NoError(t, err)
	store, err := a.store(waker)
	require.NoError(t, err)
	return a, store
}

// save saves an order on which commands were played.
func save(t *testing.T, store *EventStore, commands ...func(*Order) error) *Order {
	t.Helper()
	o := play(t, commands...)
	require.NoError(t, store.Save(t.Context(), o))
	return o
}

// recorded returns what outbox has of the events.
func (a *app) recorded(t *testing.T) (names []string) {
	t.Helper()
	rows, err := a.db.Query(t.Context(), `SELECT event_type FROM outbox ORDER BY id`)
	require.NoError(t, err)
	names, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

// What is saved is loaded, and recorded as it was decided. Saving it again adds nothing.
func TestSaveAndLoad(t *testing.T) {
	t.Parallel()
	a, store := newApp(t)
	o := play(t, confirm)
	decided := []outbox.DomainEvent{o.uncommitted[0], o.uncommitted[1]}
	for range 2 {
		require.NoError(t, store.Save(t.Context(), o))
		require.Empty(t, o.uncommitted)
		outboxtest.RequireRecorded(t.Context(), t, outboxtest.InSchema(a.db, a.schema), a.events, decided...)
	}
	loaded, err := store.Load(t.Context(), o.ID)
	require.NoError(t, err)
	require.Equal(t, o, loaded)

	require.NoError(t, complete(loaded))
	require.NoError(t, store.Save(t.Context(), loaded))
	require.Equal(t, []string{orderCreated, orderConfirmed, orderCompleted}, a.recorded(t))

	_, err = store.Load(t.Context(), [16]byte{1})
	require.ErrorIs(t, err, ErrNotFound)
}

// The event is in the store if and only if it is recorded: where one of both fails, so does the
// other.
func TestAppendAndRecordAreOne(t *testing.T) {
	t.Parallel()
	a, store := newApp(t)
	_, err := a.db.Exec(t.Context(), `ALTER TABLE outbox ADD CHECK (event_type <> '`+orderConfirmed+`')`)
	require.NoError(t, err)
	o := save(t, store)
	require.NoError(t, confirm(o))
	require.Error(t, store.Save(t.Context(), o))
	loaded, err := store.Load(t.Context(), o.ID)
	require.NoError(t, err)
	require.Equal(t, 1, loaded.Version)
	require.Equal(t, []string{orderCreated}, a.recorded(t))
}

// Of two who have loaded the same version, one is first. The other gets an error, and neither
// stores nor publishes anything.
func TestTwoWriters(t *testing.T) {
	t.Parallel()
	a, store := newApp(t)
	o := save(t, store)
	first, err := store.Load(t.Context(), o.ID)
	require.NoError(t, err)
	second, err := store.Load(t.Context(), o.ID)
	require.NoError(t, err)
	require.NoError(t, confirm(first))
	require.NoError(t, cancel(second))
	require.NoError(t, store.Save(t.Context(), first))
	require.ErrorIs(t, store.Save(t.Context(), second), ErrConflict)
	require.Equal(t, []string{orderCreated, orderConfirmed}, a.recorded(t))
}

// At the same time, each to the same order: one wins every version, and the losers decide again
// by what they find then.
func TestManyWritersAtTheSameTime(t *testing.T) {
	t.Parallel()
	_, store := newApp(t)
	orders := &Orders{store, func() {}}
	for range 10 {
		o, err := orders.CreateOrder(t.Context(), bag)
		require.NoError(t, err)
		outcomes := make([]error, 6)
		var g errgroup.Group
		for n := range outcomes {
			g.Go(func() error {
				if n%2 == 0 {
					_, outcomes[n] = orders.ConfirmOrder(t.Context(), o.ID, nil)
				} else {
					_, outcomes[n] = orders.CancelOrder(t.Context(), o.ID, "why not", fmt.Sprint("clerk ", n))
				}
				return nil
			})
		}
		require.NoError(t, g.Wait())
		changes := 0
		for _, err := range outcomes {
			switch {
			case err == nil:
				changes++
			case !errors.Is(err, ErrTransition):
				require.ErrorIs(t, err, ErrConflict)
			}
		}
		loaded, err := store.Load(t.Context(), o.ID)
		require.NoError(t, err)
		require.Equal(t, Cancelled, loaded.Status, "confirmed before or never")
		require.Equal(t, 1+changes, loaded.Version)
	}
}

// A snapshot is stored after every second event, and saves the reading of what is before it. One
// of another form is not read.
func TestSnapshots(t *testing.T) {
	t.Parallel()
	a, store := newApp(t)
	o := save(t, store, confirm)
	require.NoError(t, complete(o))
	require.NoError(t, store.Save(t.Context(), o))
	var version, n int
	require.NoError(t, a.db.QueryRow(t.Context(), `SELECT max(version), count(*) FROM order_snapshots`).Scan(&version, &n))
	require.Equal(t, []int{snapshotEvery, 1}, []int{version, n})

	_, err := a.db.Exec(t.Context(), `UPDATE order_snapshots SET state = jsonb_set(state, '{orderNumber}', '"of the snapshot"')`)
	require.NoError(t, err)
	loaded, err := store.Load(t.Context(), o.ID)
	require.NoError(t, err)
	require.Equal(t, "of the snapshot", loaded.OrderNumber)
	_, err = a.db.Exec(t.Context(), `UPDATE order_snapshots SET form = form + 1`)
	require.NoError(t, err)
	loaded, err = store.Load(t.Context(), o.ID)
	require.NoError(t, err)
	require.Equal(t, o, loaded)
}

// The past, by version and by point in time, with a snapshot before it, after it and without.
func TestThePast(t *testing.T) {
	t.Parallel()
	a, store := newApp(t)
	o := save(t, store, confirm, complete) // at noon, a minute later, and an hour later
	for _, snapshot := range []*Order{nil, play(t, confirm), o} {
		_, err := a.db.Exec(t.Context(), `DELETE FROM order_snapshots`)
		require.NoError(t, err)
		if snapshot != nil {
			_, err = a.db.Exec(t.Context(), sqlSaveSnapshot, o.ID, snapshot.Version, snapshot.UpdatedAt, snapshotForm, snapshot.State)
			require.NoError(t, err)
		}
		for version, want := range map[int]Status{1: Pending, 2: Confirmed, 3: Completed} {
			past, err := store.LoadAtVersion(t.Context(), o.ID, version)
			require.NoError(t, err)
			require.Equal(t, want, past.Status)
			require.Equal(t, version, past.Version)
		}
		for at, want := range map[time.Duration]int{0: 1, time.Minute - 1000: 1, time.Minute: 2, time.Hour - 1000: 2, time.Hour: 3, 1000 * time.Hour: 3} {
			past, err := store.LoadAt(t.Context(), o.ID, after(at))
			require.NoError(t, err)
			require.Equal(t, want, past.Version, at)
		}
		for _, version := range []int{-1, 0, 4} {
			_, err := store.LoadAtVersion(t.Context(), o.ID, version)
			require.ErrorIs(t, err, ErrNotFound, "version %d", version)
		}
		_, err = store.LoadAt(t.Context(), o.ID, after(-time.Microsecond))
		require.ErrorIs(t, err, ErrNotFound)
	}
}

// Nothing in the event store is changed, nor removed.
func TestEventsAreImmutable(t *testing.T) {
	t.Parallel()
	a, store := newApp(t)
	save(t, store)
	for _, sql := range []string{`UPDATE order_events SET version = 2`, `DELETE FROM order_events`, `TRUNCATE order_events`} {
		_, err := a.db.Exec(t.Context(), sql)
		var pg *pgconn.PgError
		require.ErrorAs(t, err, &pg, sql)
		require.Contains(t, pg.Message, "events are immutable")
	}
}

// Trace and correlation id of a command are in the store, and travel with the event.
func TestMetadata(t *testing.T) {
	t.Parallel()
	a, store := newApp(t)
	ctx := outbox.WithCorrelationID(t.Context(), "my-own")
	ctx = outbox.WithTraceID(ctx, "0123456789ABCDEF")
	_, err := (&Orders{store, func() {}}).CreateOrder(ctx, bag)
	require.NoError(t, err)
	var m Metadata
	require.NoError(t, a.db.QueryRow(t.Context(), `SELECT metadata FROM order_events`).Scan(&m))
	require.Equal(t, Metadata{TraceID: "0123456789ABCDEF", CorrelationID: "my-own"}, m)
	require.Equal(t, Metadata{}, metadataOf(context.Background()))
	var correlation, trace string
	require.NoError(t, a.db.QueryRow(t.Context(), `SELECT headers->>'correlationid', headers->>'ce_traceid' FROM outbox`).Scan(&correlation, &trace))
	require.Equal(t, "my-own", correlation)
	require.Equal(t, m.TraceID, trace)
}
