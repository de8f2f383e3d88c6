package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// sqlFinish calls a function, because its decision needs several statements: it locks the keys, ends the
// rows, and promotes in a later statement.
const sqlFinish = `SELECT {schema}.outbox_finish_deliveries($1::text, $2::text, $3::bigint[], $4::bigint[], $5::bigint[])`

// FinishIn marks rows as done in the transaction that has handled them, and promotes the rows behind them.
// It returns the number of promoted rows. It returns -1 if the isolation level of the transaction forbids
// promotion: then the caller has to call Promote. It returns [ErrLost] if another process has one of the
// rows. The statements of first run before, mostly in the same round trip.
func (s *Store) FinishIn(ctx context.Context, tx pgx.Tx, rows []Delivery, first ...Restoration) (promoted int64, err error) {
	keys, floors := digests(rows)
	err = s.atEnd(ctx, tx, s.sqlFinish, first, func(b *pgx.Batch) {
		b.Queue(s.sqlFinish, s.group, holderOf(rows), idsOf(rows), keys, floors).QueryRow(func(row pgx.Row) error { return row.Scan(&promoted) })
	})
	if err != nil {
		return 0, lost(fmt.Errorf("finish deliveries: %w", err))
	}
	return promoted, nil
}

// atEnd runs statements at the end of a transaction with handlers. It bounds their waits. A COMMIT must follow at once.
// Mostly it takes a single round trip. The statements of first take their own if they undo settings of a handler, or
// if the connection has not run the statement main yet: pgx prepares all statements of a batch before it runs one, also
// those that its cache has dropped meanwhile, and a handler may have set a role that may not use the tables.
func (s *Store) atEnd(ctx context.Context, tx pgx.Tx, main string, first []Restoration, queue func(*pgx.Batch)) error {
	var b pgx.Batch
	session := pg.KnownSession(tx.Conn())
	alone := false
	for _, f := range first {
		alone = f(&b, session) || alone
	}
	if b.Len() > 0 && (alone || !session.HasRun(main)) {
		if err := tx.SendBatch(ctx, &b).Close(); err != nil {
			return err
		}
		b = pgx.Batch{}
	}
	queue(&b)
	session.QueueUnboundIfShared(&b)
	end := s.waits.Begin()
	err := tx.SendBatch(ctx, &b).Close()
	session.NoteRun(main, err == nil)
	return end(err)
}

// sqlLockRows locks rows that are still claimed, in the order of their ids against deadlocks.
const sqlLockRows = `
SELECT d.id FROM {schema}.event_delivery AS d
 WHERE d.id = ANY ($1) AND d.consumer_group = $2::text AND d.status = 'PROCESSING' AND d.locked_by = $3::text
 ORDER BY d.id FOR UPDATE`

// LockIn locks rows until the end of a transaction, so that they are neither renewed nor taken over. It
// returns [ErrLost] if another process has one of them.
func (s *Store) LockIn(ctx context.Context, tx pgx.Tx, rows []Delivery) error {
	var b pgx.Batch
	session := pg.KnownSession(tx.Conn())
	locked := int64(0)
	session.QueueWaits(&b)
	b.Queue(s.sqlLockRows, idsOf(rows), s.group, holderOf(rows)).Exec(affected(&locked))
	session.QueueUnbound(&b)
	end := s.waits.Begin()
	switch err := end(tx.SendBatch(ctx, &b).Close()); {
	case err != nil:
		return fmt.Errorf("lock deliveries: %w", err)
	case locked < int64(len(rows)):
		return ErrLost
	}
	return nil
}

// Finish is FinishIn in a transaction of its own.
func (s *Store) Finish(ctx context.Context, rows []Delivery) (promoted int64, err error) {
	keys, floors := digests(rows)
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlFinish, s.group, holderOf(rows), idsOf(rows), keys, floors).QueryRow(func(row pgx.Row) error { return row.Scan(&promoted) })
	})
	if err != nil {
		return 0, lost(fmt.Errorf("finish deliveries: %w", err))
	}
	return promoted, nil
}

