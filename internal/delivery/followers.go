package delivery

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// sqlFollowers counts the parked rows of key $2, up to $3, and reads the last one of the rows that they wait for. A
// head that has failed is alone. It scans from the end of the key, where few rows are done.
var sqlFollowers = `
SELECT (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d WHERE ` + ofKey("$2::bigint") + ` AND d.status = 'PARKED' AND d.consumer_group = $1::text
                               ORDER BY d.order_key DESC, d.id DESC LIMIT $3) AS f),
       h.id, h.fails
  FROM (SELECT) AS one
  LEFT JOIN LATERAL (SELECT d.id, d.held OR d.last_error_code IS NOT NULL AS fails FROM {schema}.event_delivery AS d
                      WHERE ` + ofKey("$2::bigint") + ` AND ` + head + ` AND d.consumer_group = $1::text
                      ORDER BY d.order_key DESC, d.id DESC LIMIT 1) AS h ON true`

// Followers are the parked rows of a key, and the rows that they wait for.
type Followers struct {
	Parked int   // at most the limit
	Head   int64 // the id of the last row that they wait for; 0 for none
	Fails  bool  // its handler has failed, or it is held
}

// Followers returns the followers of a key, and counts them up to a limit.
func (s *Store) Followers(ctx context.Context, key Key, limit int) (f Followers, err error) {
	var id pgtype.Int8
	var fails pgtype.Bool
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlFollowers, s.group, key.Digest, limit).QueryRow(func(row pgx.Row) error { return row.Scan(&f.Parked, &id, &fails) })
	})
	if err != nil {
		return f, fmt.Errorf("count the parked deliveries of a key: %w", err)
	}
	f.Head, f.Fails = id.Int64, fails.Bool
	return f, nil
}
