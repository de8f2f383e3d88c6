package delivery

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/pg"
)

// A consumer handles the events of a partition directly, without a row here. An event that could not be
// handled is parked: it becomes a row, and so do the later events of its key as long as a row of the key is
// open. So an event must not be handled directly while its key is blocked.
//
// A query tells which keys are blocked, but its answer can be out of date at once: another process may
// still hold the partition, because it has not noticed yet that it has lost it. Therefore a consumer locks
// the keys of its events at the end of its transaction, against processes that insert rows, and queries
// once more. The query at the beginning is needed too: a row may be open then and done at the end, but the
// handlers that were called meanwhile may not have seen its effect. For the same reason the query at the end
// includes rows that were parked or requeued, and done, meanwhile.

// Subject is an event for an action, as event_delivery identifies it.
type Subject struct {
	Action string
	Key    Key
	// Digest is that of the event's identity: its source, its id and the type with which it arrived. An event with
	// the digest of an earlier one is a repeat.
	Digest [16]byte
}

// lock returns the number that is locked for a subject. Subjects without order are locked by their digest.
func (s Subject) lock() int64 {
	if s.Key.Ordered {
		return s.Key.Digest
	}
	return int64(binary.BigEndian.Uint64(s.Digest[:]))
}

// Received is a row to be inserted for an event from Kafka, see [Store.Park].
type Received struct {
	Subject
	Stream    string
	Partition int32
	Offset    int64

	EventID  [16]byte // the event's UUID, or a UUID made from RecordID
	RecordID string   // "" if EventID is the event's

	Type, Source, AggregateType, AggregateID, ContentType, PartitionKey string
	Payload, Record                                                     []byte
	OccurredAt, RecordedAt                                              time.Time
	MaxAttempts                                                         int
	Note                                                                Note

	// If an attempt has failed:
	Attempt       int // 0 if none counts
	Code, Message string
	Wait          time.Duration
}

// Note is the key in event_handled of an event that an action has handled. The zero Note matches nothing.
type Note struct {
	AggregateType, AggregateID string
	WithSource                 string // replaces AggregateID if an event of another source has that key
	Source                     string // "" for any
}

// sqlPark inserts rows for events that are not handled and have no row yet. An event may have a row if it
// comes again, or comes to two processes. The first row of a free key becomes PENDING, all others become
// PARKED. The statement checks each key once, before it inserts a row, because the indexes also return the
// rows that it inserts itself.
//
// It returns the id of each row that it inserts. For each event that gets no row it returns what the event
// has already: the id of its row, or the id of its note as a negative number. The conflict target is the
// identity of an event: an id that exists must be an error, because ignoring it would drop the event.
var sqlPark = `
WITH ` + behind + `, looked AS MATERIALIZED (
    SELECT n.*, coalesce(
           (SELECT d.id FROM {schema}.event_delivery AS d
             WHERE d.consumer_group = $1::text AND d.action = n.action AND d.record_digest = n.digest AND d.status <> 'DONE' LIMIT 1),
           (SELECT -h.id FROM {schema}.event_handled AS h
             WHERE h.consumer_group = $1::text AND h.aggregate_type = n.note_type AND h.aggregate_id = n.note_id AND h.action = n.action
               AND (n.note_source = '' OR h.event_source IS NULL OR h.event_source = n.note_source) LIMIT 1),
           (SELECT -h.id FROM {schema}.event_handled AS h
             WHERE h.consumer_group = $1::text AND h.aggregate_type = n.note_type AND h.aggregate_id = n.note_with_source AND h.action = n.action LIMIT 1)) AS has
      FROM unnest($2::text[], $3::text[], $4::bigint[], $5::bytea[], $6::int[], $7::bigint[], $8::text[]::uuid[], $9::text[], $10::text[], $11::text[],
                           $12::text[], $13::text[], $14::text[], $15::bytea[], $16::bytea[], $17::timestamptz[], $18::timestamptz[], $19::int[],
                           $20::text[], $21::text[], $22::text[], $23::text[], $24::int[], $25::text[], $26::text[], $27::bigint[], $28::text[]) WITH ORDINALITY
           AS n (action, stream, key, digest, partition, record_offset, event_id, record_id, type, source,
                 aggregate_id, content_type, partition_key, payload, record, occurred_at, recorded_at, most,
                 note_type, note_id, note_with_source, note_source, attempt, code, message, wait, aggregate_type, n)
), wanted AS MATERIALIZED (
    SELECT * FROM looked WHERE has IS NULL
), keys AS MATERIALIZED (
    SELECT k.key, min(k.n) AS first FROM wanted AS k WHERE k.key IS NOT NULL GROUP BY k.key
), free AS MATERIALIZED (
    SELECT k.first FROM keys AS k
     WHERE coalesce(` + openOf("k.key", "") + `) IS NULL
), inserted AS (
    INSERT INTO {schema}.event_delivery AS d (consumer_group, action, stream, position, order_key, status, attempt_count, max_attempts,
           next_retry_at, last_attempt_at, created_at, updated_at, last_error_code, last_error_message,
           event_id, event_type, source, aggregate_type, aggregate_id, payload_bytes, content_type, partition_key, size, occurred_at, recorded_at,
           record_partition, record_id, record_digest, record, failed_at)
    SELECT $1::text, w.action, w.stream, w.record_offset, w.key, CASE WHEN EXISTS (SELECT FROM behind) THEN '` + rejectedStatus + `' WHEN w.key IS NULL OR w.n IN (SELECT first FROM free) THEN 'PENDING' ELSE 'PARKED' END, w.attempt, w.most,
           t.at + w.wait::float8 * interval '1 microsecond', CASE WHEN w.attempt > 0 THEN t.at END, t.at, t.at, nullif(w.code, ''), nullif(w.message, ''),
           w.event_id, w.type, w.source, w.aggregate_type, w.aggregate_id, w.payload, w.content_type, w.partition_key, octet_length(w.payload) + octet_length(w.record), w.occurred_at, w.recorded_at,
           w.partition, nullif(w.record_id, ''), w.digest, w.record, CASE WHEN w.code <> '' THEN t.at END
      FROM (SELECT * FROM wanted ORDER BY n) AS w CROSS JOIN (SELECT clock_timestamp() AS at OFFSET 0) AS t
     ORDER BY w.n
        ON CONFLICT (consumer_group, action, record_digest) WHERE status <> 'DONE' AND record_digest IS NOT NULL DO NOTHING
 RETURNING d.id, d.action, d.record_digest, d.status
)
SELECT min(w.n), i.status, i.id FROM inserted AS i JOIN wanted AS w ON w.action = i.action AND w.digest = i.record_digest GROUP BY i.id, i.status
 UNION ALL
SELECT n, '', has FROM looked WHERE has IS NOT NULL`

