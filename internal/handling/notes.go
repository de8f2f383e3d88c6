package handling

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handled"
	"github.com/outboxgo/outbox/internal/pg"
)

// Notes is the table event_handled, for one group, and the transactions that
// write to it.
type Notes struct {
	db            *pgxpool.Pool
	schema, group string
	Durable       bool         // transactions wait for the disk, whatever the role's synchronous_commit is
	taken         atomic.Int32 // times in a row that a note got an id that was taken

	Mark, otherSources, renew, unmark, look string // the statements of these names
}

func NewNotes(db *pgxpool.Pool, schema, group string) *Notes {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &Notes{
		db: db, schema: schema, group: group,
		Mark: in(sqlMark), otherSources: in(sqlOtherSources), renew: in(sqlRenewMarks), unmark: in(sqlUnmark), look: in(sqlLookHandled),
	}
}

// NoteKey marks an action that is done. An event is identified by its source and its
// id together: AggregateID is the id, or a text in which both run together, and Source is
// the source.
type NoteKey struct {
	AggregateType, AggregateID, Action string
	Source                             string // "" for a key of OncePer
}

// OfSource returns the key under which an action is noted if the events of another source
// have taken its own.
func (k NoteKey) OfSource() NoteKey {
	k.AggregateID = handled.KeyBeside(k.Source, k.AggregateID)
	return k
}

// keyColumns is a list of keys as the statements take it, in $2 and behind.
const keyColumns = `unnest($2::varchar[], $3::varchar[], $4::varchar[], $5::varchar[])`

// sqlMark notes what is being done, and returns what was not done before. It waits
// where another transaction is about to do the same. Sorted keys keep two partitions
// from waiting for each other here; it cannot prevent that in what handlers lock. Of the
// same keys the first is noted: the others may be taken back when a batch ends early, and
// events of other sources are looked for behind it. An id that is taken is no conflict of keys:
// it would hide the event.
const sqlMark = `
INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source)
SELECT $1, t, i, a, nullif(s, '')
  FROM ` + keyColumns + ` WITH ORDINALITY AS k (t, i, a, s, n)
 ORDER BY t, i, a, n
    ON CONFLICT (consumer_group, aggregate_type, aggregate_id, action) DO NOTHING
RETURNING aggregate_type, aggregate_id, action, coalesce(event_source, '')`

// sqlOtherSources returns the keys that are noted for the event of another source. A note
// without a source has a key of [OncePer], and stands for events of all sources.
const sqlOtherSources = `
SELECT k.t, k.i, k.a, k.s
  FROM ` + keyColumns + ` AS k (t, i, a, s)
  JOIN {schema}.event_handled AS h
    ON h.consumer_group = $1 AND h.aggregate_type = k.t AND h.aggregate_id = k.i AND h.action = k.a
 WHERE h.event_source <> k.s`

// sqlRenewMarks makes notes last as long as one that is made now.
const sqlRenewMarks = `
INSERT INTO {schema}.event_handled AS h (consumer_group, aggregate_type, aggregate_id, action, event_source)
SELECT DISTINCT ON (t, i, a) $1, t, i, a, s
  FROM ` + keyColumns + ` AS k (t, i, a, s)
 ORDER BY t, i, a
    ON CONFLICT (consumer_group, aggregate_type, aggregate_id, action) DO UPDATE SET handled_at = now()`

// begin begins a transaction that notes keys as handled, and returns those that were not noted
// before. Mostly that is all of them, and one statement does. Where some were noted, a second
// one looks whether that was the event of another source, whose id is the same.
func (s *Notes) begin(ctx context.Context, conn *pgx.Conn, keys []NoteKey, shared bool) (tx *guardtx.Tx, fresh map[NoteKey]bool, err error) {
	tx, err = guardtx.Begin(ctx, conn, shared, func(b *pgx.Batch) {
		if s.Durable {
			b.Queue(pg.Durable)
		}
		b.Queue(s.Mark, s.argsOf(keys)...).Query(func(rows pgx.Rows) (err error) {
			fresh, err = readKeys(rows, len(keys))
			return err
		})
	})
	if err != nil {
		return nil, nil, err
	}
	if err := s.MarkOthers(ctx, tx.Own(), keys, fresh); err != nil {
		tx.Rollback(ctx)
		return nil, nil, err
	}
	return tx, fresh, nil
}

