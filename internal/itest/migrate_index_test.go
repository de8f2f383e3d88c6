package itest

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// indexOf returns what PostgreSQL says of an index in the schema, "" without one.
func (c *counter) indexOf(t testing.TB, name string) (definition string) {
	t.Helper()
	require.NoError(t, c.db.QueryRow(background, `SELECT coalesce(max(pg_get_indexdef(i.indexrelid) || CASE WHEN i.indisvalid THEN '' ELSE ' INVALID' END), '')
		  FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid JOIN pg_namespace AS n ON n.oid = c.relnamespace
		 WHERE n.nspname = $1 AND c.relname = $2`, c.schema, name).Scan(&definition))
	return definition
}

func (c *counter) migrate(ctx context.Context, cfg outbox.MigrateConfig) error {
	cfg.Schema = c.schema
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return outbox.Migrate(ctx, c.db, cfg)
}

func (c *counter) hasAggregateIndex(t testing.TB) bool {
	t.Helper()
	i, err := outboxops.NewInspector(c.db, outboxops.InspectorConfig{Schema: c.schema})
	require.NoError(t, err)
	has, err := i.HasAggregateIndex(background)
	require.NoError(t, err)
	return has
}

func withID(id uuid.UUID) outbox.DomainEvent {
	return outbox.With(good, outbox.EventOptions{ID: id})
}

// Where ids are unique, an event of one that is there is rejected in its transaction, however it is recorded.
func TestUniqueEventIDs(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	unique := outbox.MigrateConfig{UniqueEventIDs: true}
	id := uuid.New()
	c.commit(t, background, c.rec, withID(id), withID(id))
	err := c.migrate(background, unique)
	require.ErrorIs(t, err, outbox.ErrDuplicateEvent)
	require.ErrorContains(t, err, id.String())
	require.Empty(t, c.indexOf(t, "outbox_event_id_key"), "one that is not valid would refuse events all the same")
	testenv.UpdateEvents(t, c.db, c.sql(`UPDATE {s}.outbox SET event_id = gen_random_uuid() WHERE id = 1`))
	require.NoError(t, c.migrate(background, unique))
	require.NoError(t, c.migrate(background, unique), "there is nothing to do")
	require.Contains(t, c.indexOf(t, "outbox_event_id_key"), "CREATE UNIQUE INDEX")

	many := make([]outbox.DomainEvent, 600)
	for i := range many {
		many[i] = good
	}
	many[599] = withID(id)
	for _, events := range [][]outbox.DomainEvent{{withID(id)}, {good, withID(id)}, {withID(uuid.UUID{1}), withID(uuid.UUID{1})}, many} {
		tx := c.begin(t)
		err := c.rec.Record(background, tx, events...)
		require.ErrorIs(t, err, outbox.ErrDuplicateEvent)
		require.ErrorContains(t, err, "(event_id)=(")
		_, err = tx.Exec(background, `SELECT 1`)
		require.Error(t, err, "the transaction is aborted")
		require.NoError(t, tx.Rollback(background))

		tx = c.begin(t)
		point, err := tx.Begin(background)
		require.NoError(t, err)
		require.ErrorIs(t, c.rec.Record(background, point, events...), outbox.ErrDuplicateEvent)
		require.NoError(t, point.Rollback(background))
		require.NoError(t, c.rec.Record(background, tx, good), "to a savepoint it can go back")
		require.NoError(t, tx.Commit(background))
	}
	var batch pgx.Batch
	require.NoError(t, c.rec.Queue(background, &batch, withID(id)))
	var rejected *pgconn.PgError
	require.ErrorAs(t, c.db.SendBatch(background, &batch).Close(), &rejected)
	require.Equal(t, []string{"23505", "outbox_event_id_key"}, []string{rejected.Code, rejected.ConstraintName})

	require.ErrorIs(t, c.migrate(background, outbox.MigrateConfig{PartitionRows: 100}), outbox.ErrPartitioned)
	require.ErrorIs(t, c.migrate(background, outbox.MigrateConfig{PartitionRows: 100, UniqueEventIDs: true}), outbox.ErrPartitioned)
	other := newCounter(t, parcels(t))
	require.NoError(t, other.migrate(background, outbox.MigrateConfig{PartitionRows: 100}))
	require.ErrorIs(t, other.migrate(background, unique), outbox.ErrPartitioned)
}

