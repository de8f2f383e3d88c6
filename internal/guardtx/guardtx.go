// Package guardtx runs functions of the host in a transaction of ours. They write in it,
// and cannot end it: the other work of the transaction would be committed half done.
//
// Commit and Rollback of the transaction that a function gets return [ErrEnded]. Three things protect the transaction
// from the text of a statement:
//
//   - A statement whose text ends the transaction is not sent. The transaction is rolled back, and no statement
//     follows.
//   - For a COMMIT that the text does not show, the transaction has a cursor WITH HOLD whose query fails. The query
//     runs at a commit, and PostgreSQL then rolls back. The package closes the cursor in the round trip of its own
//     commit.
//   - A function can use only the savepoints that it has set itself.
//
// A savepoint instead of the cursor would show "COMMIT; BEGIN" only after events were committed half done.
package guardtx

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox/internal/pg"
)

var (
	// ErrEnded means that a function has committed or rolled back the transaction, or tried
	// to.
	ErrEnded = errors.New("a handler must not commit or roll back the transaction that it gets: the consumer does")
	// ErrSettings means that functions which share a transaction have changed its settings,
	// which a function should see as they are outside.
	ErrSettings = errors.New("a handler has changed settings of the transaction, which it shares with others")

	errAborted = errors.New("has left its transaction aborted: it returned nil although a statement had failed")
	errOpen    = errors.New("has left rows or batch results open: it must close them before it returns")
	errForeign = errors.New("has released, or gone back to, a savepoint that it has not set: with it goes the work of other handlers in the transaction")
	errLost    = errors.New("has returned nil although its connection was lost")
	errLeft    = errors.New("has left a goroutine behind that asks for the connection of the transaction")
)

// PostgreSQL has no setting that keeps a session from committing its transaction. But the query of
// a cursor WITH HOLD runs at the commit. If the query fails, the commit fails and PostgreSQL rolls
// everything back. So a transaction begins with a cursor whose query fails. The owner of the
// transaction closes the cursor in the round trip of its commit. If the cursor is not there, the
// transaction is not the one that was begun, for example behind "ROLLBACK; BEGIN". The cursor also
// keeps PREPARE TRANSACTION from working.
const (
	sqlGuard = `
DECLARE outbox_guard CURSOR WITH HOLD FOR
SELECT pg_catalog.current_setting('outbox: a handler must not commit the transaction of the consumer')`
	sqlUnguard = `CLOSE outbox_guard; `
	sqlUnlock  = `
SELECT pg_catalog.pg_advisory_unlock_all()`
	sqlCommit = `COMMIT`
)

// The settings that are compared before the commit of a transaction that several functions
// share: those that say who acts, what names mean, how long a statement may take, and when
// a day begins. Statements that pass through a [Tx] are looked at for all settings; this is
// for changes by functions inside PostgreSQL. To list all settings would take milliseconds.
const sqlSettings = `pg_catalog.concat_ws(',', current_setting('search_path'), current_setting('role'), current_setting('session_authorization'),
 current_setting('row_security'), current_setting('session_replication_role'), current_setting('lock_timeout'),
 current_setting('statement_timeout'), current_setting('TimeZone'))`

const (
	sqlKeepSettings = `SELECT pg_catalog.set_config('outbox.settings', ` + sqlSettings + `, true)`
	// sqlSharedCommit fails with undefinedObject if settings have changed.
	sqlSharedCommit = sqlUnguard + `
SELECT pg_catalog.current_setting(CASE WHEN current_setting('outbox.settings') = ` + sqlSettings + `
       THEN 'outbox.settings' ELSE 'outbox: a handler has changed settings' END); COMMIT`
	// sqlEnd notes whether settings have changed, before it bounds the statements that follow.
	sqlEnd = `
SELECT pg_catalog.set_config('outbox.settings', CASE WHEN current_setting('outbox.settings') = ` + sqlSettings + `
       THEN current_setting('outbox.settings') ELSE '' END, true),
       pg_catalog.set_config('lock_timeout', $1::text, true), pg_catalog.set_config('statement_timeout', $2::text, true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', $3::text, true)`
	sqlEndAlone = `
SELECT pg_catalog.set_config('lock_timeout', $1::text, true), pg_catalog.set_config('statement_timeout', $2::text, true),
       pg_catalog.set_config('idle_in_transaction_session_timeout', $3::text, true)`
)

