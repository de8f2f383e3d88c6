package handling

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/handled"
	"github.com/outboxgo/outbox/internal/pg"
)

// Notes is the table event_handled for one group. It implements [Transactor]: each transaction notes its tasks.
type Notes struct {
	db            *pgxpool.Pool
	schema, group string
	Durable       bool // transactions wait for the disk, even if the role's synchronous_commit is off
	Limits        guardtx.Limits
	vain          atomic.Int64  // since when waits for locks were in vain, in Unix nanoseconds; 0 if none was
	lastVain      atomic.Int64  // the last of them
	taken         atomic.Int32  // how many times in a row the sequence has drawn an id that exists
	asking        chan struct{} // capacity 1: one late COMMIT at a time is asked about

	sqlMark, sqlOtherSources, sqlRenew, sqlUnmark, sqlProbe string
}

// NewNotes returns the notes of a group. It does no I/O.
func NewNotes(db *pgxpool.Pool, schema, group string) *Notes {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &Notes{
		db: db, schema: schema, group: group, asking: make(chan struct{}, 1),
		sqlMark: in(sqlMark), sqlOtherSources: in(sqlOtherSources), sqlRenew: in(sqlRenewMarks),
		sqlUnmark: in(sqlUnmark), sqlProbe: in(sqlProbeHandled),
	}
}

// NoteKey identifies an action on an event, by the event's [handled.Identity] or by a key of OncePer.
type NoteKey struct {
	AggregateType, AggregateID, Action string
	Source                             string // "" for a key of OncePer
}

// WithSource returns the key under which an action is noted if an event of another source has the key k already.
func (k NoteKey) WithSource() NoteKey {
	k.AggregateID = handled.KeyWithSource(k.Source, k.AggregateID)
	return k
}

// keyColumns are the columns of keys, from the arguments $2 to $5 of a statement. See argsOf.
const keyColumns = `unnest($2::text[], $3::text[], $4::text[], $5::text[])`

// sqlMark notes keys, and returns the keys that were not noted before. It waits for another transaction that notes the
// same key. The keys are sorted, so that two transactions cannot deadlock here; handlers may still lock rows in any
// order. Of equal keys the first one is noted. The later ones may be taken back when a batch ends early, and notes of
// other sources are found through the first one. The conflict target is the key: an id that exists must be an error,
// because ignoring it would hide the event.
const sqlMark = `
INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source)
SELECT $1, t, i, a, nullif(s, '')
  FROM ` + keyColumns + ` WITH ORDINALITY AS k (t, i, a, s, n)
 ORDER BY t, i, a, n
    ON CONFLICT (consumer_group, aggregate_type, aggregate_id, action) DO NOTHING
RETURNING aggregate_type, aggregate_id, action, coalesce(event_source, '')`

// sqlOtherSources returns the keys that are noted for an event of another source. A note without a source has a key of
// OncePer, and stands for events of all sources.
const sqlOtherSources = `
SELECT k.t, k.i, k.a, k.s
  FROM ` + keyColumns + ` AS k (t, i, a, s)
  JOIN {schema}.event_handled AS h
    ON h.consumer_group = $1 AND h.aggregate_type = k.t AND h.aggregate_id = k.i AND h.action = k.a
 WHERE h.event_source <> k.s`

// sqlRenewMarks sets the time of notes to now, so that retention keeps them as long as new ones.
const sqlRenewMarks = `
INSERT INTO {schema}.event_handled AS h (consumer_group, aggregate_type, aggregate_id, action, event_source)
SELECT DISTINCT ON (t, i, a) $1, t, i, a, s
  FROM ` + keyColumns + ` AS k (t, i, a, s)
 ORDER BY t, i, a
    ON CONFLICT (consumer_group, aggregate_type, aggregate_id, action) DO UPDATE SET handled_at = now()`

