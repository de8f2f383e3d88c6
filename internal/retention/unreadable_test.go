package retention_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/retention"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// cleanerOf returns a cleaner that has the fixture's lease and rests between no batches.
func (d *fixture) cleanerOf(t *testing.T, rules retention.Rules, log *slog.Logger) *retention.Cleaner {
	t.Helper()
	r, l := d.cleaning(t, rules)
	cfg := retention.CleanerConfig{Name: l.Relay, Rules: rules, Poll: time.Second}
	c := retention.NewCleaner(lease.Leadership{Lease: l.Lease, Held: context.Background(), StatementTimeout: 5 * time.Minute}, cfg, r, func() bool { return false }, log)
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
