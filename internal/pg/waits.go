package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/perpool"
)

// Waits are the statements of ours on a pool that are under way and may wait for locks. They also know who holds the
// locks. A wait is short: it ends with lock_timeout. The holder is known only while a statement waits, so another
// connection asks for it meanwhile, see [Waits.Look]. It is safe for concurrent use.
type Waits struct {
	mu      sync.Mutex
	under   map[*waiting]struct{}
	holders map[int32]Holder
	looking bool
	vain    vainWait // the last wait in vain
}

// vainWait is a wait that has ended without its lock.
type vainWait struct {
	at      time.Time
	holders []Holder
}

// LockError is the error of a statement of ours that did not get a lock in time. It is no outage of PostgreSQL.
type LockError struct {
	Holders []Holder // sessions that have held locks meanwhile; none if they are not known
	Err     error
}

// Error implements error.
func (e *LockError) Error() string { return e.Err.Error() + ": " + describe(e.Holders) }

// Unwrap returns the error of PostgreSQL.
func (e *LockError) Unwrap() error { return e.Err }

// IsWaitInVain reports whether a statement of ours did not get a lock in time.
func IsWaitInVain(err error) bool {
	_, is := errors.AsType[*LockError](err)
	return is
}

func describe(holders []Holder) string {
	if len(holders) == 0 {
		return "another session holds a lock"
	}
	all := make([]string, len(holders))
	for i, h := range holders {
		all[i] = h.String()
	}
	return strings.Join(all, ", ") + " holds a lock"
}

// waiting is a statement that may wait.
type waiting struct{ began time.Time }

// Holder is a session that holds a lock for which statements of ours wait.
type Holder struct {
	PID               int32
	User, Application string
	State             string    // "" if this role may not see it
	Since             time.Time // when its transaction began; zero if it has none, or this role may not see it
	Ended             bool      // this process has ended the session
	seen              time.Time
}

// Fields returns the places for the columns of a row that describes the session: pid, user, application, state, and the
// beginning of its transaction.
func (h *Holder) Fields() []any {
	return []any{&h.PID, &h.User, &h.Application, &h.State, Time{At: &h.Since}}
}

// Attrs returns the attributes of the session for a log line.
func (h Holder) Attrs() []any {
	attrs := []any{"pid", h.PID, "user", h.User, "application", h.Application}
	if h.State != "" {
		attrs = append(attrs, "state", h.State)
	}
	if !h.Since.IsZero() {
		attrs = append(attrs, "since", h.Since)
	}
	return attrs
}

// String returns the session for a sentence.
func (h Holder) String() string {
	since := ""
	if !h.Since.IsZero() {
		since = ", since " + h.Since.Format(time.RFC3339)
	}
	return fmt.Sprintf("session %d of user %q, application %q%s", h.PID, h.User, h.Application, since)
}

var waits perpool.Registry[*Waits]

// WaitsOf returns the waits of a pool.
func WaitsOf(db *pgxpool.Pool) *Waits {
	return waits.Get(db, "", func(func() *pgxpool.Pool) *Waits {
		return &Waits{under: map[*waiting]struct{}{}, holders: map[int32]Holder{}}
	})
}

// Begin notes that statements begin that may wait for a lock, until end is called with their error. End returns a
// [*LockError] if they did not get the lock.
func (w *Waits) Begin() (end func(error) error) {
	one := &waiting{began: time.Now()}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.under[one] = struct{}{}
	return func(err error) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.under, one)
		if err == nil || !IsLocked(err) && !IsCancelled(err) {
			return err
		}
		var holders []Holder
		for _, h := range w.holders {
			if h.seen.After(one.began) {
				holders = append(holders, h)
			}
		}
		if !IsLocked(err) && len(holders) == 0 { // something else may have cancelled the statement
			return err
		}
		slices.SortFunc(holders, func(a, b Holder) int { return cmp.Compare(a.PID, b.PID) })
		w.vain = vainWait{time.Now(), holders}
		return &LockError{holders, err}
	}
}

// String describes the last wait in vain for Health. It returns "" if none has ended so lately.
func (w *Waits) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	if time.Since(w.vain.at) > memory {
		return ""
	}
	return "statements wait in vain: " + describe(w.vain.holders)
}

