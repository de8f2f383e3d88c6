package pgsession

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// Ear hears the notifications of a channel.
type Ear struct {
	session     *Session
	channel     string
	heard, wake chan<- struct{}
}

// Listen has heard signalled after each notification on a channel, and whenever some may have been missed, until
// the ear is closed. After a notification that was sent as complete it signals wake instead.
func (s *Session) Listen(channel string, heard, wake chan<- struct{}) *Ear {
	e := &Ear{s, channel, heard, wake}
	s.changeEars(func() { s.ears[e] = true })
	return e
}

// Close ends the listening.
func (e *Ear) Close() { e.session.changeEars(func() { delete(e.session.ears, e) }) }

func (s *Session) changeEars(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
	s.changed = true
	if s.interrupt != nil {
		s.interrupt()
	}
}

// listened is what is known about a channel that the connection listens to.
type listened struct {
	locked bool      // it has the lock that all listeners share
	tried  time.Time // when it was last tried to take that
}

// listen makes the connection listen to the channels with listeners, and to no other.
func (s *Session) listen(ctx context.Context, conn *pgx.Conn, listening map[string]listened) error {
	wanted := map[string]bool{}
	s.mu.Lock()
	s.changed = false
	for e := range s.ears {
		wanted[e.channel] = true
	}
	s.mu.Unlock()
	for channel := range wanted {
		l, listens := listening[channel]
		if !listens {
			if err := execute(ctx, conn, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
				return err
			}
		}
		if l.locked || listens && time.Since(l.tried) < lockAgain {
			continue
		}
		locked, err := s.share(ctx, conn, channel, listens)
		if err != nil {
			return err
		}
		listening[channel] = listened{locked, time.Now()}
		if !listens || locked {
			s.hear(channel, false) // notifications from before
		}
	}
	for channel, l := range listening {
		if wanted[channel] {
			continue
		}
		if err := execute(ctx, conn, "UNLISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
			return err
		}
		if l.locked {
			if err := execute(ctx, conn, `SELECT pg_advisory_unlock_shared(`+listenerKey+`)`, channel); err != nil {
				return err
			}
		}
		delete(listening, channel)
	}
	return nil
}

// lockAgain is how long a lock is not tried again that a stranger has. A session without other locks may not wake up
// before its next ping.
const lockAgain = time.Second

// errHeld means that a stranger has, or waits for, the lock that the listeners of a channel share.
var errHeld = errors.New("the lock is taken")

const (
	sqlShare    = `SELECT pg_advisory_lock_shared(` + listenerKey + `)`
	sqlTryShare = `SELECT pg_try_advisory_lock_shared(` + listenerKey + `)`
	// sqlHolder finds who has the lock alone, or waits for that.
	sqlHolder = `
SELECT coalesce(string_agg('pid ' || l.pid::text || ' of role ' || coalesce(a.usename::text, '?'), ', ' ORDER BY l.granted DESC, l.pid), 'unknown')
  FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND l.objsubid = 1 AND (l.classid::bigint << 32) | l.objid::bigint = ` + listenerKey + `
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())`
)

// share takes the lock that the listeners of a channel share. While a stranger has it, other sessions do not get it
// alone, and so notify.
func (s *Session) share(ctx context.Context, conn *pgx.Conn, channel string, again bool) (locked bool, err error) {
	began := time.Now()
	if again {
		err = queryRow(ctx, conn, &locked, sqlTryShare, channel)
	} else { // it waits for sqlListened of others
		err = execute(ctx, conn, sqlShare, channel)
		locked = err == nil
	}
	if err != nil && !pg.IsLocked(err) {
		return false, err
	}
	var held error
	if !locked {
		var holder string
		if err := queryRow(ctx, conn, &holder, sqlHolder, channel); err != nil {
			return false, err
		}
		held = fmt.Errorf("%w by %s", errHeld, holder)
	}
	s.locking.Report("the advisory lock of the listeners of channel "+channel, began, held)
	return locked, nil
}

// listenerKey is the key of the lock that all listeners of a channel share. Who can take it alone is the only one.
const listenerKey = `hashtextextended('outbox.listens.' || $1::text, 0::bigint)`

// sqlListened finds the channels that another session listens to. A lock that it gets lasts as long as the statement:
// a session that begins to listen waits for that.
const sqlListened = `
SELECT c FROM pg_catalog.unnest($1::text[]) AS c WHERE NOT pg_try_advisory_xact_lock(hashtextextended('outbox.listens.' || c, 0::bigint))`

// ListenedElsewhere returns the channels that other sessions listen to. The error is [ErrUnavailable] if that is not
// known.
func (s *Session) ListenedElsewhere(ctx context.Context, channels []string) (elsewhere []string, err error) {
	answer := make(chan []string, 1)
	err = s.do(ctx, &call{f: func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, sqlListened, channels)
		if err != nil {
			return err
		}
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		answer <- found
		return err
	}})
	if err != nil {
		return nil, fmt.Errorf("look for other listeners: %w", err)
	}
	return <-answer, nil
}

// hear signals those who listen to a channel.
func (s *Session) hear(channel string, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := range s.ears {
		switch {
		case e.channel != channel:
		case complete:
			wait.Signal(e.wake)
		default:
			wait.Signal(e.heard)
		}
	}
}
