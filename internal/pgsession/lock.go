package pgsession

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
)

// Lock is a session advisory lock that this process has.
type Lock struct {
	session *Session
	name    string
	key     int64
	lost    chan struct{} // closed once it is not held any more
}

// sqlLockKey returns the key of a name in a schema. The schema may be dropped and made again: then it is another one.
const sqlLockKey = `SELECT hashtextextended($1::text, c.relnamespace::bigint) FROM pg_catalog.pg_class AS c WHERE c.oid = {outbox}::regclass::oid`

// TryLock takes the lock of a name in a schema. It returns nil if the lock is taken, in this process or in
// another one. The error is [ErrUnavailable] if that is not known.
func (s *Session) TryLock(ctx context.Context, schema, name string) (*Lock, error) {
	l := &Lock{session: s, name: schema + "\x00" + name, lost: make(chan struct{})}
	if s.hasLock(l.name) { // PostgreSQL would give it to the same session once more
		return nil, nil
	}
	got := false
	err := s.do(ctx, &call{
		f: func(ctx context.Context, conn *pgx.Conn) (err error) {
			if s.hasLock(l.name) {
				return nil
			}
			if err := conn.QueryRow(ctx, pg.InSchema(sqlLockKey, schema), name).Scan(&l.key); err != nil {
				return fmt.Errorf("lock %s: %w", name, err)
			}
			if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1::bigint)`, l.key).Scan(&got); err != nil {
				return fmt.Errorf("lock %s: %w", name, err)
			}
			if got {
				s.keep(l)
			}
			return nil
		},
		undo: func(ctx context.Context, conn *pgx.Conn) {
			if got {
				s.unlock(ctx, conn, l)
			}
		},
	})
	if err != nil || !got {
		return nil, err
	}
	return l, nil
}

func (s *Session) hasLock(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.locks[name] != nil
}

func (s *Session) keep(l *Lock) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.locks[l.name] = l
}

// unlock gives a lock back on the connection that has it. If that fails, the connection is closed, which does the same.
func (s *Session) unlock(ctx context.Context, conn *pgx.Conn, l *Lock) {
	s.mu.Lock()
	mine := s.locks[l.name] == l
	if mine {
		delete(s.locks, l.name)
	}
	s.mu.Unlock()
	if !mine {
		return
	}
	close(l.lost)
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_unlock($1::bigint)`, l.key); err != nil {
		pg.Disconnect(conn)
	}
}

// Lost is closed once the lock is not held any more: it was given back, or the connection is gone, though this process
// may go on.
func (l *Lock) Lost() <-chan struct{} { return l.lost }

// Unlock gives the lock back. When ctx ends it is given back later.
func (l *Lock) Unlock(ctx context.Context) {
	// Without a session the lock is free.
	_ = l.session.do(ctx, &call{must: true, f: func(ctx context.Context, conn *pgx.Conn) error {
		l.session.unlock(ctx, conn, l)
		return nil
	}})
}

// Do runs a statement on the connection that has the lock. It returns [ErrUnavailable] if the lock is not held any
// more.
func (l *Lock) Do(ctx context.Context, f func(ctx context.Context, conn *pgx.Conn) error) error {
	return l.session.do(ctx, &call{f: func(ctx context.Context, conn *pgx.Conn) error {
		select {
		case <-l.lost:
			return ErrUnavailable
		default:
			return f(ctx, conn)
		}
	}})
}