// begin begins a transaction that notes keys, and returns the keys that were not noted before. Mostly all are new, and
// one statement is enough. If some were noted, a second statement finds those that belong to another source.
func (s *Notes) begin(
	ctx context.Context, conn *pgx.Conn, keys []NoteKey, shared bool, queue func(*pgx.Batch),
) (tx *guardtx.Tx, fresh map[NoteKey]bool, err error) {
	ctx, cancel := pg.Bounded(ctx)
	defer cancel()
	end := pg.WaitsOf(s.db).Begin()
	tx, err = guardtx.Begin(ctx, conn, s.Limits, shared, func(b *pgx.Batch) {
		if s.Durable {
			b.Queue(pg.Durable)
		}
		b.Queue(s.sqlMark, s.argsOf(keys)...).Query(func(rows pgx.Rows) (err error) {
			fresh, err = readKeys(rows, len(keys))
			return err
		})
		queue(b)
	})
	if err == nil {
		if err = s.markOthers(ctx, tx.Own(), pg.KnownSession(conn), keys, fresh); err != nil {
			tx.Rollback(ctx)
		}
	}
	if err := end(err); err != nil {
		return nil, nil, err
	}
	return tx, fresh, nil
}

// NoteIn notes keys in a transaction of the caller, and returns the keys that were not noted before.
func (s *Notes) NoteIn(ctx context.Context, tx pgx.Tx, keys []NoteKey) (fresh map[NoteKey]bool, err error) {
	fresh, err = s.keysOf(ctx, tx, nil, s.sqlMark, keys)
	if err == nil {
		err = s.markOthers(ctx, tx, nil, keys, fresh)
	}
	return fresh, err
}

// markOthers notes, with their source, those keys that an event of another source has. It adds them to fresh.
func (s *Notes) markOthers(ctx context.Context, tx pgx.Tx, session *pg.Session, keys []NoteKey, fresh map[NoteKey]bool) error {
	var noted []NoteKey
	for _, k := range keys {
		if k.Source != "" && !fresh[k] {
			noted = append(noted, k)
		}
	}
	if len(noted) == 0 {
		return nil
	}
	others, err := s.keysOf(ctx, tx, session, s.sqlOtherSources, noted)
	if err != nil || len(others) == 0 {
		return err
	}
	more, err := s.markWithSource(ctx, tx, session, slices.Collect(maps.Keys(others)))
	maps.Copy(fresh, more)
	return err
}

// markWithSource notes keys that events of other sources have, under keys that contain the source. It returns the new
// ones. It renews the notes of the other sources: they must not be removed first, because without them the new notes
// would not be found.
func (s *Notes) markWithSource(ctx context.Context, tx pgx.Tx, session *pg.Session, taken []NoteKey) (map[NoteKey]bool, error) {
	own := make([]NoteKey, len(taken))
	for i, k := range taken {
		own[i] = k.WithSource()
	}
	noted, err := s.keysOf(ctx, tx, session, s.sqlMark, own)
	if err != nil {
		return nil, err
	}
	fresh := map[NoteKey]bool{}
	for i, k := range taken {
		if noted[own[i]] {
			fresh[k] = true
		}
	}
	_, err = s.keysOf(ctx, tx, session, s.sqlRenew, slices.Collect(maps.Keys(fresh)))
	return fresh, err
}

