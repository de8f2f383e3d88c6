package retention_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/retention"
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