// lost turns the error of outbox_finish_deliveries about missing rows into ErrLost.
func lost(err error) error {
	const objectNotInPrerequisiteState = "55000"
	if pg.Code(err) == objectNotInPrerequisiteState {
		return fmt.Errorf("%w: %w", ErrLost, err)
	}
	return err
}

const sqlPromote = `SELECT {schema}.outbox_promote($1::text, $2::bigint[], $3::bigint[])`

// sqlPromoteBehind promotes the rows behind rows that this transaction has released or ended. It uses a
// floor only if this transaction has found the row with the same claim. Then the claim has survived, and
// with it all earlier commits. Otherwise a crash of PostgreSQL may have forgotten both, and rows below the
// floor may be open again.
const sqlPromoteBehind = `
SELECT {schema}.outbox_promote($1::text, $2::bigint[], ARRAY(
       SELECT CASE WHEN (SELECT true FROM {schema}.event_delivery AS d WHERE d.id = u.id AND d.xmin = pg_current_xact_id()::xid) THEN u.floor ELSE 0 END
         FROM unnest($3::bigint[], $4::bigint[]) WITH ORDINALITY AS u (floor, id, n) ORDER BY u.n))`

// Promote promotes the first row of the keys of rows. It uses no floors, because a crash may have forgotten
// that the rows are done.
func (s *Store) Promote(ctx context.Context, rows []Delivery) (promoted int64, err error) {
	keys, _ := digests(rows)
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlPromote, s.group, keys, nil).QueryRow(func(row pgx.Row) error { return row.Scan(&promoted) })
	})
	if err != nil {
		return 0, fmt.Errorf("promote deliveries: %w", err)
	}
	return promoted, nil
}

// holderOf returns the holder of rows that were claimed together.
func holderOf(rows []Delivery) string {
	if len(rows) == 0 {
		return ""
	}
	return rows[0].Holder
}

func idsOf(rows []Delivery) []int64 {
	ids := make([]int64, len(rows))
	for i := range rows {
		ids[i] = rows[i].ID
	}
	return ids
}

// digests returns the keys of rows, NULL for those without order, and their floors.
func digests(rows []Delivery) (keys []pgtype.Int8, floors []int64) {
	keys, floors = make([]pgtype.Int8, len(rows)), make([]int64, len(rows))
	for i := range rows {
		keys[i], floors[i] = rows[i].Key.value(), rows[i].floor
	}
	return keys, floors
}

// Failure is an attempt that has failed.
type Failure struct {
	Of   Delivery
	Code string
	// Message is the error, bounded.
	Message string
	// Wait is the time before the next attempt.
	Wait time.Duration
	// MaxAttempts is the new maximum of attempts of the delivery, unless its present maximum is higher.
	MaxAttempts int
	// Uncounted is set if the attempt does not count. Postponed is set if the handler has not failed either.
	Uncounted, Postponed bool
	// Last is set if no attempt is left, and the next claim is only for the dead letter.
	Last bool
	// Dead is set if the delivery is not retried. The next row of its key is promoted, unless Held.
	Dead, Held bool
	// DeadLetterOwed is set if the dead letter of a dead delivery was not sent.
	DeadLetterOwed bool
	// DeadLetter is the place of the dead letter if it has the whole record. Then a large value is not kept in the row.
	DeadLetter string
}

// sqlFail gives a row back with its error. It finds nothing if another process has the row. It keeps the rule of
// handling.Task.NoteFailure.
const sqlFail = `
UPDATE {schema}.event_delivery AS d
   SET status = CASE WHEN $6::bool THEN 'DEAD' ELSE 'PENDING' END, held = $7::bool, dead_letter_owed = $13::bool, locked_by = NULL, locked_until = NULL,
       next_retry_at = clock_timestamp() + $5::interval, processed_at = CASE WHEN $6::bool THEN clock_timestamp() END,
       updated_at = clock_timestamp(), last_error_code = $3::text, last_error_message = $4::text, max_attempts = CASE WHEN $11::bool THEN d.attempt_count ELSE greatest(d.max_attempts, $9::int) END,
       attempt_count = CASE WHEN $10::bool THEN d.attempt_count - 1 ELSE d.attempt_count END,
       failed_at = CASE WHEN $12::bool THEN d.failed_at ELSE coalesce(d.failed_at, clock_timestamp()) END,
       witness_after = CASE WHEN $10::bool OR $12::bool THEN d.witness_after ELSE clock_timestamp() END
 WHERE d.id = $1 AND d.locked_by = $2::text AND d.consumer_group = $8::text
RETURNING d.id`