// MarkOthers notes those keys that are noted for the event of another source, and adds them to
// fresh.
func (s *Notes) MarkOthers(ctx context.Context, tx pgx.Tx, keys []NoteKey, fresh map[NoteKey]bool) error {
	var noted []NoteKey
	for _, k := range keys {
		if k.Source != "" && !fresh[k] {
			noted = append(noted, k)
		}
	}
	if len(noted) == 0 {
		return nil
	}
	others, err := s.KeysOf(ctx, tx, s.otherSources, noted)
	if err != nil || len(others) == 0 {
		return err
	}
	more, err := s.markBesides(ctx, tx, slices.Collect(maps.Keys(others)))
	maps.Copy(fresh, more)
	return err
}

// markBesides notes keys that the events of other sources have taken. It returns those
// that are new. The notes that were there first must not be removed before the new ones:
// whoever finds none does not look for more.
func (s *Notes) markBesides(ctx context.Context, tx pgx.Tx, taken []NoteKey) (map[NoteKey]bool, error) {
	own := make([]NoteKey, len(taken))
	for i, k := range taken {
		own[i] = k.OfSource()
	}
	noted, err := s.KeysOf(ctx, tx, s.Mark, own)
	if err != nil {
		return nil, err
	}
	fresh := map[NoteKey]bool{}
	for i, k := range taken {
		if noted[own[i]] {
			fresh[k] = true
		}
	}
	_, err = s.KeysOf(ctx, tx, s.renew, slices.Collect(maps.Keys(fresh)))
	return fresh, err
}

// KeysOf runs a statement on keys and returns the keys that it returns.
func (s *Notes) KeysOf(ctx context.Context, tx pgx.Tx, statement string, keys []NoteKey) (map[NoteKey]bool, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	rows, err := tx.Query(ctx, statement, s.argsOf(keys)...)
	if err != nil {
		return nil, err
	}
	return readKeys(rows, len(keys))
}

// readKeys reads at most n keys.
func readKeys(rows pgx.Rows, n int) (map[NoteKey]bool, error) {
	found := make(map[NoteKey]bool, n)
	var k NoteKey
	_, err := pgx.ForEachRow(rows, []any{&k.AggregateType, &k.AggregateID, &k.Action, &k.Source}, func() error {
		found[k] = true
		return nil
	})
	return found, err
}

// sqlUnmark takes notes back, of the transaction that has made them.
const sqlUnmark = `
DELETE FROM {schema}.event_handled AS h
 USING ` + keyColumns + ` AS k (t, i, a, s)
 WHERE h.consumer_group = $1 AND h.aggregate_type = k.t AND h.aggregate_id = k.i AND h.action = k.a
   AND coalesce(h.event_source, '') = k.s`

// unmarkAll takes back the notes of keys that are not handled.
func (s *Notes) unmarkAll(ctx context.Context, tx pgx.Tx, keys map[NoteKey]bool) error {
	all := make([]NoteKey, 0, 2*len(keys))
	for k := range keys {
		if all = append(all, k); k.Source != "" {
			all = append(all, k.OfSource())
		}
	}
	_, err := tx.Exec(ctx, s.unmark, s.argsOf(all)...)
	return err
}

// argsOf returns the arguments of the statements on keys: the group, and keys as the columns
// of a table.
func (s *Notes) argsOf(keys []NoteKey) []any {
	texts := make([]string, 4*len(keys))
	n := len(keys)
	types, ids, actions, sources := texts[:n], texts[n:2*n], texts[2*n:3*n], texts[3*n:]
	for i, k := range keys {
		types[i], ids[i], actions[i], sources[i] = k.AggregateType, k.AggregateID, k.Action, k.Source
	}
	return []any{s.group, types, ids, actions, sources}
}

// sqlLookHandled fails if the table does not exist, or lacks a column that this release needs.
const sqlLookHandled = `SELECT consumer_group, aggregate_type, aggregate_id, action, event_source FROM {schema}.event_handled LIMIT 0`

// Check reports why the table cannot be used.
func (s *Notes) Check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.look)
	return err
}

// Ping implements Transactor.
func (s *Notes) Ping(ctx context.Context) error { return s.db.Ping(ctx) }

// NoteError is the error of a statement of the consumer's own, with which it notes what is
// handled. It says nothing about the event: the table is locked or missing, for example, its
// sequence draws ids that are taken, or there was no connection to be had.
type NoteError struct{ Err error }

