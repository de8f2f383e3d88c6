package pg

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Session is what is known of a connection of a pool: its settings when this package saw it first. Transactions with
// handlers bound their waits by these, and restore these when they end.
type Session struct {
	idle, tcp, lock, statement int64  // timeouts in milliseconds; 0 means none
	transaction                int64  // transaction_timeout; negative before PostgreSQL 17
	restore, unbound           string // statements
	ran                        map[string]bool
	pooled                     bool  // behind a pooler, so each transaction may be in another session of PostgreSQL
	backend                    int32 // see Backend
	describes                  bool  // each statement again, as pgx.QueryExecModeDescribeExec says
	Shared                     bool  // several functions are called in the transaction under way
}

// sqlKnownSession reads the settings that RESET ALL may not restore, whether it does not because the pool has set them,
// and whether the session may become another user. The timeouts are in milliseconds. $1 is the process of the session
// that the client knows. Behind a pooler it is another one, and another client may have changed settings of the session
// for good: then those count that it began with, unless the pool may have set some itself, $2. The pooler keeps
// application_name and the three after it for each client.
const sqlKnownSession = `
WITH known AS MATERIALIZED (
    SELECT s.name, CASE WHEN pg_backend_pid() = $1::int OR $2::bool THEN s.setting ELSE s.reset_val END AS value, s.setting <> s.reset_val AS changed
      FROM pg_settings AS s
     WHERE s.name = ANY ('{application_name,TimeZone,DateStyle,client_encoding,search_path,idle_in_transaction_session_timeout,
                           tcp_user_timeout,lock_timeout,statement_timeout,transaction_timeout}'::text[])
), timeouts AS MATERIALIZED (SELECT k.name, k.value::bigint AS ms FROM known AS k WHERE k.name LIKE '%\_timeout')
SELECT pg_backend_pid() <> $1::int, (SELECT bool_or(k.changed) FROM known AS k WHERE k.name NOT LIKE '%\_timeout'),
       (SELECT r.rolsuper FROM pg_roles AS r WHERE r.rolname = session_user),
       session_user::text, current_setting('role'), current_setting('application_name'), current_setting('TimeZone'),
       current_setting('DateStyle'), current_setting('client_encoding'), (SELECT k.value FROM known AS k WHERE k.name = 'search_path'),
       (SELECT t.ms FROM timeouts AS t WHERE t.name = 'idle_in_transaction_session_timeout'),
       (SELECT t.ms FROM timeouts AS t WHERE t.name = 'tcp_user_timeout'), (SELECT t.ms FROM timeouts AS t WHERE t.name = 'lock_timeout'),
       (SELECT t.ms FROM timeouts AS t WHERE t.name = 'statement_timeout'),
       coalesce((SELECT t.ms FROM timeouts AS t WHERE t.name = 'transaction_timeout'), -1)`

// sessionKey is the key of a [Session] in the custom data of its connection.
const sessionKey = "outbox.session"

// setsKey is the key of a bool in the custom data of a connection: its pool has functions that may change its settings.
const setsKey = "outbox.sets"

// noteSets notes whether a pool may change settings of its connections.
func noteSets(db *pgxpool.Pool, conn *pgx.Conn) {
	data := conn.PgConn().CustomData()
	if _, known := data[setsKey]; !known {
		cfg := db.Config()
		data[setsKey] = cfg.AfterConnect != nil || cfg.ConnConfig.AfterConnect != nil
	}
}

// SessionOf returns what is known of a connection. It asks PostgreSQL once for each connection.
func SessionOf(ctx context.Context, conn *pgx.Conn) (*Session, error) {
	data := conn.PgConn().CustomData()
	if s, known := data[sessionKey].(*Session); known {
		return s, nil
	}
	s := &Session{ran: map[string]bool{}, describes: conn.Config().DefaultQueryExecMode == pgx.QueryExecModeDescribeExec}
	var user, role, application, zone, dates, encoding, path string
	var changed, super bool
	sets := data[setsKey] != false
	err := QueryRow(ctx, conn, sqlKnownSession, int32(conn.PgConn().PID()), sets).Scan(&s.pooled, &changed, &super, &user, &role, &application, &zone, &dates, &encoding, &path,
		&s.idle, &s.tcp, &s.lock, &s.statement, &s.transaction)
	if err != nil {
		return nil, fmt.Errorf("read the settings of a connection: %w", err)
	}
	if !s.pooled {
		s.backend = int32(conn.PgConn().PID())
	}
	text := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	s.restore = "; RESET ALL"
	if super {
		s.restore += "; SET SESSION AUTHORIZATION " + text(user)
	}
	if s.pooled && !sets { // RESET ALL does not reset it
		s.restore += "; RESET ROLE"
	} else {
		s.restore += "; SET ROLE " + text(role)
	}
	if changed || s.pooled {
		s.restore += "; SET application_name = " + text(application) + "; SET TimeZone = " + text(zone) + "; SET DateStyle = " + text(dates) +
			"; SET client_encoding = " + text(encoding) + "; SELECT pg_catalog.set_config('search_path', " + text(path) + ", false)"
	}
	s.unbound = fmt.Sprintf("SET LOCAL lock_timeout = %d; SET LOCAL statement_timeout = %d; ", s.lock, s.statement)
	data[sessionKey] = s
	return s, nil
}