// QueueEnd bounds our statements that follow at the end of a transaction. A COMMIT must follow at once.
func QueueEnd(b *pgx.Batch, session *pg.Session) {
	if session.Shared {
		b.Queue(sqlEnd, session.EndBounds()...)
	} else {
		b.Queue(sqlEndAlone, session.EndBounds()...)
	}
}

// Tx is a transaction of ours. One goroutine uses it.
type Tx struct {
	tx      pgx.Tx
	shared  bool                 // several functions are called in it
	within  bool                 // the transaction belongs to the caller
	last    *call                // the last of its calls; nil before the first
	left    atomic.Pointer[call] // a call whose function has asked for the connection after its return
	locked  bool                 // a function may have taken an advisory lock for the session
	changed bool                 // a function has changed settings
	foreign bool                 // the function has used a savepoint of another one

	clean    [4]string // statements that were looked at lately, and change none
	oldest   int       // of them
	prepared []string  // names of statements that were looked at, and change none

	savepoints []string // that the function has set by statements
}

// Limits bound how long a transaction stays open if its process is frozen or cut off.
type Limits struct{ Call, Whole time.Duration }

// Begin begins a transaction, together with what queue adds to the batch, in a single round
// trip. If several functions are to be called in it, it is shared.
//
// What functions set without LOCAL, and the advisory locks that they take for the session, end with the transaction:
// the round trip of COMMIT restores the settings of the connection. Functions inside PostgreSQL may set something
// unseen, so this happens in any case. Locks that they take unseen end when the next transaction begins.
func Begin(ctx context.Context, conn *pgx.Conn, limits Limits, shared bool, queue func(*pgx.Batch)) (*Tx, error) {
	session, err := pg.SessionOf(ctx, conn)
	if err != nil {
		return nil, err
	}
	var batch pgx.Batch
	commit := sqlUnguard + session.Unbound() + sqlCommit
	if shared {
		commit = sqlSharedCommit
	}
	session.Shared = shared
	batch.BeginTx(pgx.TxOptions{CommitQuery: commit + session.Restore()})
	session.QueueBound(&batch, limits.Call, limits.Whole)
	queue(&batch)
	session.QueueUnbound(&batch)
	batch.Queue(sqlGuard)
	if shared {
		batch.Queue(sqlKeepSettings)
	}
	results := conn.SendBatch(ctx, &batch)
	t := &Tx{tx: results.Tx(), shared: shared}
	if err := results.Close(); err != nil {
		t.Rollback(ctx)
		return nil, err
	}
	return t, nil
}

// Within returns a Tx for a transaction of the caller, or for a part of it. Nothing guards the
// transaction from a COMMIT in a statement of a function. Only the caller ends it.
func Within(tx pgx.Tx) *Tx { return &Tx{tx: tx, within: true} }

// Call calls a function of the host with the transaction, whose Commit and Rollback fail. It
// returns the error of the function, or what the function has done to the transaction: that
// error has the name of the function.
func (t *Tx) Call(name string, f func(pgx.Tx) error) error {
	t.foreign, t.savepoints, t.last = false, nil, &call{name: name}
	err := f(&hostTx{part{t.tx, t, t.last}})
	t.last.over.Store(true)
	conn := t.tx.Conn().PgConn()
	switch {
	case t.foreign:
		return errors.Join(t.blame(errForeign), err)
	case t.last.ended.Load() || t.idle():
		return t.endedError(err)
	case err != nil:
		return err
	case conn.IsClosed():
		return t.blame(errLost)
	case conn.IsBusy():
		return t.blame(errOpen)
	case conn.TxStatus() == 'E':
		return t.blame(errAborted)
	}
	return nil
}

// idle reports whether the connection is in no transaction any more.
func (t *Tx) idle() bool {
	conn := t.tx.Conn().PgConn()
	return !conn.IsClosed() && !conn.IsBusy() && conn.TxStatus() == 'I'
}

func (t *Tx) blame(err error) error { return fmt.Errorf("handler %s %w", t.name(), err) }

// name returns the name of the last function, or "" if none was called.
func (t *Tx) name() string {
	if t.last == nil {
		return ""
	}
	return t.last.name
}

