package pgsession

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/wait"
)

// Ear hears the notifications of a channel.
type Ear struct {
	session *Session
	channel string
	heard   chan<- struct{}
}

// Listen has heard signalled after each notification on a channel, and whenever some may have been missed, until
// the ear is closed.
func (s *Session) Listen(channel string, heard chan<- struct{}) *Ear {
	e := &Ear{s, channel, heard}
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

// listen makes the connection listen to the channels with listeners, and to no other.
func (s *Session) listen(ctx context.Context, conn *pgx.Conn, listening map[string]bool) error {
	wanted := map[string]bool{}
	s.mu.Lock()
	s.changed = false
	for e := range s.ears {
		wanted[e.channel] = true
	}
	s.mu.Unlock()
	for channel := range wanted {
		if listening[channel] {
			continue
		}
		if err := execute(ctx, conn, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
			return err
		}
		if err := execute(ctx, conn, `SELECT pg_advisory_lock_shared(`+listenerKey+`)`, channel); err != nil {
			return err
		}
		listening[channel] = true
		s.hear(channel) // notifications from before
	}
	for channel := range listening {
		if wanted[channel] {
			continue
		}
		if err := execute(ctx, conn, "UNLISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
			return err
		}
		if err := execute(ctx, conn, `SELECT pg_advisory_unlock_shared(`+listenerKey+`)`, channel); err != nil {
			return err
		}
		delete(listening, channel)
	}
	return nil
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
func (s *Session) hear(channel string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e := range s.ears {
		if e.channel == channel {
			wait.Signal(e.heard)
		}
	}
}