// openOf returns expressions for coalesce, which are true if a row of a key is open. And is a further condition, or "".
func openOf(key, and string) string {
	of := func(which string) string {
		return `
           (SELECT true FROM {schema}.event_delivery AS d
             WHERE ` + ofKey(key) + ` AND ` + which + and + ` AND d.consumer_group = $1::text ORDER BY d.order_key DESC, d.id DESC LIMIT 1)`
	}
	return of(head) + `,` + of(`d.status = 'PARKED'`)
}

// ParkResult is what has become of an event in [Store.Park].
type ParkResult struct {
	// Status is the status of the row that was inserted. It is "" if none was inserted, because the event has
	// a row already or is handled.
	Status Status
	// Row is the id of the event's row in event_delivery, and Note the id of its note in event_handled. One
	// of them is set, the other is 0.
	Row, Note int64
}

// parkTries is how often Park looks for the row of an event that another transaction has inserted meanwhile.
const parkTries = 3

// Park inserts rows for events that have failed, and for events whose keys are blocked. The rows of each
// key are in the order of their records. The rows survive a crash of PostgreSQL, because their offsets are
// committed after it.
//
// After Park, each event has a row or a note, whose id Park returns. Otherwise it returns an error. The error is
// [ErrSequenceBehind] if a new row could get an id below those of earlier rows.
func (s *Store) Park(ctx context.Context, rows []Received) (parked []ParkResult, err error) {
	parked = make([]ParkResult, len(rows))
	missing := make([]int, len(rows))
	for i := range missing {
		missing[i] = i
	}
	for try := 0; len(missing) > 0; try++ {
		if try == parkTries {
			return nil, fmt.Errorf("park events: %d of %d have neither a row nor a note", len(missing), len(rows))
		}
		if missing, err = s.parkThese(ctx, rows, missing, parked); err != nil {
			return nil, fmt.Errorf("park events: %w", s.PassTakenIDs(ctx, err))
		}
	}
	return parked, nil
}

