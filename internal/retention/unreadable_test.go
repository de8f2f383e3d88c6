package retention_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// cleanerOf returns a cleaner that has the fixture's lease and rests between no batches.
func (d *fixture) cleanerOf(t *testing.T, rules retention.Rules, log *slog.Logger) *retention.Cleaner {
	t.Helper()
	r, l := d.cleaning(t, rules)
	return d.cleanerOn(r, l, log)
}

// cleanerOn is cleanerOf with a store.
func (d *fixture) cleanerOn(r *retention.Store, l *retention.Proof, log *slog.Logger) *retention.Cleaner {
	cfg := retention.CleanerConfig{Name: l.Relay, Rules: r.Cfg, Poll: time.Second}
	c := retention.NewCleaner(lease.Leadership{Lease: l.Lease, Held: context.Background(), StatementTimeout: 5 * time.Minute}, cfg, r, func() bool { return false }, log, outage.NewLogs(log))
	c.Published = retention.Scan{Batch: c.RemovePublished, Pause: func(time.Duration) bool { return true }}
	return c
}

// cannotRead adds failures of events whose rows no relay could read.
func (d *fixture) cannotRead(t *testing.T, status string, ids ...int64) {
	t.Helper()
	d.Exec(t, `
		INSERT INTO {schema}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, content_type,
		       occurred_at, created_at, status, error_class)
		SELECT id, 'b-events/k', event_id, event_type, source, aggregate_type, aggregate_id, content_type, occurred_at, created_at, $1, 'unreadable_row'
		  FROM {schema}.outbox WHERE id = ANY ($2)`, status, ids)
}

// The payload of an event that no relay could read is in outbox only, so its row stays
// until an operator has decided.
func TestUnreadableRowsStay(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 6)
	d.send(t, "default")
	d.age(t, "outbox", "created_at", "8 days")
	d.cannotRead(t, "dead", 2, 5)
	d.cannotRead(t, "resolved", 3)
	r, l := d.cleaning(t, inBatches(4))
	for _, after := range []int64{0, 4} {
		_, err := r.Published(ctx, l, after)
		require.NoError(t, err)
	}
	require.Equal(t, []int64{2, 5}, d.IDs(t, "outbox"))
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved' WHERE outbox_id = 2`)
	d.Exec(t, `UPDATE {schema}.outbox_failed SET payload = '{}', error_class = NULL, status = 'parked' WHERE outbox_id = 5`)
	_, err := r.Published(ctx, l, 0)
	require.NoError(t, err)
	require.Empty(t, d.IDs(t, "outbox"))
}

// A row that stays keeps its partition, and no other row or partition.
func TestUnreadableRowKeepsItsPartition(t *testing.T) {
	t.Parallel()
	d, ctx := full(t), context.Background()
	d.send(t, "default")
	d.cannotRead(t, "dead", 3)
	c := d.cleanerOf(t, inBatches(4), slog.New(slog.DiscardHandler))
	removed, err := c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 18, removed)
	require.Equal(t, []int64{3, 20, 21, 22, 23, 24, 25}, d.IDs(t, "outbox"))
	require.True(t, d.has(t, "min_10"))
	require.False(t, d.has(t, "10_20"))
	d.Exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved'`)
	_, err = c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.Equal(t, []int64{20, 21, 22, 23, 24, 25}, d.IDs(t, "outbox"))
	require.False(t, d.has(t, "min_10"))
}

// An event that cannot be printed cannot be archived. It stays, which the log says, and the
// others are archived and go.
func TestUnreadableRowStopsNoArchive(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 5)
	d.send(t, "default")
	testenv.AllowUnprintable(t, d.DB, d.Schema)
	d.Update(t, `UPDATE {schema}.outbox SET payload = $1::text::jsonb WHERE id = 3`, testenv.Unprintable)
	d.age(t, "outbox", "created_at", "8 days")
	var archived []int64
	log := new(testenv.Buffer)
	c := d.cleanerOf(t, archiving(keep.BatchSize, func(_ context.Context, _ pgx.Tx, rows []retention.Row) error {
		for _, e := range rows {
			archived = append(archived, e.OutboxID)
		}
		return nil
	}), slog.New(slog.NewTextHandler(log, nil)))
	removed, err := c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 4, removed)
	require.Equal(t, []int64{1, 2, 4, 5}, archived)
	require.Equal(t, []int64{3}, d.IDs(t, "outbox"))
	require.Contains(t, log.String(), "cannot be archived")
	require.Contains(t, log.String(), "id=3")
}

// That PostgreSQL does not answer in time which event of a batch it cannot print says nothing about the first one.
func TestSlowCheckKeepsNoEvent(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 5)
	d.send(t, "default")
	d.age(t, "outbox", "created_at", "8 days")
	const timeout = 2 * time.Second
	ended := make(chan error, 1)
	log := new(testenv.Buffer)
	c := d.cleanerOf(t, archiving(1, func(context.Context, pgx.Tx, []retention.Row) error {
		go func() {
			ended <- pgx.BeginFunc(ctx, d.DB, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, pg.InSchema(`LOCK TABLE {schema}.outbox`, d.Schema))
				time.Sleep(timeout * 3 / 2)
				return err
			})
		}()
		require.Eventually(t, func() bool { // the lock is the next in the queue
			return d.Count(t, `outbox_lease WHERE EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = '"`+d.Schema+`".outbox'::regclass)`) > 0
		}, testenv.Patience, time.Millisecond)
		return context.DeadlineExceeded
	}), slog.New(slog.NewTextHandler(log, nil)))
	c.StatementTimeout = timeout
	_, err := c.CleanOutbox(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, <-ended)
	require.NotContains(t, log.String(), "cannot be archived")
	require.Equal(t, []int64{1, 2, 3, 4, 5}, d.IDs(t, "outbox"))
}

