// Package pgsession has a connection to PostgreSQL that stays open, separately from those of a
// pool. It receives notifications, and holds session advisory locks, which PostgreSQL frees when
// the process is gone.
//
// Behind a pooler that lends a connection for one transaction only, neither works: notifications do
// not arrive, and a lock belongs to the next client of the connection. So the session is examined
// before anything relies on it, see [Session.State].
package pgsession

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/perpool"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// State says what can be relied on.
type State int

// The states of a session.
const (
	// Unknown: it is not connected, or not examined yet.
	Unknown State = iota
	// Works: it is connected to PostgreSQL without a pooler that shares connections.
	Works
	// Pooled: it will never hear notifications, nor hold locks.
	Pooled
)

// ErrUnavailable means that a session is not connected, not examined yet, or behind a pooler.
var ErrUnavailable = errors.New("no session with PostgreSQL")

const (
	// statementTimeout bounds a statement, and so how long a dead connection goes unnoticed.
	statementTimeout = 5 * time.Second
	// pingInterval is after which silence it is asked whether the connection still works; lockedPing that where
	// others may get its locks if it does not, and pingTimeout how long an answer may take.
	pingInterval   = 5 * time.Second
	lockedPing     = time.Second
	pingTimeout    = 2 * time.Second
	connectTimeout = 10 * time.Second
	// examineAgain is when it is asked again whether there is a pooler: a machine that stood still looks like one.
	examineAgain = 10 * time.Minute
)

// Session is the session of a pool. It is connected while it is used. It is safe for concurrent use.
type Session struct {
	db func() *pgxpool.Pool // nil once the pool is no longer used
	id string               // the payload of its notifications

	failing *outage.Log  // of the first user; only run
	locking *outage.Logs // of the locks of listeners; likewise

	users perpool.Users

	mu        sync.Mutex
	state     State
	interrupt context.CancelFunc // of what run waits for
	calls     []*call
	ears      map[*Ear]bool
	changed   bool // ears have changed since the connection was told to listen
	locks     map[string]*Lock
}

var sessions perpool.Registry[*Session]

// Of returns the session of a pool, which all relays and workers on it share.
func Of(db *pgxpool.Pool) *Session {
	return sessions.Get(db, "", func(db func() *pgxpool.Pool) *Session {
		return &Session{db: db, id: uuid.NewString(), ears: map[*Ear]bool{}, locks: map[string]*Lock{}}
	})
}

// Use keeps the session connected until stop is called. The log of the first use gets what it has to say.
func (s *Session) Use(log *slog.Logger) (stop func()) {
	s.users.Add(func(ctx context.Context) { s.run(ctx, log) })
	return sync.OnceFunc(s.users.Remove)
}

// State returns what can be relied on at the moment.
func (s *Session) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// run connects, again and again, until ctx ends.
func (s *Session) run(ctx context.Context, log *slog.Logger) {
	if s.failing == nil { // an outage may last for longer than a use
		s.failing, s.locking = outage.NewLog(log, "a session with PostgreSQL, for wake-ups and takeovers,"), outage.NewLogs(log)
	}
	said := false
	for ctx.Err() == nil {
		conn, err := s.connect(ctx)
		if err == nil {
			err = s.examine(ctx, conn)
			if err == nil {
				err = s.serve(ctx, conn)
			}
			s.lose()
			pg.Disconnect(conn)
		}
		if errors.Is(err, errPooled) {
			if !said {
				log.Info("outbox: PostgreSQL is behind a pooler that shares connections, so no notification arrives: what other processes record is seen at the next poll, "+
					"and a standby takes over when the lease has expired", "because", err)
			}
			said = true
			s.become(Pooled)
			wait.Sleep(ctx, examineAgain)
			continue
		}
		if ctx.Err() == nil {
			s.failing.Report(err)
			wait.Sleep(ctx, s.failing.Backoff())
		}
	}
	s.become(Unknown)
}

// connect makes a connection as the pool does, with settings that keep it alive.
func (s *Session) connect(ctx context.Context) (conn *pgx.Conn, err error) {
	db := s.db()
	if db == nil {
		return nil, errors.New("the pool is gone")
	}
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	return pg.Connect(ctx, db, func(cfg *pgx.ConnConfig) {
		cfg.Tracer, cfg.OnNotification = nil, nil
		// The wait for a notification is interrupted often. Another handler would cancel a statement
		// then, or close the connection.
		cfg.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.DeadlineContextWatcherHandler{Conn: c.Conn()}
		}
	})
}

