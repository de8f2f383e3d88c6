package retention_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A run that began on a plain table goes on when the table has become partitioned: it removes no row that is in the
// same place of another partition.
func TestTableBecomesPartitionedDuringARun(t *testing.T) {
	t.Parallel()
	for name, to := range map[string]archive{
		"plain":    nil,
		"archived": func(context.Context, pgx.Tx, []retention.Row) error { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ctx := newFixture(t), context.Background()
			for id := range 20 { // without an update, they have the first places
				d.Exec(t, insertAt, id+1)
			}
			d.Exec(t, `SELECT setval('{schema}.outbox_id_seq', 20)`)
			require.Len(t, d.send(t, "default"), 20)
			var unsent []int64
			c := d.cleanerOf(t, archiving(5, to), slog.New(slog.DiscardHandler))
			c.Published.Pause = func(time.Duration) bool {
				if unsent == nil {
					require.NoError(t, outbox.Migrate(ctx, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 10}))
					d.Exec(t, `SELECT setval('{schema}.outbox_id_seq', (SELECT cut FROM {schema}.outbox_partitioning))`)
					d.Insert(t, 20)
					for _, id := range d.IDs(t, "outbox") {
						if id > 20 {
							unsent = append(unsent, id)
						}
					}
				}
				return true
			}
			removed, err := c.CleanOutbox(ctx)
			require.NoError(t, err)
			require.EqualValues(t, 20, removed)
			require.Len(t, unsent, 20)
			require.Equal(t, unsent, d.IDs(t, "outbox"))
		})
	}
}

// A range of ids that has been divided since it was listed spans several partitions.
func TestPartRemovesItsOwnRowsOfSeveralPartitions(t *testing.T) {
	t.Parallel()
	d, ctx := full(t), context.Background()
	d.send(t, "default")
	d.cannotRead(t, "dead", 12)
	r, l := d.cleaning(t, keep)
	s, err := r.PublishedIn(ctx, l, 0, 30)
	require.NoError(t, err)
	require.EqualValues(t, 24, s.Removed)
	require.Equal(t, []int64{12}, d.IDs(t, "outbox"))
}

// locked returns a fixture with three full partitions of ten ids and some of a fourth, all old and sent. A prepared
// transaction has a lock on the first one.
func locked(t *testing.T) (d *fixture, prepared string) {
	t.Helper()
	d, ctx := newPartitionsFixture(t, 10), context.Background()
	tx := d.BeginInsert(t, 2)
	prepared = d.Schema
	_, err := tx.Exec(ctx, fmt.Sprintf(`PREPARE TRANSACTION '%s'`, prepared))
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = d.DB.Exec(ctx, fmt.Sprintf(`ROLLBACK PREPARED '%s'`, prepared)) }) // fails where the test has ended it
	d.Insert(t, 33)
	d.age(t, "outbox", "created_at", "8 days")
	require.Len(t, d.send(t, "default"), 33)
	return d, prepared
}

// A partition that another transaction has locked delays no other one. Its rows are archived once, and the log says
// after some runs who has locked it.
func TestLockedPartitionDelaysNoOther(t *testing.T) {
	t.Parallel()
	d, prepared := locked(t)
	ctx, log := context.Background(), new(testenv.Buffer)
	var archived []int64
	c := d.cleanerOf(t, archiving(4, func(_ context.Context, _ pgx.Tx, rows []retention.Row) error {
		for _, e := range rows {
			archived = append(archived, e.OutboxID)
		}
		return nil
	}), slog.New(slog.NewTextHandler(log, nil)))
	removed, err := c.CleanOutbox(ctx)
	require.ErrorIs(t, err, retention.ErrBusy)
	require.EqualValues(t, 20, removed)
	require.Equal(t, []int64{3, 4, 5, 6, 7, 8, 9, 30, 31, 32, 33, 34, 35}, d.IDs(t, "outbox"))
	for range 4 {
		require.NotContains(t, log.String(), "prepared_transaction")
		_, err = c.CleanOutbox(ctx)
		require.ErrorIs(t, err, retention.ErrBusy)
		if strings.Contains(log.String(), "locked") {
			break
		}
	}
	require.Contains(t, log.String(), `prepared_transaction="`+prepared)
	require.Len(t, archived, 27, "each row once")

	_, err = d.DB.Exec(ctx, fmt.Sprintf(`ROLLBACK PREPARED '%s'`, prepared))
	require.NoError(t, err)
	removed, err = c.CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 7, removed)
	for _, ids := range []string{"min_10", "10_20", "20_30"} {
		require.False(t, d.has(t, ids), ids)
	}
}

// A row with a time in the future keeps its partition, and delays no other one.
func TestYoungRowDelaysNoOtherPartition(t *testing.T) {
	t.Parallel()
	for _, ids := range [][]int64{{5}, {9}, {5, 9, 12, 19}} {
		t.Run(fmt.Sprint(ids), func(t *testing.T) {
			t.Parallel()
			d, ctx := newPartitionsFixture(t, 10), context.Background()
			d.Insert(t, 35)
			d.age(t, "outbox", "created_at", "8 days")
			require.Len(t, d.send(t, "default"), 35)
			d.Update(t, `UPDATE {schema}.outbox SET created_at = now() + '1 year'::interval WHERE id = ANY ($1)`, ids)
			log := new(testenv.Buffer)
			c := d.cleanerOf(t, inBatches(4), slog.New(slog.NewTextHandler(log, nil)))
			for range 2 {
				_, err := c.CleanOutbox(ctx)
				require.NoError(t, err)
				require.Equal(t, append(slices.Clone(ids), 30, 31, 32, 33, 34, 35), d.IDs(t, "outbox"))
			}
			require.False(t, d.has(t, "20_30"))
			require.Equal(t, 1, strings.Count(log.String(), "partition=outbox_min_10"), log.String())
		})
	}
}

// Where all rows are young from one partition on, none of them is removed one by one.
func TestYoungPartitionsStay(t *testing.T) {
	t.Parallel()
	d, ctx := newPartitionsFixture(t, 10), context.Background()
	d.Insert(t, 35)
	require.Len(t, d.send(t, "default"), 35)
	d.Update(t, `UPDATE {schema}.outbox SET created_at = now() - '8 days'::interval WHERE id < 12`)
	removed, err := d.cleanerOf(t, inBatches(4), slog.New(slog.DiscardHandler)).CleanOutbox(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 9, removed)
	require.EqualValues(t, 10, d.IDs(t, "outbox")[0])
}
