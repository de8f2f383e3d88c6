package pgsession

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox/internal/pg"
)

// sqlNotify does not wait at its commit: all commits that notify queue behind one lock, which another application's
// may have while it waits for its standby. It sends nothing while notifications pile up that a listener does not
// read: a full queue would make the commits of all who notify fail.
const sqlNotify = `
SELECT pg_notify(c, $2::text), set_config('lock_timeout', '100ms', true), set_config('synchronous_commit', 'off', true)
  FROM pg_catalog.unnest($1::text[]) AS c WHERE pg_notification_queue_usage() < 0.01::float8`

// completeMark ends the payload of a notification that [Session.Notify] has sent as complete.
const completeMark = "+"

// Notify notifies the listeners of channels, except those of this session, in a transaction of its own on a
// connection of the pool and in one round trip. It is not for a business transaction, whose commit would have to
// queue for a lock of the whole server. Complete says that there is a notification for each wake-up, so listeners
// need not look for more.
func (s *Session) Notify(ctx context.Context, complete bool, channels ...string) error {
	db := s.db()
	if db == nil {
		return nil
	}
	payload := s.id
	if complete {
		payload += completeMark
	}
	_, err := notify(ctx, db, payload, channels...)
	return err
}

// notify reports whether the notifications were sent.
func notify(ctx context.Context, db pg.BatchSender, payload string, channels ...string) (sent bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	var b pgx.Batch
	b.Queue(sqlNotify, channels, payload).Exec(func(tag pgconn.CommandTag) error {
		sent = tag.RowsAffected() > 0
		return nil
	})
	if err := db.SendBatch(ctx, &b).Close(); err != nil {
		return false, fmt.Errorf("notify: %w", err)
	}
	return sent, nil
}