// KnownSession returns what [SessionOf] has found out about a connection, or nil. Without it nothing is bounded.
func KnownSession(conn *pgx.Conn) *Session {
	s, _ := conn.PgConn().CustomData()[sessionKey].(*Session)
	return s
}

// Backend returns the process of PostgreSQL that has the transaction under way, or 0 if it is not known.
func (s *Session) Backend() int32 {
	if s == nil {
		return 0
	}
	return s.backend
}

// Restore returns statements that give a connection its settings back, to be run behind a COMMIT in the same round
// trip. RESET ALL restores neither a role, nor what a pool or a pooler has SET. To SET all of it again costs 40 µs.
// Behind a pooler each transaction may be in another session, so it is always done there.
func (s *Session) Restore() string { return s.restore }

// NoteRun notes whether a statement has run on the connection, which has it prepared then.
func (s *Session) NoteRun(sql string, ran bool) {
	if s != nil {
		s.ran[sql] = ran
	}
}

// HasRun reports whether NoteRun has noted that a statement has run. A connection that describes each statement again
// has none prepared.
func (s *Session) HasRun(sql string) bool { return s != nil && s.ran[sql] && !s.describes }

// Bounds of our own statements in transactions with handlers. A lock is waited for longer than deadlock_timeout, so
// that PostgreSQL finds deadlocks.
const (
	lockWait      = 2 * time.Second
	statementTime = 15 * time.Second
	ownIdle       = 10 * time.Second // between our last statement and the COMMIT
)

// Bounded returns a context for statements of ours in a transaction with handlers, which PostgreSQL ends earlier. If
// the connection has died in silence, only this context ends them.
func Bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, 2*statementTime)
}

const (
	// sqlBound bounds a transaction: $1 is how long its process may take between two statements, $2 how long PostgreSQL
	// waits for the network, and $3, unless it is empty, how long the whole transaction may take. It frees advisory
	// locks that a function inside PostgreSQL may have taken unseen in an earlier transaction.
	sqlBound = `
SELECT pg_advisory_unlock_all(), set_config('idle_in_transaction_session_timeout', $1::text, true), set_config('tcp_user_timeout', $2::text, true),
       CASE WHEN $3::text <> '' THEN set_config('transaction_timeout', $3::text, true) END,
       set_config('lock_timeout', $4::text, true), set_config('statement_timeout', $5::text, true)`
	sqlBoundWaits = `
SELECT set_config('lock_timeout', $1::text, true), set_config('statement_timeout', $2::text, true)`
)

// lower returns a timeout as the value of a setting, or what an administrator has set if that is shorter. A timeout of
// 0 sets no bound.
func lower(d time.Duration, set int64) string {
	ms := min(d.Milliseconds(), math.MaxInt32) // the largest value of a setting
	if set > 0 && (set < ms || ms <= 0) {
		ms = set
	}
	return strconv.FormatInt(ms, 10)
}

// QueueBound queues the first statement of a transaction with handlers. It bounds how long the transaction may stay
// open if this process is frozen or cut off: call is the longest time of a call, whole that of the transaction. It also
// bounds the waits of our statements that follow, until [Session.QueueUnbound].
func (s *Session) QueueBound(b *pgx.Batch, call, whole time.Duration) {
	transaction := ""
	if s.transaction >= 0 {
		transaction = lower(whole, s.transaction)
	}
	if s.pooled {
		b.Queue(sqlBackend).QueryRow(func(row pgx.Row) error { return row.Scan(&s.backend) })
	}
	b.Queue(sqlBound, lower(call, s.idle), lower(call, s.tcp), transaction, lower(lockWait, s.lock), lower(statementTime, s.statement))
}

// QueueWaits bounds the waits of our statements that follow in a transaction with handlers.
func (s *Session) QueueWaits(b *pgx.Batch) {
	if s != nil {
		b.Queue(sqlBoundWaits, lower(lockWait, s.lock), lower(statementTime, s.statement))
	}
}

// EndBounds returns values of lock_timeout, statement_timeout and idle_in_transaction_session_timeout for the last
// statements before a COMMIT, which follows at once.
func (s *Session) EndBounds() []any {
	return []any{lower(lockWait, s.lock), lower(statementTime, s.statement), lower(ownIdle, s.idle)}
}

// QueueUnboundIfShared is QueueUnbound for the end of a transaction whose settings are compared before its COMMIT. The
// round trip of the COMMIT of other transactions restores them, see Unbound.
func (s *Session) QueueUnboundIfShared(b *pgx.Batch) {
	if s != nil && s.Shared {
		s.QueueUnbound(b)
	}
}

// Unbound returns statements that do what QueueUnbound does, for the round trip of a COMMIT.
func (s *Session) Unbound() string { return s.unbound }

// QueueUnbound restores the settings for waits, before a handler runs.
func (s *Session) QueueUnbound(b *pgx.Batch) {
	if s != nil {
		b.Queue(sqlBoundWaits, strconv.FormatInt(s.lock, 10), strconv.FormatInt(s.statement, 10))
	}
}