// keysOf runs a statement on keys and returns the keys that it returns. Its waits are bounded if session is not nil.
func (s *Notes) keysOf(ctx context.Context, tx pgx.Tx, session *pg.Session, statement string, keys []NoteKey) (map[NoteKey]bool, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	var b pgx.Batch
	var found map[NoteKey]bool
	session.QueueWaits(&b)
	b.Queue(statement, s.argsOf(keys)...).Query(func(rows pgx.Rows) (err error) {
		found, err = readKeys(rows, len(keys))
		return err
	})
	session.QueueUnbound(&b)
	return found, tx.SendBatch(ctx, &b).Close()
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

// sqlUnmark deletes notes in the transaction that has made them. It looks for them one by one: they are few, and
// PostgreSQL may know no statistics of the table that would say so.
const sqlUnmark = `
SELECT {schema}.outbox_remove_handled(ARRAY(
       SELECT h.ctid
         FROM ` + keyColumns + ` AS k (t, i, a, s)
        CROSS JOIN LATERAL (
              SELECT ctid, event_source FROM {schema}.event_handled
               WHERE consumer_group = $1 AND aggregate_type = k.t AND aggregate_id = k.i AND action = k.a OFFSET 0) AS h
        WHERE coalesce(h.event_source, '') = k.s), 'infinity'::timestamptz)`

// unmarkAll deletes the notes of keys that were not handled.
func (s *Notes) unmarkAll(ctx context.Context, tx pgx.Tx, keys map[NoteKey]bool) error {
	all := make([]NoteKey, 0, 2*len(keys))
	for k := range keys {
		if all = append(all, k); k.Source != "" {
			all = append(all, k.WithSource())
		}
	}
	_, err := tx.Exec(ctx, s.sqlUnmark, s.argsOf(all)...)
	return err
}

// argsOf returns the arguments of a statement on keys: the group, and the columns of the keys.
func (s *Notes) argsOf(keys []NoteKey) []any {
	texts := make([]string, 4*len(keys))
	n := len(keys)
	types, ids, actions, sources := texts[:n], texts[n:2*n], texts[2*n:3*n], texts[3*n:]
	for i, k := range keys {
		types[i], ids[i], actions[i], sources[i] = k.AggregateType, k.AggregateID, k.Action, k.Source
	}
	return []any{s.group, types, ids, actions, sources}
}

// sqlProbeHandled fails if the table or one of its columns does not exist.
const sqlProbeHandled = `
SELECT consumer_group, aggregate_type, aggregate_id, action, event_source FROM {schema}.event_handled LIMIT 0`

// Check returns why the table cannot be used, or nil.
func (s *Notes) Check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.sqlProbe)
	return err
}

// Now implements [Transactor].
func (s *Notes) Now(ctx context.Context) (now time.Time, err error) {
	ctx, cancel := pg.Bounded(ctx)
	defer cancel()
	err = pg.QueryRow(ctx, s.db, pg.SQLNow).Scan(&now)
	return now, err
}

// Ping implements [Transactor].
func (s *Notes) Ping(ctx context.Context) error { return s.db.Ping(ctx) }

// NoteError is the error of a transaction that could not note its tasks. It does not depend on the event. For example
// the table is locked or missing, its sequence draws ids that exist, or the pool has no connection.
type NoteError struct{ Err error }

// Error implements error.
func (e *NoteError) Error() string { return e.Err.Error() }

// Unwrap returns the error of PostgreSQL.
func (e *NoteError) Unwrap() error { return e.Err }

// ConnectionError is an error after which the connection of the transaction was closed.
type ConnectionError struct{ Err error }

// Error implements error.
func (e *ConnectionError) Error() string { return e.Err.Error() }

// Unwrap returns the error of PostgreSQL.
func (e *ConnectionError) Unwrap() error { return e.Err }

// InTx implements [Transactor].
func (s *Notes) InTx(ctx context.Context, work *Activity, keys []NoteKey, shared bool, queue func(*pgx.Batch), f TxFunc) error {
	err := s.inTx(ctx, work, keys, shared, queue, f)
	s.noteWait(err)
	return err
}

// noteWait notes whether a transaction has waited for a lock in vain.
func (s *Notes) noteWait(err error) {
	switch {
	case err == nil:
		s.vain.Store(0)
	case pg.IsWaitInVain(err):
		now := time.Now().UnixNano()
		if last := s.lastVain.Swap(now); now-last > int64(vainMemory) {
			s.vain.Store(now)
		}
		s.vain.CompareAndSwap(0, now)
	}
}

// vainMemory is how long after a wait in vain another one belongs to the same series.
const vainMemory = 15 * time.Second

// ReportWaits returns a reason for Health if statements have waited for locks in vain. It passes the reason to notReady
// instead if no transaction of a handler has been committed since, for longer than slow.
func (s *Notes) ReportWaits(slow time.Duration, notReady func(reason string, args ...any)) (reasons []string) {
	waits := pg.WaitsOf(s.db).String()
	since := s.vain.Load()
	if since != 0 && time.Since(time.Unix(0, since)) > slow && time.Since(time.Unix(0, s.lastVain.Load())) < vainMemory {
		notReady("a transaction has not begun or ended for %v: %s", time.Since(time.Unix(0, since)).Round(time.Second),
			cmp.Or(waits, "another session holds a lock"))
	} else if waits != "" {
		reasons = append(reasons, waits)
	}
	return reasons
}