// endedError returns [ErrEnded] with the error that goes with it, if there is one.
func (t *Tx) endedError(err error) error {
	if err == nil || errors.Is(err, ErrEnded) {
		return fmt.Errorf("handler %s: %w", t.name(), ErrEnded)
	}
	return fmt.Errorf("handler %s: %w: %w", t.name(), ErrEnded, err)
}

// Own returns the transaction for statements of ours.
func (t *Tx) Own() pgx.Tx { return t.tx }

// ChangedSettings reports whether a statement of a function may have changed settings, which
// stay changed until the end of the transaction.
func (t *Tx) ChangedSettings() bool { return t.changed }

// Used reports whether the last function has used the transaction. If it has not, there is nothing to undo when it has
// failed.
func (t *Tx) Used() bool { return t.last != nil && t.last.used.Load() }

// Commit commits. Its error wraps [ErrEnded] or [ErrSettings] if that is why it fails.
func (t *Tx) Commit(ctx context.Context) error {
	if c := t.left.Load(); c != nil {
		t.Rollback(ctx)
		return fmt.Errorf("handler %s %w", c.name, errLeft)
	}
	err := t.tx.Commit(ctx)
	if err != nil || t.locked {
		t.clear(ctx)
	}
	const invalidCursorName, undefinedObject = "34000", "42704"
	switch code := pg.Code(err); {
	case err == nil:
		return nil
	case code == invalidCursorName:
		return t.endedError(err)
	case code == undefinedObject && t.shared:
		return fmt.Errorf("%w: %w", ErrSettings, err)
	}
	return fmt.Errorf("commit: %w", err)
}

// Rollback rolls back, unless the transaction has ended. If that fails it closes the
// connection, with which PostgreSQL rolls back as well.
func (t *Tx) Rollback(ctx context.Context) {
	if err := t.tx.Rollback(ctx); err == nil {
		t.clear(ctx)
	}
}

// clear frees the advisory locks that functions have taken for the session, behind a rollback, and restores the
// settings of the connection. The rollback has undone what functions have set in the transaction, but not what they
// have set behind an end of it by a way that is not seen.
func (t *Tx) clear(ctx context.Context) {
	session := pg.KnownSession(t.tx.Conn())
	if t.last != nil && t.idle() && session != nil {
		_, err := t.tx.Conn().PgConn().Exec(ctx, sqlUnlock+session.Restore()).ReadAll()
		if err != nil { // it may have settings of a function
			_ = t.tx.Conn().Close(ctx)
		}
	}
}

// hostTx is the transaction as a function of the host gets it.
type hostTx struct{ part }

// Commit implements [pgx.Tx].
func (h *hostTx) Commit(context.Context) error {
	if !h.call.use() {
		return pgx.ErrTxClosed
	}
	h.call.ended.Store(true)
	return ErrEnded
}

// Rollback implements [pgx.Tx].
func (h *hostTx) Rollback(context.Context) error {
	if !h.call.use() {
		return pgx.ErrTxClosed
	}
	h.call.ended.Store(true)
	return ErrEnded
}

// part is a transaction, or a savepoint in it, whose statements are looked at.
type part struct {
	pgx.Tx
	owner *Tx
	call  *call
}

// call is a call of a function. A goroutine that the function has left behind must not write for another one. So use
// notes the use before it looks whether the function has returned, and Used looks for it after that: one of the two
// sees the other.
type call struct {
	name       string
	used, over atomic.Bool
	ended      atomic.Bool // the function has called Commit or Rollback, or has ended the transaction by a statement
}

// use notes that the function uses the transaction. It returns false if the function has returned.
func (c *call) use() bool {
	c.used.Store(true)
	return !c.over.Load()
}

// look examines the statements before they are sent. Behind the end of the transaction a statement
// would commit by itself, although the function fails. So if there was an end, or a statement would
// be one, the transaction is rolled back now: pgx sends nothing more in it.
func (p *part) look(ctx context.Context, sqls ...string) {
	t := p.owner
	for _, sql := range sqls {
		t.look(sql)
	}
	if t.within {
		return
	}
	if t.idle() {
		p.call.ended.Store(true)
	}
	if p.call.ended.Load() || t.foreign {
		t.Rollback(ctx)
	}
}