func (e *NoteError) Error() string { return e.Err.Error() }
func (e *NoteError) Unwrap() error { return e.Err }

// ConnectionError is an error with which the connection to PostgreSQL was lost.
type ConnectionError struct{ Err error }

func (e *ConnectionError) Error() string { return e.Err.Error() }
func (e *ConnectionError) Unwrap() error { return e.Err }

// InTx implements Transactor.
func (s *Notes) InTx(ctx context.Context, work *Activity, keys []NoteKey, shared bool, f func(Tx, map[NoteKey]bool) error) error {
	work.AwaitTx()
	defer work.Release()
	conn, err := pg.Borrow(ctx, s.db)
	if err != nil {
		return &NoteError{fmt.Errorf("begin: %w", err)}
	}
	defer conn.Return()
	if err := work.Use(conn); err != nil {
		return err
	}
	if err := s.passTaken(ctx, conn.Conn); err != nil {
		return &NoteError{fmt.Errorf("pass over ids of event_handled that are taken: %w", err)}
	}
	tx, fresh, err := s.begin(ctx, conn.Conn, keys, shared)
	if err != nil {
		err = fmt.Errorf("note what is handled: %w", err)
		if pg.IsDuplicate(err) { // an id: sqlMark passes over keys
			s.taken.Add(1)
		} else if pg.IsRejectedRow(err) {
			return err // the key cannot be stored
		}
		return &NoteError{err}
	}
	s.taken.Store(0)
	work.TxBegun()
	defer tx.Rollback(ctx) // nothing, once it is committed; f may end its goroutine
	if err := s.finishTx(ctx, tx, fresh, f); err != nil {
		tx.Rollback(ctx)
		if conn.IsClosed() {
			return &ConnectionError{err}
		}
		return err
	}
	return nil
}

const sqlPassTaken = `SELECT count(nextval(format('%I.event_handled_id_seq', $1::text)::regclass)) FROM generate_series(1, $2::int)`

// passTaken draws ids without using them, ten times as many each time, where the last ones were
// taken: by whoever may choose ids, or because the sequence is that of an older backup.
func (s *Notes) passTaken(ctx context.Context, conn *pgx.Conn) error {
	times := s.taken.Load()
	if times == 0 {
		return nil
	}
	n := int(math.Pow10(int(min(times, 6))))
	_, err := conn.Exec(ctx, sqlPassTaken, s.schema, n)
	return err
}

// finishTx runs f in a transaction and commits it, without the notes of what f has not done.
func (s *Notes) finishTx(ctx context.Context, tx *guardtx.Tx, fresh map[NoteKey]bool, f func(Tx, map[NoteKey]bool) error) error {
	if err := f(tx, fresh); err != nil {
		return err
	}
	if len(fresh) > 0 {
		if err := s.unmarkAll(ctx, tx.Own(), fresh); err != nil {
			return &NoteError{fmt.Errorf("take back notes of what is not handled: %w", err)}
		}
	}
	return tx.Commit(ctx)
}

// SourceKeyOf names the source of an event.
func SourceKeyOf(m *envelope.Received) string {
	if m.ByPosition && m.Kafka != nil {
		return handled.SourceKeyIn(m.Source, m.Origin.TopicID)
	}
	return handled.SourceKey(m.Source)
}

// KeyOf returns the key by which a repeat of a task is known.
func KeyOf(t *Task) (NoteKey, error) {
	k := NoteKey{AggregateType: t.Meta.Type, AggregateID: handled.EventKey(t.Meta.Source, t.Meta.ID), Action: t.Action, Source: SourceKeyOf(&t.Meta)}
	if t.Key != nil {
		k.Source = ""
		k.AggregateType, k.AggregateID = t.Key(t.Event, &t.Meta)
	}
	for _, part := range []struct {
		field, text string
		limit       int
	}{{"aggregate_type", k.AggregateType, envelope.MaxAggregateType}, {"aggregate_id", k.AggregateID, envelope.MaxAggregateID}} {
		if err := check.Text(part.text, part.limit); err != nil {
			return k, Permanent(&envelope.FieldError{EventType: t.Meta.Type, Index: -1, Field: part.field, Err: fmt.Errorf("of the key of %s %w", t.Action, err)})
		}
	}
	return k, nil
}
