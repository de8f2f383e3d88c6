package delivery

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
)

// The rows of a key are handled in the order of their ids. So the sequence must not draw an id below one that a
// row has. It does after a restore of rows without their sequence, after logical replication, which leaves
// sequences alone, and after a sequence was set back. PostgreSQL refuses an id that a row has, but not an id
// between those of two rows: such a row would be handled before earlier ones of its key.
//
// Therefore each statement that inserts rows looks for an id above the last one that the sequence has drawn. An
// id that the statement can see was drawn before, so a sequence that was never set back is not below it. The
// look-up ends at the first entry of the index, mostly at none.

// behind is a part of a WITH clause. It has the highest id above the last one that the sequence has drawn, or no
// row. PostgreSQL reports no last value of a sequence that was restarted and has not been used since: then the
// highest id counts as above it, and PassTakenIDs uses the sequence.
const behind = `behind AS MATERIALIZED (
    SELECT d.id FROM {schema}.event_delivery AS d
     WHERE d.id > (SELECT coalesce(pg_catalog.pg_sequence_last_value({delivery_ids}), 0)) ORDER BY d.id DESC LIMIT 1
)`

// rejectedStatus is a status that the table rejects. A statement inserts it if the sequence is behind, so that its
// transaction fails.
const rejectedStatus = "BEHIND"

// ErrSequenceBehind is the error of an insertion while the sequence of event_delivery.id is behind ids that rows
// have. Nothing was inserted. The error has the statement that sets the sequence.
var ErrSequenceBehind = errors.New("the sequence of event_delivery.id is behind ids that are in use")

// mostPassed is the largest number of ids that PassTakenIDs draws at once. PostgreSQL needs less than a second
// for them.
const mostPassed = 1_000_000

// sqlPassIDs draws ids without using them, up to the highest id that a row has, at most $1. It returns the highest
// id above the sequence, or 0, and the last id drawn.
const sqlPassIDs = `
WITH ` + behind + `, gap AS MATERIALIZED (
    SELECT coalesce((SELECT id FROM behind), 0) AS highest, coalesce(pg_catalog.pg_sequence_last_value({delivery_ids}), 0) AS last
)
SELECT gap.highest, max(pg_catalog.nextval({delivery_ids}))
  FROM gap CROSS JOIN LATERAL pg_catalog.generate_series(1, least($1::bigint, greatest(1, gap.highest - gap.last))) GROUP BY gap.highest`

// PassTakenIDs draws ids without using them if err says that the sequence is behind: then the next try inserts
// its rows, or a later one if many ids are taken. It returns [ErrSequenceBehind] with what it did. It returns other
// errors unchanged. Drawing needs no other right than inserting, and never sets a sequence back.
func (s *Store) PassTakenIDs(ctx context.Context, err error) error {
	if !pg.IsDuplicateIn(err, "event_delivery_pkey") && !pg.IsRejectedBy(err, "event_delivery_status") {
		return err
	}
	var highest, drawn int64
	failed := Transact(ctx, s.db, func(b *pgx.Batch) {
		b.Queue(s.sqlPassIDs, mostPassed).QueryRow(func(row pgx.Row) error { return row.Scan(&highest, &drawn) })
	})
	if failed != nil {
		return errors.Join(fmt.Errorf("%w: %w", ErrSequenceBehind, err), fmt.Errorf("draw ids up to those in use: %w", failed))
	}
	return fmt.Errorf("%w: nothing is lost, ids up to %d are drawn and not used, and this is tried again; at once: %s: %w",
		ErrSequenceBehind, drawn, pg.SetSequence(s.schema, "event_delivery", max(highest, drawn)), err)
}