// sqlSettings keep the connection as long as both of its ends live, and no longer; and one who shares it from holding
// up the others.
const sqlSettings = `
SELECT set_config('idle_session_timeout', '0', false), set_config('idle_in_transaction_session_timeout', '0', false), set_config('statement_timeout', '0', false),
       set_config('tcp_keepalives_idle', '5', false), set_config('tcp_keepalives_interval', '1', false), set_config('tcp_keepalives_count', '5', false),
       set_config('tcp_user_timeout', '5000', false), set_config('lock_timeout', '500ms', false), set_config('default_transaction_isolation', 'read committed', false),
       CASE WHEN current_setting('transaction_timeout', true) <> '0' THEN set_config('transaction_timeout', '0', false) END`

// serve hears notifications and runs calls until the connection breaks or ctx ends.
func (s *Session) serve(ctx context.Context, conn *pgx.Conn) error {
	if err := execute(ctx, conn, sqlSettings); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	listening := map[string]listened{}
	s.become(Works)
	for {
		if err := s.listen(ctx, conn, listening); err != nil {
			return fmt.Errorf("listen: %w", err)
		}
		s.failing.Report(nil)
		spoke := time.Now()
		waiting, stop := s.interruptible(ctx)
		n, err := conn.WaitForNotification(waiting)
		late := waiting.Err() != nil && ctx.Err() == nil
		stop()
		switch {
		case err == nil:
			if from, complete := strings.CutSuffix(n.Payload, completeMark); from != s.id { // the users of this session know of its own
				s.hear(n.Channel, complete)
			}
			continue
		case ctx.Err() != nil:
			return ctx.Err()
		case !late || conn.IsClosed():
			return fmt.Errorf("wait for notifications: %w", err)
		}
		calls := s.takeCalls()
		for _, c := range calls {
			c.run(ctx, conn)
		}
		if len(calls) == 0 && time.Since(spoke) >= s.silence() {
			pinging, stop := context.WithTimeout(ctx, pingTimeout)
			err := execute(pinging, conn, "SELECT")
			stop()
			if err != nil {
				return fmt.Errorf("ping: %w", err)
			}
		}
		if conn.IsClosed() {
			return errors.New("connection is closed")
		}
	}
}

func execute(ctx context.Context, conn *pgx.Conn, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	_, err := conn.Exec(ctx, sql, args...)
	return err
}

// silence is how long nothing may be heard of PostgreSQL.
func (s *Session) silence() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.locks) > 0 {
		return lockedPing
	}
	return pingInterval
}

// interruptible returns a context that ends after silence, or when there is something to do.
func (s *Session) interruptible(ctx context.Context) (waiting context.Context, stop func()) {
	waiting, cancel := context.WithTimeout(ctx, s.silence())
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.calls) > 0 || s.changed {
		cancel()
	}
	s.interrupt = cancel
	return waiting, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.interrupt = nil
		cancel()
	}
}

// become changes the state.
func (s *Session) become(state State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state = state
}

// lose ends all locks and calls: the connection is gone, or about to be closed.
func (s *Session) lose() {
	s.mu.Lock()
	s.state = Unknown
	locks, calls := s.locks, s.calls
	s.locks, s.calls = map[string]*Lock{}, nil
	s.mu.Unlock()
	for _, l := range locks {
		close(l.lost)
	}
	for _, c := range calls {
		c.end(ErrUnavailable)
	}
}

// call is something that a connection is needed for.
type call struct {
	f    func(ctx context.Context, conn *pgx.Conn) error
	undo func(ctx context.Context, conn *pgx.Conn) // undoes what f has done, if the caller has returned; may be nil
	must bool                                      // it runs even if the caller has returned

	mu        sync.Mutex
	abandoned bool
	done      chan error // holds one
}

func (c *call) run(ctx context.Context, conn *pgx.Conn) {
	c.mu.Lock()
	abandoned := c.abandoned
	c.mu.Unlock()
	if abandoned && !c.must || conn.IsClosed() {
		c.end(ErrUnavailable)
		return
	}
	bounded, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	err := c.f(bounded, conn)
	c.mu.Lock()
	abandoned = c.abandoned
	c.end(err)
	c.mu.Unlock()
	if abandoned && c.undo != nil {
		c.undo(bounded, conn)
	}
}

func (c *call) end(err error) { c.done <- err }

// do runs a call on the connection. While that is not connected and examined, the error is [ErrUnavailable].
func (s *Session) do(ctx context.Context, c *call) error {
	c.done = make(chan error, 1)
	s.mu.Lock()
	if s.state != Works {
		s.mu.Unlock()
		return ErrUnavailable
	}
	s.calls = append(s.calls, c)
	if s.interrupt != nil {
		s.interrupt()
	}
	s.mu.Unlock()
	select {
	case err := <-c.done:
		return err
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		select {
		case err := <-c.done: // it was quicker
			return err
		default:
			c.abandoned = true
			return ctx.Err()
		}
	}
}

func (s *Session) takeCalls() (calls []*call) {
	s.mu.Lock()
	defer s.mu.Unlock()
	calls, s.calls = s.calls, nil
	return calls
}