func (s *Notes) inTx(ctx context.Context, work *Activity, keys []NoteKey, shared bool, queue func(*pgx.Batch), f TxFunc) error {
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
	if err := s.skipTaken(ctx, conn.Conn); err != nil {
		return &NoteError{fmt.Errorf("skip ids of event_handled that exist: %w", err)}
	}
	tx, fresh, err := s.begin(ctx, conn.Conn, keys, shared, queue)
	if err != nil {
		err = fmt.Errorf("note what is handled: %w", err)
		if pg.IsDuplicate(err) { // of an id, because sqlMark ignores duplicate keys
			s.taken.Add(1)
		} else if pg.IsRejectedRow(err) {
			return err // the key cannot be stored
		}
		return &NoteError{err}
	}
	s.taken.Store(0)
	work.TxBegun()
	defer tx.Rollback(ctx) // has no effect after the commit; needed if f ends its goroutine
	if err := s.finishTx(ctx, work, conn, tx, fresh, f); err != nil {
		tx.Rollback(ctx)
		if conn.IsClosed() {
			return &ConnectionError{err}
		}
		return err
	}
	return nil
}

const sqlSkipTaken = `
SELECT pg_catalog.count(pg_catalog.nextval(pg_catalog.format('%I.event_handled_id_seq', $1::text)::regclass)) FROM generate_series(1, $2::int)`

// skipTaken draws ids without using them if the last ids existed already, ten times as many after each failure. Ids
// exist if rows were inserted with ids of their own, or if the sequence was restored from an older backup.
func (s *Notes) skipTaken(ctx context.Context, conn *pgx.Conn) error {
	times := s.taken.Load()
	if times == 0 {
		return nil
	}
	n := int(math.Pow10(int(min(times, 6))))
	ctx, cancel := pg.Bounded(ctx)
	defer cancel()
	_, err := conn.Exec(ctx, sqlSkipTaken, s.schema, n)
	return err
}

// finishTx calls f in a transaction and commits it, without the notes that f has left in fresh.
func (s *Notes) finishTx(ctx context.Context, work *Activity, conn *pg.Borrowed, tx *guardtx.Tx, fresh map[NoteKey]bool, f TxFunc) error {
	if err := f(tx, fresh); err != nil {
		return err
	}
	if len(fresh) > 0 {
		bounded, cancel := pg.Bounded(ctx)
		defer cancel()
		if err := s.unmarkAll(bounded, tx.Own(), fresh); err != nil {
			return &NoteError{fmt.Errorf("delete notes of what is not handled: %w", err)}
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return s.commit(ctx, work, conn, tx)
}

// IdentityOf returns the identity of an event. Upcasting does not change it, because the metadata of an event keeps the
// type with which it arrived.
func IdentityOf(m *envelope.Received) handled.Identity {
	if m.ByPosition && m.Kafka != nil {
		return handled.EventAt(m.Type, m.Source, m.ID, m.Origin.TopicID)
	}
	return handled.Event(m.Type, m.Source, m.ID)
}

// keyOf returns the key of a task. A repeat of the task has the same key. The error is permanent.
func keyOf(t *Task) (NoteKey, error) {
	e := IdentityOf(&t.Meta)
	k := NoteKey{AggregateType: e.Type, AggregateID: e.ID, Action: t.Action, Source: e.Source}
	if t.Key != nil && !t.Meta.Tombstone {
		k.Source = ""
		k.AggregateType, k.AggregateID = t.Key(t.Event, &t.Meta)
	}
	for _, part := range []struct {
		field, text string
		limit       int
	}{
		{"aggregate_type", k.AggregateType, envelope.MaxAggregateType},
		{"aggregate_id", k.AggregateID, envelope.MaxAggregateID},
	} {
		if err := check.Text(part.text, part.limit); err != nil {
			err = fmt.Errorf("of the key of %s %w", t.Action, err)
			return k, Permanent(&envelope.FieldError{EventType: t.Meta.Type, Index: -1, Field: part.field, Err: err})
		}
	}
	return k, nil
}
