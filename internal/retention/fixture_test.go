package retention_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/testenv"
)

const day = 24 * time.Hour

// keep has the defaults of RetentionConfig of the package outbox.
var keep = retention.Rules{
	PublishedFor: 7 * day, CursorsFor: 7 * day, ResolvedFor: 30 * day, HandledFor: 31 * day, AuditedFor: 365 * day, DeliveredFor: 7 * day,
	BatchSize: 1000,
}

// inBatches is keep with batches of so many rows.
func inBatches(rows int) retention.Rules {
	rules := keep
	rules.BatchSize = rows
	return rules
}

// archive is the Archive of rules.
type archive = func(ctx context.Context, tx pgx.Tx, rows []retention.Row) error

// archiving is inBatches with an Archive.
func archiving(rows int, to archive) retention.Rules {
	rules := inBatches(rows)
	rules.Archive = to
	return rules
}

// fixture has the tables of a test, and what relays do with them.
type fixture struct{ *testenv.Tables }

func newFixture(t *testing.T) *fixture {
	t.Helper()
	return &fixture{testenv.NewTables(t)}
}

// cleaning returns what removes rows of the fixture, with a lease to prove.
func (d *fixture) cleaning(t *testing.T, rules retention.Rules) (*retention.Store, *retention.Proof) {
	t.Helper()
	l, err := lease.NewStore(d.DB, d.Schema, "cleaner", time.Minute).Acquire(context.Background())
	require.NoError(t, err)
	return retention.NewStore(d.DB, d.Schema, rules), &retention.Proof{Lease: l, Relay: "cleaner"}
}

// arrive takes the lease of a relay and loads its position.
func (d *fixture) arrive(t *testing.T, relay string) (*cursor.Store, *lease.Lease, cursor.Position) {
	t.Helper()
	ctx := context.Background()
	d.Exec(t, `UPDATE {schema}.outbox_lease SET expires_at = '-infinity' WHERE name = $1`, relay)
	l, err := lease.NewStore(d.DB, d.Schema, relay, time.Minute).Acquire(ctx)
	require.NoError(t, err)
	c := cursor.NewStore(d.DB, d.Schema, relay)
	p, err := c.Load(ctx, l)
	require.NoError(t, err)
	return c, l, p
}

// sendUpTo lets a relay open a window and drain it up to an id.
func (d *fixture) sendUpTo(t *testing.T, relay string, last int64) {
	t.Helper()
	ctx := context.Background()
	c, l, p := d.arrive(t, relay)
	p, _, _, err := c.Open(ctx, l, p, 0)
	require.NoError(t, err)
	p.Last, p.Highest = last, last
	_, err = c.Move(ctx, l, p, nil)
	require.NoError(t, err)
}

// send lets a relay, which has no open window, send all events. It returns their ids.
func (d *fixture) send(t *testing.T, relay string) (ids []int64) {
	t.Helper()
	ctx := context.Background()
	c, l, p := d.arrive(t, relay)
	require.Empty(t, p.Window)
	for {
		var err error
		p, _, _, err = c.Open(ctx, l, p, 0)
		require.NoError(t, err)
		if p.Window == "" {
			return ids
		}
		left, err := cursor.UnpagedOf(p)
		require.NoError(t, err)
		for len(left.Ranges) > 0 {
			var page []int64
			page, left, err = c.Page(ctx, p, left, 100)
			require.NoError(t, err)
			ids = append(ids, page...)
		}
		slices.Sort(ids)
		p.Last = slices.Max(ids)
		p.Highest = max(p.Highest, p.Last)
	}
}

// age makes all rows of a table older.
func (d *fixture) age(t *testing.T, table, column, by string) {
	t.Helper()
	d.Update(t, fmt.Sprintf(`UPDATE {schema}.%s SET %s = %[2]s - '%s'::interval`, table, column, by))
}

// newPartitionsFixture returns a fixture whose outbox has partitions of so many ids.
func newPartitionsFixture(t *testing.T, rows int64) *fixture {
	t.Helper()
	d := newFixture(t)
	require.NoError(t, outbox.Migrate(context.Background(), d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: rows}))
	return d
}

// parts returns the names of all partitions, the default one too.
func (d *fixture) parts(t *testing.T) []string {
	t.Helper()
	rows, err := d.DB.Query(context.Background(), pg.InSchema(`
		SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
		 WHERE i.inhparent = '{schema}.outbox'::regclass ORDER BY c.relname`, d.Schema))
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

// has reports whether there is a partition of these ids.
func (d *fixture) has(t *testing.T, ids string) bool {
	return slices.Contains(d.parts(t), "outbox_"+ids)
}

var errEmptied = errors.New("emptied only")

func dropWhole(r *retention.Store, ctx context.Context, l *retention.Proof, v *retention.Review) error {
	dropped, err := r.Drop(ctx, l, v, true)
	if err == nil && !dropped {
		err = errEmptied
	}
	return err
}

// first returns the lowest partition, reviewed as far as it goes.
func (d *fixture) first(t *testing.T, r *retention.Store, l *retention.Proof) *retention.Review {
	t.Helper()
	ctx := context.Background()
	all, err := r.List(ctx)
	require.NoError(t, err)
	v, err := r.BeginReview(ctx, all[0])
	require.NoError(t, err)
	if v == nil {
		return nil
	}
	d.reviewOn(t, r, l, v)
	return v
}

func (d *fixture) reviewOn(t *testing.T, r *retention.Store, l *retention.Proof, v *retention.Review) {
	t.Helper()
	for ok := true; ok && !v.Done; {
		var err error
		ok, err = r.ReviewBatch(context.Background(), l, v)
		require.NoError(t, err)
	}
}

// full returns a fixture with two full partitions of ten ids and some of a third, all
// old.
func full(t *testing.T) *fixture {
	t.Helper()
	d := newPartitionsFixture(t, 10)
	d.Insert(t, 25)
	d.age(t, "outbox", "created_at", "8 days")
	return d
}