// look finds out whether a statement changes settings, or ends the transaction. Handlers run the same few again and
// again. Behind one that ends the transaction and begins another, a COMMIT of the next function would not be noticed:
// there is no guard in it.
func (t *Tx) look(sql string) {
	if slices.Contains(t.clean[:], sql) || slices.Contains(t.prepared, sql) {
		return
	}
	t.locked = t.locked || strings.Contains(strings.ToLower(sql), "advisory_lock") || isName(sql)
	statements := beginnings(sql)
	if endsTransaction(statements) {
		t.last.ended.Store(true)
	}
	if t.lookForSavepoints(statements) || t.changed || t.last.ended.Load() {
		return
	}
	if t.changed = changesSettings(sql); !t.changed {
		t.clean[t.oldest] = sql
		t.oldest = (t.oldest + 1) % len(t.clean)
	}
}

// lookForSavepoints finds out whether a statement uses a savepoint that another function has set. It reports whether
// there are savepoints in it, so that it is looked at again. If the transaction is not shared, PostgreSQL says that
// there is no such savepoint.
func (t *Tx) lookForSavepoints(statements [][]string) (found bool) {
	for _, words := range statements {
		name, ok := savepointOf(words)
		if !ok {
			continue
		}
		found = true
		if words[0] == "savepoint" {
			t.savepoints = append(t.savepoints, name)
		} else if t.shared && !slices.Contains(t.savepoints, name) {
			t.foreign = true
		}
	}
	return found
}

// Commit implements [pgx.Tx]: it releases a savepoint.
func (p *part) Commit(ctx context.Context) error {
	if !p.call.use() {
		return pgx.ErrTxClosed
	}
	return p.Tx.Commit(ctx)
}

// Rollback implements [pgx.Tx]: it goes back to a savepoint, which is gone when the function has returned. Otherwise it
// would undo what later functions have done.
func (p *part) Rollback(ctx context.Context) error {
	if !p.call.use() {
		return pgx.ErrTxClosed
	}
	return p.Tx.Rollback(ctx)
}

// Begin implements [pgx.Tx]: it sets a savepoint.
func (p *part) Begin(ctx context.Context) (pgx.Tx, error) {
	if !p.call.use() {
		return nil, pgx.ErrTxClosed
	}
	savepoint, err := p.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &part{savepoint, p.owner, p.call}, nil
}

// Exec implements [pgx.Tx].
func (p *part) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if !p.call.use() {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	p.look(ctx, sql)
	return p.Tx.Exec(ctx, sql, args...)
}

// Query implements [pgx.Tx].
func (p *part) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !p.call.use() {
		return closed{}, pgx.ErrTxClosed
	}
	p.look(ctx, sql)
	return p.Tx.Query(ctx, sql, args...)
}

// QueryRow implements [pgx.Tx].
func (p *part) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if !p.call.use() {
		return closed{}
	}
	p.look(ctx, sql)
	return p.Tx.QueryRow(ctx, sql, args...)
}

// Prepare implements [pgx.Tx].
func (p *part) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if !p.call.use() {
		return nil, pgx.ErrTxClosed
	}
	p.look(ctx, sql)
	statement, err := p.Tx.Prepare(ctx, name, sql)
	if err == nil && !p.owner.changed {
		p.owner.prepared = append(p.owner.prepared, name)
	}
	return statement, err
}

// SendBatch implements [pgx.Tx].
func (p *part) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	if !p.call.use() {
		return closedBatch{}
	}
	sqls := make([]string, len(b.QueuedQueries))
	for i, q := range b.QueuedQueries {
		sqls[i] = q.SQL
	}
	p.look(ctx, sqls...)
	return p.Tx.SendBatch(ctx, b)
}

// CopyFrom implements [pgx.Tx].
func (p *part) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if !p.call.use() {
		return 0, pgx.ErrTxClosed
	}
	p.look(ctx)
	return p.Tx.CopyFrom(ctx, table, columns, rows)
}

// Conn implements [pgx.Tx]. What the function does with the connection is not seen.
func (p *part) Conn() *pgx.Conn {
	if !p.call.use() {
		p.owner.left.Store(p.call)
	}
	return p.Tx.Conn()
}

// LargeObjects implements [pgx.Tx].
func (p *part) LargeObjects() pgx.LargeObjects {
	if !p.call.use() {
		p.owner.left.Store(p.call)
	}
	return p.Tx.LargeObjects()
}
