package outbox

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
func (d *cursorFixture) cleanerOf(t *testing.T, keep RetentionConfig, log *slog.Logger) *retention.Cleaner {
	t.Helper()
	r, l := d.cleaning(t, keep)
	cfg := retention.CleanerConfig{Name: l.Relay, Rules: keep.withDefaults().rules(), Poll: time.Second}
	c := retention.NewCleaner(lease.Leadership{Lease: l.Lease, Held: context.Background(), StatementTimeout: 5 * time.Minute}, cfg, r, func() bool { return false }, log)
	c.Published = retention.Scan{Batch: c.RemovePublished, Pause: func(time.Duration) bool { return true }}
	return c
}

// cannotRead adds failures of events whose rows no relay could read.
func (d *cursorFixture) cannotRead(t *testing.T, status string, ids ...int64) {
	t.Helper()
	d.exec(t, `
		INSERT INTO {schema}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, content_type,
		       occurred_at, created_at, status, error_class)
		SELECT id, 'b-events/k', event_id, event_type, source, aggregate_type, aggregate_id, content_type, occurred_at, created_at, $1, 'unreadable_row'
		  FROM {schema}.outbox WHERE id = ANY ($2)`, status, ids)
}

// The payload of an event that no relay could read is in outbox only, so its row stays
// until an operator has decided.
func TestUnreadableRowsStay(t *testing.T) {
	t.Parallel()
	d, ctx := newCursorFixture(t), context.Background()
	d.insert(t, 6)
	d.unsent(t, "default")
	d.age(t, "outbox", "created_at", "8 days")
	d.cannotRead(t, StatusDead, 2, 5)
	d.cannotRead(t, StatusResolved, 3)
	r, l := d.cleaning(t, RetentionConfig{BatchSize: 4})
	for _, after := range []int64{0, 4} {
		_, err := r.Published(ctx, l, after)
		require.NoError(t, err)
	}
	require.Equal(t, []int64{2, 5}, d.ids(t, "outbox"))
	d.exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved' WHERE outbox_id = 2`)
	d.exec(t, `UPDATE {schema}.outbox_failed SET payload = '{}', error_class = NULL, status = 'parked' WHERE outbox_id = 5`)
	_, err := r.Published(ctx, l, 0)
	require.NoError(t, err)
	require.Empty(t, d.ids(t, "outbox"))
}

// A row that stays keeps its partition, and no other row or partition.
func TestUnreadableRowKeepsItsPartition(t *testing.T) {
	t.Parallel()
	d, ctx := full(t), context.Background()
	d.update(t, `UPDATE {schema}.outbox SET size = 2`)
	d.unsent(t, "default")
	d.cannotRead(t, StatusDead, 3)
	c := d.cleanerOf(t, RetentionConfig{BatchSize: 4}, slog.New(slog.DiscardHandler))
	removed, err := c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 18, removed)
	require.Equal(t, []int64{3, 20, 21, 22, 23, 24, 25}, d.ids(t, "outbox"))
	require.True(t, d.has(t, "min_10"))
	require.False(t, d.has(t, "10_20"))
	d.exec(t, `UPDATE {schema}.outbox_failed SET status = 'resolved'`)
	_, err = c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.Equal(t, []int64{20, 21, 22, 23, 24, 25}, d.ids(t, "outbox"))
	require.False(t, d.has(t, "min_10"))
}

// An event that cannot be printed cannot be archived. It stays, which the log says, and the
// others are archived and go.
func TestUnreadableRowStopsNoArchive(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	d, ctx := newCursorFixture(t), context.Background()
	d.insert(t, 5)
	d.unsent(t, "default")
	d.update(t, `UPDATE {schema}.outbox SET payload = $1::text::jsonb WHERE id = 3`, unprintable)
	d.age(t, "outbox", "created_at", "8 days")
	var archived []int64
	log := new(testenv.Buffer)
	c := d.cleanerOf(t, RetentionConfig{Archive: func(_ context.Context, _ pgx.Tx, rows []ArchivedEvent) error {
		for _, e := range rows {
			archived = append(archived, e.OutboxID)
		}
		return nil
	}}, slog.New(slog.NewTextHandler(log, nil)))
	removed, err := c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 4, removed)
	require.Equal(t, []int64{1, 2, 4, 5}, archived)
	require.Equal(t, []int64{3}, d.ids(t, "outbox"))
	require.Contains(t, log.String(), "cannot be archived")
	require.Contains(t, log.String(), "id=3")
}

// An archive gets no more at once than there is memory for.
func TestArchiveIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	d, ctx := newCursorFixture(t), context.Background()
	d.insert(t, 40)
	d.update(t, `UPDATE {schema}.outbox SET size = 2`)
	d.unsent(t, "default")
	large := `"` + strings.Repeat("x", 1<<20) + `"`
	d.update(t, `UPDATE {schema}.outbox SET payload = $1::text::jsonb, size = CASE WHEN id <= 20 THEN $2 ELSE 0 END`, large, len(large))
	d.age(t, "outbox", "created_at", "8 days")
	most, archived := 0, 0
	c := d.cleanerOf(t, RetentionConfig{Archive: func(_ context.Context, _ pgx.Tx, rows []ArchivedEvent) error {
		most, archived = max(most, len(rows)), archived+len(rows)
		return nil
	}}, slog.New(slog.DiscardHandler))
	removed, err := c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 40, removed)
	require.Equal(t, 40, archived)
	require.LessOrEqual(t, most, 2*retention.MaxArchiveBytes>>20)
	require.Empty(t, d.ids(t, "outbox"))
}
