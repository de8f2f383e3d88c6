package outbox

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Partition is a part of a table outbox that is partitioned by ranges of ids.
type Partition struct {
	// Name of its table.
	Name string
	// First is its lowest id, and Behind the one behind its highest; the smallest and
	// the largest int64 where it has no bound.
	First, Behind int64
	// Bytes is what it takes on disk, with its indexes.
	Bytes int64
	// Current is set for the one that has the newest event. Those behind it are made
	// ahead of need.
	Current bool
}

const sqlPartitionSizes = `
SELECT name, first, behind, bytes, coalesce(newest >= first AND newest < behind, false)
  FROM (SELECT c.relname::text AS name, pg_total_relation_size(c.oid) AS bytes,
               coalesce(substring(e.bound FROM 'FROM \(''?(-?\d+)')::bigint, -9223372036854775808) AS first,
               coalesce(substring(e.bound FROM 'TO \(''?(-?\d+)')::bigint, 9223372036854775807) AS behind
          FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
         CROSS JOIN LATERAL pg_get_expr(c.relpartbound, c.oid) AS e (bound)
         WHERE i.inhparent = to_regclass('{schema}.outbox') AND e.bound <> 'DEFAULT') AS p,
       (SELECT max(id) AS newest FROM {schema}.outbox) AS o
 ORDER BY first`

// Partitions returns the partitions of outbox, in the order of their ids; none of a
// plain table.
func (i *Inspector) Partitions(ctx context.Context) ([]Partition, error) {
	rows, err := i.db.Query(ctx, i.sql.partitions)
	if err == nil {
		var all []Partition
		if all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[Partition]); err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("outbox: inspect partitions: %w", err)
}
