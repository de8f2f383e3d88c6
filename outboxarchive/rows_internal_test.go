package outboxarchive

import (
	"cmp"
	"context"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The cost of a page depends only on its rows. This holds if PostgreSQL has no statistics, and if they are
// older than the newest rows.
func TestPageIsBounded(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	ctx := context.Background()
	for _, partitionRows := range []int64{0, 5000} {
		db, schema := testenv.Schema(t)
		require.NoError(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: schema, PartitionRows: partitionRows}))
		table, err := NewTable(db, TableConfig{Schema: schema, OutboxSchema: schema})
		require.NoError(t, err)
		require.NoError(t, table.Ensure(ctx))
		insert := func(n int, into, at string) {
			t.Helper()
			size, two := "", ""
			if into == "outbox_archive" {
				size, two = ", size", ", 2"
			}
			_, err := db.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.`+into+` (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at`+size+`)
				SELECT (SELECT coalesce(max(id), 0) FROM {schema}.`+into+`) + g, gen_random_uuid(), 'a.b.c.v1', 's', 'Order', 'k' || g % 50, '{}', 'application/json', now(), `+at+two+` FROM generate_series(1, $1) AS g`, schema), n)
			require.NoError(t, err)
		}
		insert(10_000, "outbox", "now()")
		insert(10_000, "outbox_archive", "now()")
		recorded := newRowReader(db, pg.InSchema(sqlRecordedRows, schema))
		for _, filter := range []Filter{{}, {Since: time.Now().Add(-time.Hour)}, {AggregateType: "Order", AggregateID: "k7"}, {Types: []string{"a.b.c.v1"}}} {
			requireBounded(t, recorded, filter, 3000)
			requireBounded(t, table.reader, filter, 3000)
		}
		for _, sql := range []string{`UPDATE {schema}.outbox_archive SET created_at = created_at - interval '2 h'`, `ANALYZE {schema}.outbox`, `ANALYZE {schema}.outbox_archive`} {
			_, err := db.Exec(ctx, pg.InSchema(sql, schema))
			require.NoError(t, err)
		}
		insert(10_000, "outbox", "now() + interval '1 h'")
		insert(10_000, "outbox_archive", "now() + interval '1 h'")
		requireBounded(t, recorded, Filter{Since: time.Now().Add(time.Minute)}, 12_000)
		requireBounded(t, table.reader, Filter{Since: time.Now().Add(time.Minute)}, 12_000)
	}
}

var buffersRead = regexp.MustCompile(`Buffers: shared hit=(\d+)(?: read=(\d+))?`)

// requireBounded requires that PostgreSQL reads few buffers for a page behind an id.
func requireBounded(t *testing.T, r rowReader, f Filter, after int64) {
	t.Helper()
	var plan []string
	require.NoError(t, pg.Query(context.Background(), r.db, f.settings(), func(rows pgx.Rows) (err error) {
		plan, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	}, "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF) "+r.page, f.args(place{after, lastUUID}, 20)...))
	found := buffersRead.FindStringSubmatch(strings.Join(plan, "\n"))
	require.NotEmpty(t, found, plan)
	n := 0
	for _, text := range found[1:] {
		part, err := strconv.Atoi(cmp.Or(text, "0"))
		require.NoError(t, err)
		n += part
	}
	require.Less(t, n, 80, "%v\n%s", f, strings.Join(plan, "\n"))
}