// parkThese parks the rows with these indexes, and returns the indexes of events that have neither a row nor a
// note. That happens if a transaction that has locked other keys inserts a row of the same event.
func (s *Store) parkThese(ctx context.Context, rows []Received, these []int, parked []ParkResult) (missing []int, err error) {
	batch := make([]Received, len(these))
	for i, n := range these {
		batch[i] = rows[n]
	}
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(pg.Durable)
		b.Queue(s.sqlLock, s.group, column(batch, func(r *Received) int64 { return r.lock() }))
		b.Queue(s.sqlPark, append([]any{s.group}, columnsOfParked(batch)...)...).Query(func(rows pgx.Rows) error {
			var n int
			var status string
			var id int64
			_, err := pgx.ForEachRow(rows, []any{&n, &status, &id}, func() error {
				parked[these[n-1]] = ParkResult{Status: Status(status), Row: max(id, 0), Note: max(-id, 0)}
				return nil
			})
			return err
		})
	})
	if err != nil {
		return nil, err
	}
	type event struct {
		action string
		digest [16]byte
	}
	inserted := map[event]int64{}
	for _, n := range these {
		r, p := &rows[n], &parked[n]
		of := event{r.Action, r.Digest}
		if *p == (ParkResult{}) { // it may have come twice in these rows
			p.Row = inserted[of]
		}
		if p.Status != "" {
			inserted[of] = p.Row
		}
		if *p == (ParkResult{}) {
			missing = append(missing, n)
		}
	}
	return missing, nil
}

// columnsOfParked returns the parameters of sqlPark after the first, one array for each column.
func columnsOfParked(rows []Received) []any {
	text := func(of func(*Received) string) []string { return column(rows, of) }
	return []any{
		text(func(r *Received) string { return r.Action }), text(func(r *Received) string { return r.Stream }),
		column(rows, func(r *Received) pgtype.Int8 { return r.Key.value() }), column(rows, func(r *Received) []byte { return r.Digest[:] }),
		column(rows, func(r *Received) int32 { return r.Partition }), column(rows, func(r *Received) int64 { return r.Offset }),
		text(func(r *Received) string { return uuid.UUID(r.EventID).String() }), text(func(r *Received) string { return r.RecordID }),
		text(func(r *Received) string { return r.Type }), text(func(r *Received) string { return r.Source }),
		text(func(r *Received) string { return r.AggregateID }), text(func(r *Received) string { return r.ContentType }), text(func(r *Received) string { return r.PartitionKey }),
		column(rows, func(r *Received) []byte { return orEmpty(r.Payload) }), column(rows, func(r *Received) []byte { return orEmpty(r.Record) }),
		column(rows, func(r *Received) time.Time { return r.OccurredAt }), column(rows, func(r *Received) time.Time { return r.RecordedAt }),
		column(rows, func(r *Received) int32 { return int32(r.MaxAttempts) }),
		text(func(r *Received) string { return r.Note.AggregateType }), text(func(r *Received) string { return r.Note.AggregateID }),
		text(func(r *Received) string { return r.Note.WithSource }), text(func(r *Received) string { return r.Note.Source }),
		column(rows, func(r *Received) int32 { return int32(r.Attempt) }), text(func(r *Received) string { return r.Code }), text(func(r *Received) string { return r.Message }),
		column(rows, func(r *Received) int64 { return r.Wait.Microseconds() }), text(func(r *Received) string { return r.AggregateType }),
	}
}

// columnsOf returns an array for each column of subjects. The key of a subject without order is NULL.
func columnsOf(subjects []Subject) (actions []string, keys []pgtype.Int8, digests [][]byte) {
	return column(subjects, func(s *Subject) string { return s.Action }), column(subjects, func(s *Subject) pgtype.Int8 { return s.Key.value() }),
		column(subjects, func(s *Subject) []byte { return s.Digest[:] })
}

func locksOf(subjects []Subject) []int64 {
	return column(subjects, func(s *Subject) int64 { return s.lock() })
}

func column[R, T any](rows []R, of func(*R) T) []T {
	all := make([]T, len(rows))
	for i := range rows {
		all[i] = of(&rows[i])
	}
	return all
}

