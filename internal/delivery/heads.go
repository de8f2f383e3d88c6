package delivery

import (
	"context"
	"fmt"
	"math"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// sqlHeadless finds keys without a head among the next $2 keys with parked rows after key $1. Each key is
// one step in the index, however many rows it has.
var sqlHeadless = `
WITH RECURSIVE waiting AS (
    SELECT $1::bigint AS order_key, NULL::text AS consumer_group, 0 AS n
     UNION ALL
    SELECT next.order_key, next.consumer_group, waiting.n + 1 FROM waiting
     CROSS JOIN LATERAL (
           SELECT d.order_key, d.consumer_group FROM {schema}.event_delivery AS d
            WHERE d.order_key > waiting.order_key AND d.status = 'PARKED'
            ORDER BY d.order_key, d.id LIMIT 1) AS next
     WHERE waiting.n < $2
)
SELECT (SELECT pg_catalog.array_agg(w.order_key) FROM waiting AS w
         WHERE w.consumer_group = $3::text
           AND (SELECT d.id FROM {schema}.event_delivery AS d WHERE ` + ofKey("w.order_key") + ` AND ` + head + ` AND d.consumer_group = $3::text
                 ORDER BY d.order_key DESC, d.id DESC LIMIT 1) IS NULL),
       (SELECT order_key FROM waiting WHERE n = $2)`

// RepairHeads promotes the first row of keys whose open rows are all parked. Such keys exist only if a
// process was gone between FinishIn and Promote, or if the table was changed from outside. It checks up to
// limit keys after the key behind. It returns the last of them, for the next call, or the smallest possible
// key if no keys are left.
func (s *Store) RepairHeads(ctx context.Context, behind int64, limit int) (last int64, repaired int64, err error) {
	var headless []int64
	var end pgtype.Int8
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlHeadless, behind, limit, s.group).QueryRow(func(row pgx.Row) error { return row.Scan(&headless, &end) })
	})
	last = math.MinInt64
	if end.Valid {
		last = end.Int64
	}
	if err == nil && len(headless) > 0 {
		err = s.transact(ctx, func(b *pgx.Batch) {
			b.Queue(s.sqlPromote, s.group, headless, nil).QueryRow(func(row pgx.Row) error { return row.Scan(&repaired) })
		})
	}
	if err != nil {
		return behind, 0, fmt.Errorf("look for deliveries without a head: %w", err)
	}
	return last, repaired, nil
}