// memory is how long a holder counts as known. It exceeds the time between two tries.
const memory = 15 * time.Second

// lookAfter is how long a statement waits before its holder is looked for.
const lookAfter = time.Second

// mayLook reports whether a statement has been under way for long, and begins a look then.
func (w *Waits) mayLook() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.looking {
		return false
	}
	for one := range w.under {
		if time.Since(one.began) >= lookAfter {
			w.looking = true
			return true
		}
	}
	return false
}

// sqlHolders finds the sessions for which statements on the tables of a schema wait, that are of this role and
// application. Behind a pooler a client does not know the process of its session, so the statements are found by their
// text $1. A session that waits in the same way is no holder.
//
// It ends a holder of this role whose transaction has taken longer than $2, if its process is frozen or gone: its last
// statement is about leases, or PostgreSQL has been sending to it in vain, and the application is the same. A process
// that is frozen between two statements of a handler's transaction loses its session by the timeouts of
// [Session.QueueBound]; a handler may be at work in a session like that. A holder that has locked a table of the schema
// $3 explicitly, or changes it, is left alone.
const sqlHolders = `
WITH waiting AS MATERIALIZED (
    SELECT a.pid FROM pg_stat_activity AS a
     WHERE a.datname = current_database() AND a.usename = session_user AND a.application_name = current_setting('application_name')
       AND a.wait_event_type = 'Lock' AND a.pid <> pg_backend_pid()
       AND (strpos(a.query, $1::text || 'outbox') > 0 OR strpos(a.query, $1::text || 'event_') > 0 OR strpos(a.query, $1::text || 'consumer_') > 0)
), holding AS MATERIALIZED (
    SELECT DISTINCT h.pid FROM waiting AS w CROSS JOIN LATERAL pg_catalog.unnest(pg_blocking_pids(w.pid)) AS h (pid)
     WHERE h.pid NOT IN (SELECT w.pid FROM waiting AS w)
)
SELECT h.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start,
       CASE WHEN a.datname = current_database() AND a.usename = session_user
             AND (strpos(a.query, $1::text || 'outbox_lease') > 0
                  OR a.application_name = current_setting('application_name') AND a.wait_event = 'ClientWrite')
             AND a.xact_start < clock_timestamp() - $2::interval
             AND NOT EXISTS (
                 SELECT FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation JOIN pg_namespace AS n ON n.oid = c.relnamespace
                  WHERE l.pid = h.pid AND l.granted AND n.nspname = $3::text
                    AND l.mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock'))
            THEN pg_terminate_backend(h.pid) ELSE false END
  FROM holding AS h LEFT JOIN pg_stat_activity AS a ON a.pid = h.pid
 ORDER BY h.pid LIMIT 10`

// sqlOwnRole lets a session see what those of its user do, also if the pool has set another role.
const sqlOwnRole = `SELECT set_config('role', 'none', true)`

// Look finds out who holds the locks for which statements of ours wait, if one has waited for a second. It asks on
// another connection, see [Beside]. It ends sessions of other processes of this role whose
// transactions have taken longer than bound. It returns the holders that were not known before, and those that it has
// ended, and whether it has asked.
func (w *Waits) Look(ctx context.Context, db *pgxpool.Pool, schema string, bound time.Duration) (news []Holder, asked bool, err error) {
	if !w.mayLook() {
		return nil, false, nil
	}
	defer func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.looking = false
	}()
	const timeout = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	text := pgx.Identifier{schema}.Sanitize() + "."
	var found []Holder
	err = Beside(ctx, db, func(conn *pgx.Conn) error {
		return Query(ctx, conn, sqlOwnRole, func(rows pgx.Rows) (err error) {
			found, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (h Holder, err error) {
				return h, row.Scan(append(h.Fields(), &h.Ended)...)
			})
			return err
		}, sqlHolders, text, bound, schema)
	})
	if err != nil {
		return nil, true, fmt.Errorf("look for the holder of a lock: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.holders, func(_ int32, h Holder) bool { return time.Since(h.seen) > memory })
	for _, h := range found {
		h.seen = time.Now()
		if _, known := w.holders[h.PID]; !known || h.Ended {
			news = append(news, h)
		}
		w.holders[h.PID] = h
	}
	return news, true, nil
}
