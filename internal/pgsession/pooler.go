package pgsession

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/pg"
)

// errPooled means that a session is behind a pooler that gives its connection to others, too.
var errPooled = errors.New("a pooler")

// errQueueFills means that a listener does not read, so nothing was sent.
var errQueueFills = errors.New("the queue of notifications fills up")

const (
	probes     = 3
	probeLimit = 2 * time.Second
)

// examine returns errPooled if a connection does not stay with one server process, and nil if it does. A pooler invents
// the number of the process that it tells a client, for cancel requests. One that does not is found out by a
// notification that another connection sends while this one is idle; one to oneself would come back.
func (s *Session) examine(ctx context.Context, conn *pgx.Conn) error {
	var pid uint32
	if err := queryRow(ctx, conn, &pid, `SELECT pg_backend_pid()`); err != nil {
		return fmt.Errorf("examine: %w", err)
	}
	if startup := conn.PgConn().PID(); pid != startup {
		return fmt.Errorf("%w: the server process is %d, and the connection says %d", errPooled, pid, startup)
	}
	channel := "outbox_probe_" + uuid.NewString()
	if err := execute(ctx, conn, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
		return fmt.Errorf("examine: %w", err)
	}
	other, err := s.connect(ctx)
	if err != nil {
		return fmt.Errorf("examine: %w", err)
	}
	defer pg.Disconnect(other)
	for range probes {
		sent, err := notify(ctx, other, "", channel)
		if err == nil && !sent {
			err = errQueueFills
		}
		if err != nil {
			return fmt.Errorf("examine: %w", err)
		}
		waiting, cancel := context.WithTimeout(ctx, probeLimit)
		_, err = conn.WaitForNotification(waiting)
		cancel()
		if err == nil {
			if err := execute(ctx, conn, "UNLISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
				return fmt.Errorf("examine: %w", err)
			}
			return nil
		}
		if conn.IsClosed() || ctx.Err() != nil {
			return fmt.Errorf("examine: %w", err)
		}
	}
	return fmt.Errorf("%w: a notification of another connection has not arrived", errPooled)
}

func queryRow(ctx context.Context, conn *pgx.Conn, to any, sql string, args ...any) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	return conn.QueryRow(ctx, sql, args...).Scan(to)
}