func orEmpty(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// A function finds blocked subjects. PostgreSQL would plan the query anew each time, which takes twenty times as long.
const (
	sqlBlocked = `SELECT {schema}.outbox_blocked($1::text, $2::text[], $3::bigint[], $4::bytea[], $5::timestamptz)`
	// sqlBlockedFromNow first locks the numbers $5. Then it includes rows that are DONE since the transaction began.
	// It returns NULL if the transaction cannot see what is committed.
	sqlBlockedFromNow = `
SELECT CASE WHEN {schema}.outbox_lock_keys_shared($1::text, $5::bigint[]) THEN {schema}.outbox_blocked($1::text, $2::text[], $3::bigint[], $4::bytea[], NULL::timestamptz) END`
	// sqlBegun returns when the transaction has begun, in microseconds since 1970: a number has no DateStyle.
	sqlBegun = `SELECT (extract(epoch FROM now()) * 1000000::numeric)::bigint`
)

// sqlWaitsFor returns whether one of keys $2 has an open row that was made before row $3.
var sqlWaitsFor = `
SELECT EXISTS (SELECT FROM unnest($2::bigint[]) AS n (key) WHERE coalesce(` + openOf("n.key", ` AND d.id < $3::bigint`) + `))`

// Blocked returns the indexes of subjects that must not be handled directly at this moment: their keys are
// blocked, or they have a row themselves.
func (s *Store) Blocked(ctx context.Context, subjects []Subject) (blocked []int, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) { s.queueBlocked(b, subjects, never, &blocked) })
	if err != nil {
		return nil, fmt.Errorf("look for parked events: %w", err)
	}
	return blocked, nil
}

// waitsFor reports whether one of keys has an open row that was made before row id.
func (s *Store) waitsFor(ctx context.Context, keys []int64, id int64) (waits bool, err error) {
	err = s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(s.sqlWaitsFor, s.group, keys, id).QueryRow(func(row pgx.Row) error { return row.Scan(&waits) })
	})
	if err != nil {
		return false, fmt.Errorf("look for earlier events: %w", err)
	}
	return waits, nil
}

// BlockedIn is Blocked at the end of a transaction in which subjects were handled. It locks their keys, so
// that no process can block them before the transaction has ended. The statements of first run before, mostly in
// the same round trip.
func (s *Store) BlockedIn(ctx context.Context, tx pgx.Tx, subjects []Subject, first ...Restoration) (blocked []int, err error) {
	current := false
	err = s.atEnd(ctx, tx, s.sqlBlockedFromNow, first, func(b *pgx.Batch) {
		b.Queue(s.sqlBlockedFromNow, append(s.argsOf(subjects), locksOf(subjects))...).QueryRow(func(row pgx.Row) (err error) {
			blocked, current, err = scanBlocked(row)
			return err
		})
	})
	if err == nil && !current {
		blocked, err = s.blockedBeside(ctx, tx, subjects)
	}
	if err != nil {
		return nil, fmt.Errorf("look for parked events: %w", err)
	}
	return blocked, nil
}

// blockedBeside is for a transaction that sees only what was committed when it began. The keys are locked, so a query
// outside of it sees all rows that can block them.
func (s *Store) blockedBeside(ctx context.Context, tx pgx.Tx, subjects []Subject) (blocked []int, err error) {
	var begun int64
	if err := tx.QueryRow(ctx, sqlBegun).Scan(&begun); err != nil {
		return nil, err
	}
	err = pg.Beside(ctx, s.db, func(conn *pgx.Conn) error {
		return transactOn(ctx, conn, func(b *pgx.Batch) {
			s.queueBlocked(b, subjects, pgtype.Timestamptz{Time: time.UnixMicro(begun), Valid: true}, &blocked)
		})
	})
	return blocked, err
}

// QueueBlocked is Blocked as a part of a batch, for a transaction that begins.
func (s *Store) QueueBlocked(b *pgx.Batch, subjects []Subject, blocked *[]int) {
	s.queueBlocked(b, subjects, never, blocked)
}

// never is the time for sqlBlocked at the beginning of a transaction.
var never = pgtype.Timestamptz{InfinityModifier: pgtype.Infinity, Valid: true}

func (s *Store) queueBlocked(b *pgx.Batch, subjects []Subject, since pgtype.Timestamptz, blocked *[]int) {
	b.Queue(s.sqlBlocked, append(s.argsOf(subjects), since)...).QueryRow(func(row pgx.Row) (err error) {
		*blocked, _, err = scanBlocked(row)
		return err
	})
}

// argsOf returns the group, and columns of subjects.
func (s *Store) argsOf(subjects []Subject) []any {
	actions, keys, digests := columnsOf(subjects)
	return []any{s.group, actions, keys, digests}
}

// scanBlocked scans the numbers of subjects and returns their indexes. It returns false for NULL.
func scanBlocked(row pgx.Row) (blocked []int, ok bool, err error) {
	err = row.Scan(&blocked)
	for i := range blocked {
		blocked[i]--
	}
	return blocked, blocked != nil, err
}
