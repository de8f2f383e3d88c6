package tables_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// An event is found among 100 million: 100,000 rows of outbox_cursor with 1,000 events each, as a relay with batches of
// 1,000 writes them. Their bytes are those of one row, because a look-up decodes only rows that it finds. In a new
// table the index leads to the row. When retention has removed old rows, and new ones have taken their place, the index
// knows little, and most of the table is read.
func TestFindSentAmong100MillionEvents(t *testing.T) {
	testenv.Long(t)
	const rows, events, parts = 100_000, 1000, 5
	d, ctx := testenv.NewTables(t), context.Background()
	var e tables.SentEncoder
	for i := range events {
		e.Add(tables.Sent{OutboxID: int64(i + 1), Topic: "order-events", Partition: int32(i * 7919 % 104729 % 12), Offset: int64(4_000_000 + i/12)}, time.Now())
	}
	encoded := e.Row()
	fill := func(first, last int) {
		d.Exec(t, `INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch, sent_from, sent_to, sent)
			SELECT n * $3::bigint, '3:3:', n * $3::bigint, 1, 1, (n - 1) * $3::bigint + 1, n * $3::bigint, $4 FROM generate_series($1::bigint, $2::bigint) AS n`,
			first, last, events, encoded.Bytes)
	}
	find := func(id int64) (took time.Duration) {
		took = time.Hour
		for range 3 {
			start := time.Now()
			found, err := d.DB.Query(ctx, pg.InSchema(tables.SQLSent, d.Schema), pg.PlanEachTime, id, id, tables.MostSentBytes)
			require.NoError(t, err)
			places, err := tables.ReadSent(found, func(i int64) bool { return i == id })
			require.NoError(t, err)
			require.Len(t, places[id], 1)
			took = min(took, time.Since(start))
		}
		return took
	}
	fill(1, rows)
	d.Exec(t, `VACUUM (ANALYZE) {schema}.outbox_cursor`)
	fresh := find(rows / 2 * events)
	for part := range parts {
		d.Exec(t, `DELETE FROM {schema}.outbox_cursor WHERE sent_to <= $1`, int64(part+1)*rows/parts*events)
		d.Exec(t, `VACUUM (ANALYZE) {schema}.outbox_cursor`)
		fill(rows+part*rows/parts+1, rows+(part+1)*rows/parts)
	}
	d.Exec(t, `VACUUM (ANALYZE) {schema}.outbox_cursor`)
	reused := find((rows + rows/2) * events)
	var size int64
	require.NoError(t, d.DB.QueryRow(ctx, pg.InSchema(`SELECT pg_table_size('{schema}.outbox_cursor')`, d.Schema)).Scan(&size))
	t.Logf("%d events in %d rows, %d MB: found in %v; after all rows were replaced in %v", rows*events, rows, size>>20, fresh, reused)
	require.Less(t, fresh, 100*time.Millisecond)
	require.Less(t, reused, 2*time.Second)
}