// Two transactions that record an event of the same id: one waits for the other, and only one has it.
func TestUniqueEventIDsAtOnce(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	require.NoError(t, c.migrate(background, outbox.MigrateConfig{UniqueEventIDs: true}))
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		wg.Go(func() {
			errs[i] = pgx.BeginFunc(background, c.db, func(tx pgx.Tx) error { return c.rec.Record(background, tx, withID(uuid.UUID{7})) })
		})
	}
	wg.Wait()
	rejected := slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	require.Len(t, rejected, 7)
	for _, err := range rejected {
		require.ErrorIs(t, err, outbox.ErrDuplicateEvent)
	}
	require.Len(t, c.ids(t), 1)
}

// While an index is built writers go on, also those that come while the build waits for an open transaction. A build
// that has ended in between is found and done again, and of many processes one builds.
func TestAggregateIndex(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	c := newCounter(t, parcels(t))
	indexed := outbox.MigrateConfig{AggregateIndex: true}
	c.commit(t, background, c.rec, good)
	require.False(t, c.hasAggregateIndex(t))

	open := c.begin(t)
	require.NoError(t, c.rec.Record(background, open, good))
	ctx, kill := context.WithCancel(background)
	ended := make(chan error, 1)
	go func() { ended <- c.migrate(ctx, indexed) }()
	require.Eventually(t, func() bool { return c.indexOf(t, "outbox_aggregate_idx") != "" }, testenv.Patience, 5*time.Millisecond)
	for range 20 {
		c.commit(t, background, c.rec, good)
	}
	require.Contains(t, c.indexOf(t, "outbox_aggregate_idx"), "INVALID", "it waits for the transaction that is open")
	kill()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.False(t, c.hasAggregateIndex(t))

	errs := make([]error, 4)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = c.migrate(background, indexed) })
	}
	c.commit(t, background, c.rec, good)
	require.NoError(t, open.Commit(background))
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	require.True(t, c.hasAggregateIndex(t))
	require.NotContains(t, c.indexOf(t, "outbox_aggregate_idx"), "INVALID")

	// What was outbox becomes a partition, whose index becomes a part of the new one.
	require.NoError(t, c.migrate(background, outbox.MigrateConfig{PartitionRows: 100}))
	require.False(t, c.hasAggregateIndex(t))
	require.NoError(t, c.migrate(background, indexed))
	require.True(t, c.hasAggregateIndex(t))
	require.Contains(t, c.indexOf(t, "outbox_aggregate_idx"), "ON ONLY")
}

// Every partition has its part of the index, those that are made later too; and the lookup goes by it.
func TestAggregateIndexOfPartitions(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	c := newCounter(t, parcels(t))
	require.NoError(t, c.migrate(background, outbox.MigrateConfig{PartitionRows: 50}))
	var events []outbox.DomainEvent
	for n := range 300 {
		events = append(events, parcel{ID: strconv.Itoa(n % 100), Sent: noon})
	}
	c.commit(t, background, c.rec, events...)
	open := c.begin(t)
	require.NoError(t, c.rec.Record(background, open, good))
	ended := make(chan error, 1)
	go func() { ended <- c.migrate(background, outbox.MigrateConfig{AggregateIndex: true}) }()
	for range 5 {
		c.commit(t, background, c.rec, good)
	}
	require.NoError(t, open.Commit(background))
	require.NoError(t, <-ended)
	require.True(t, c.hasAggregateIndex(t))
	for range 3 {
		c.commit(t, background, c.rec, events...)
		_, err := c.db.Exec(background, c.sql(`SELECT {s}.outbox_make_partitions()`))
		require.NoError(t, err)
	}
	require.True(t, c.hasAggregateIndex(t))
	i, err := outboxops.NewInspector(c.db, outboxops.InspectorConfig{Schema: c.schema})
	require.NoError(t, err)
	found, err := i.Events(background, outboxops.EventFilter{AggregateType: "Parcel", AggregateID: "7"}, outboxops.EventPage{})
	require.NoError(t, err)
	require.Len(t, found, 12)
	require.True(t, slices.IsSortedFunc(found, func(a, b outboxops.RecordedEvent) int { return int(b.OutboxID - a.OutboxID) }))
}