// Fail saves that an attempt has failed. Rest are claimed rows behind it in the same key that were not
// tried; they are parked again. It returns the number of promoted rows, and [ErrLost] if another process
// has the row. A crash of PostgreSQL may forget the failure: then the row is retried, and the attempt does
// not count.
func (s *Store) Fail(ctx context.Context, f Failure, rest []Delivery) (promoted int64, err error) {
	found := false
	err = s.transactAsync(ctx, func(b *pgx.Batch) {
		s.queueStrip(b, &f.Of, f.DeadLetter, time.Time{})
		b.Queue(s.sqlFail, f.Of.ID, f.Of.Holder, f.Code, f.Message, f.Wait, f.Dead, f.Held, s.group, f.MaxAttempts, f.Uncounted, f.Last, f.Postponed, f.DeadLetterOwed).Query(func(rows pgx.Rows) error {
			ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			found = len(ids) > 0
			return err
		})
		if len(rest) > 0 {
			b.Queue(s.sqlRelease, idsOf(rest), f.Of.Holder, s.group, true)
		}
		// A row that is lost may be parked behind rest.
		if f.Of.Key.Ordered && (len(rest) > 0 || f.Dead && !f.Held) {
			b.Queue(s.sqlPromoteBehind, s.group, []int64{f.Of.Key.Digest}, []int64{f.Of.floor}, []int64{f.Of.ID}).QueryRow(func(row pgx.Row) error { return row.Scan(&promoted) })
		}
	})
	if err != nil {
		return 0, fmt.Errorf("write down failed delivery: %w", err)
	}
	if !found {
		return 0, ErrLost
	}
	return promoted, nil
}

// sqlRelease releases rows that were not tried. It subtracts the attempt that their claim has counted. sqlReleaseFree
// leaves out rows that another session has locked.
const (
	release = `
UPDATE {schema}.event_delivery AS d
   SET status = CASE WHEN $4::bool AND d.order_key IS NOT NULL THEN 'PARKED' ELSE 'PENDING' END, locked_by = NULL, locked_until = NULL,
       attempt_count = d.attempt_count - 1, next_retry_at = clock_timestamp(), updated_at = clock_timestamp()`
	sqlRelease = release + `
 WHERE d.id = ANY ($1) AND d.locked_by = $2::text AND d.consumer_group = $3::text`
	sqlReleaseFree = release + `
 WHERE d.locked_by = $2::text AND d.consumer_group = $3::text
   AND d.id = ANY (ARRAY(SELECT f.id FROM {schema}.event_delivery AS f WHERE f.id = ANY ($1) ORDER BY f.id FOR UPDATE SKIP LOCKED))`
)

// Release releases rows that were not tried: they can be claimed at once, and no attempt counts. They are
// parked, and the first row of each key is promoted. Release does not change rows of other processes.
func (s *Store) Release(ctx context.Context, rows []Delivery) error {
	_, err := s.releaseBy(ctx, s.sqlRelease, rows)
	return err
}

// releaseFree is Release of the rows that no other session has locked. It returns the number of released rows.
func (s *Store) releaseFree(ctx context.Context, rows []Delivery) (released int, err error) {
	return s.releaseBy(ctx, s.sqlReleaseFree, rows)
}

// releaseBy releases rows by a statement.
func (s *Store) releaseBy(ctx context.Context, sql string, rows []Delivery) (released int, err error) {
	keys, floors := digests(rows)
	err = s.transactAsync(ctx, func(b *pgx.Batch) {
		for holder, ids := range byHolder(refsOf(rows)) {
			b.Queue(sql, ids, holder, s.group, true).Exec(func(tag pgconn.CommandTag) error {
				released += int(tag.RowsAffected())
				return nil
			})
		}
		b.Queue(s.sqlPromoteBehind, s.group, keys, floors, idsOf(rows))
	})
	if err != nil {
		return 0, fmt.Errorf("release deliveries: %w", err)
	}
	return released, nil
}