// An event that is larger than what an archive gets at once is not read. It stays, which the log says once, and the
// others are archived and go, also those of its partition.
func TestHugeRowStopsNoArchive(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		fixture func(*testing.T) *fixture
		removed int64
		left    []int64
	}{
		"plain":       {func(t *testing.T) *fixture { d := newFixture(t); d.Insert(t, 5); return d }, 4, []int64{3}},
		"partitioned": {full, 18, []int64{3, 20, 21, 22, 23, 24, 25}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ctx := test.fixture(t), context.Background()
			d.send(t, "default")
			d.Update(t, `UPDATE {schema}.outbox SET payload = NULL, payload_bytes = $1 WHERE id = 3`, make([]byte, retention.MaxArchiveBytes+1))
			if name == "plain" {
				d.age(t, "outbox", "created_at", "8 days")
			}
			archived := map[int64]bool{}
			log := new(testenv.Buffer)
			c := d.cleanerOf(t, archiving(4, func(_ context.Context, _ pgx.Tx, rows []retention.Row) error {
				for _, e := range rows {
					archived[e.OutboxID] = true
				}
				return nil
			}), slog.New(slog.NewTextHandler(log, nil)))
			for _, want := range []int64{test.removed, 0} {
				removed, err := c.CleanOutbox(ctx)
				require.NoError(t, err)
				require.Equal(t, want, removed)
			}
			require.Equal(t, test.left, d.IDs(t, "outbox"))
			require.False(t, archived[3])
			require.Len(t, archived, int(test.removed))
			require.Equal(t, 1, strings.Count(log.String(), "too large for the archive"))
			require.Contains(t, log.String(), "count=1 first_id=3 at_most=16777216")
			if name == "partitioned" {
				require.True(t, d.has(t, "min_10"))
				d.Exec(t, `DELETE FROM {schema}.outbox WHERE id = 3`) // by an operator
				_, err := c.CleanOutbox(ctx)
				require.NoError(t, err)
				require.False(t, d.has(t, "min_10"))
			}
		})
	}
}

// Events that are too large for the archive are counted in the log, keep no other row, and take no room in a batch.
func TestManyHugeRowsStopNoArchive(t *testing.T) {
	t.Parallel()
	const most = 64 << 10
	for name, test := range map[string]struct {
		fixture func(*testing.T) *fixture
		removed int
		batches int // of the archive
	}{
		"plain":       {newFixture, 40, 1},
		"partitioned": {func(t *testing.T) *fixture { return newPartitionsFixture(t, 40) }, 39, 6}, // the partition of 240 is not full
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ctx := test.fixture(t), context.Background()
			d.Insert(t, 240)
			d.send(t, "default")
			d.Update(t, `UPDATE {schema}.outbox SET payload = NULL, payload_bytes = $1 WHERE id % 6 <> 0`, make([]byte, 100<<10))
			d.age(t, "outbox", "created_at", "8 days")
			archived, batches := map[int64]bool{}, 0
			log := new(testenv.Buffer)
			r, l := d.cleaning(t, archiving(keep.BatchSize, func(_ context.Context, _ pgx.Tx, rows []retention.Row) error {
				batches++
				for _, e := range rows {
					archived[e.OutboxID] = true
				}
				return nil
			}))
			r.Most = most
			c := d.cleanerOn(r, l, slog.New(slog.NewTextHandler(log, nil)))
			removed, err := c.CleanOutbox(ctx)
			require.NoError(t, err)
			require.EqualValues(t, test.removed, removed)
			require.Len(t, archived, test.removed)
			require.Equal(t, test.batches, batches)
			require.Len(t, d.IDs(t, "outbox"), 240-test.removed)
			require.Equal(t, 1, strings.Count(log.String(), "WARN"))
			require.Contains(t, log.String(), "count=200 first_id=1 at_most=65536")
			_, err = c.CleanOutbox(ctx)
			require.NoError(t, err)
			require.Equal(t, 1, strings.Count(log.String(), "WARN"), "the scans go on where they ended")
		})
	}
}

// An archive gets no more at once than there is memory for.
func TestArchiveIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Insert(t, 40)
	d.send(t, "default")
	large := `"` + strings.Repeat("x", 1<<20) + `"`
	d.Update(t, `UPDATE {schema}.outbox SET payload = $1::text::jsonb`, large)
	d.age(t, "outbox", "created_at", "8 days")
	most, archived := 0, 0
	c := d.cleanerOf(t, archiving(keep.BatchSize, func(_ context.Context, _ pgx.Tx, rows []retention.Row) error {
		most, archived = max(most, len(rows)), archived+len(rows)
		return nil
	}), slog.New(slog.DiscardHandler))
	removed, err := c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 40, removed)
	require.Equal(t, 40, archived)
	require.Equal(t, retention.MaxArchiveBytes>>20, most)
	require.Empty(t, d.IDs(t, "outbox"))
}
