package handling

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox/internal/pg"
)

// InboxPrefix begins the name of each inbox in event_handled.consumer_group. No consumer group begins with it, so a
// message never has the row of an event.
const InboxPrefix = "inbox:"

var (
	// ErrInProgress is described in the package outbox.
	ErrInProgress = errors.New("another transaction handles the message, and has not ended within lock_timeout")
	// ErrOtherRequest is described in the package outbox.
	ErrOtherRequest = errors.New("the message was handled before with another request")
)

// Inbox is the table event_handled for messages that do not come through Kafka. It has no state.
type Inbox struct {
	schema, group               string
	sqlNote, sqlKeep, sqlAnswer string
}

// NewInbox returns an inbox.
func NewInbox(schema, name string) *Inbox {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &Inbox{
		schema: schema, group: InboxPrefix + name,
		sqlNote: in(sqlNoteMessage), sqlKeep: in(sqlKeepAnswer), sqlAnswer: in(sqlAnswer),
	}
}

// Message identifies a message in an inbox.
type Message struct {
	Source, ID, Action string
	Digest             []byte // of its request, [DigestSize] bytes, or nil
}

// DigestSize is the size of the digest of a request. In event_handled.answer it comes before the answer.
const DigestSize = 32

// sqlNoteMessage notes a message, unless it was noted before. It waits for another transaction that notes the same
// one. If that has committed, and the snapshot of this transaction is older, PostgreSQL fails it with 40001.
const sqlNoteMessage = `
INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, answer)
VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT (consumer_group, aggregate_type, aggregate_id, action) DO NOTHING
RETURNING id`

const sqlKeepAnswer = `
UPDATE {schema}.event_handled SET answer = $2 WHERE id = $1 RETURNING id`

const sqlAnswer = `
SELECT answer FROM {schema}.event_handled
 WHERE consumer_group = $1 AND aggregate_type = $2 AND aggregate_id = $3 AND action = $4`

// The savepoint is set before the message is noted. So an error of the function undoes its effect together with the
// note, even if the caller commits. A function may call Handle again: PostgreSQL takes the last savepoint of a name.
const (
	sqlSavepoint = `SAVEPOINT outbox_inbox`
	sqlRelease   = `RELEASE SAVEPOINT outbox_inbox`
	undo         = `ROLLBACK TO SAVEPOINT outbox_inbox; RELEASE SAVEPOINT outbox_inbox`
)

// Handle notes a message in a transaction of the caller and calls f, or returns what f answered the first time. Of tx
// it uses Exec, SendBatch, Conn and Rollback alone.
func (i *Inbox) Handle(ctx context.Context, tx pgx.Tx, m *Message, f func() ([]byte, error)) (answer []byte, err error) {
	c := messageCall{Inbox: i, tx: tx, m: m}
	defer c.end(ctx) // also if f panics
	for {
		id, err := c.note(ctx)
		if err != nil {
			return nil, c.wrap("note", err)
		}
		if id != 0 {
			if answer, err = f(); err != nil {
				return nil, err
			}
			if err := c.keep(ctx, id, answer); err != nil {
				return nil, c.wrap("keep the answer to", err)
			}
			return orNil(answer), nil
		}
		found, err := c.read(ctx)
		if err != nil {
			return nil, c.wrap("read the answer to", err)
		}
		if len(found) == 1 { // otherwise retention has removed it in between
			return m.answerIn(found[0])
		}
	}
}

// messageCall is a call of [Inbox.Handle].
type messageCall struct {
	*Inbox
	tx   pgx.Tx
	m    *Message
	open bool // the savepoint is set
}

// note sets the savepoint and notes the message. The id is 0 if the message was noted before.
func (c *messageCall) note(ctx context.Context) (id int64, err error) {
	var b pgx.Batch
	b.Queue(sqlSavepoint).Exec(func(pgconn.CommandTag) error {
		c.open = true
		return nil
	})
	b.Queue(c.sqlNote, c.group, c.m.Source, c.m.ID, c.m.Action, orNull(c.m.Digest)).QueryRow(func(row pgx.Row) error {
		if err := row.Scan(&id); !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		return nil
	})
	return id, c.tx.SendBatch(ctx, &b).Close()
}

// keep stores the answer and releases the savepoint.
func (c *messageCall) keep(ctx context.Context, id int64, answer []byte) error {
	var b pgx.Batch
	if len(answer) > 0 {
		kept := make([]byte, DigestSize, DigestSize+len(answer))
		copy(kept, c.m.Digest)
		b.Queue(c.sqlKeep, id, append(kept, answer...)).QueryRow(func(row pgx.Row) error { return row.Scan(&id) })
	}
	return c.release(ctx, &b)
}

// read reads what is stored for a message that was noted before, and releases the savepoint.
func (c *messageCall) read(ctx context.Context) (found [][]byte, err error) {
	var b pgx.Batch
	b.Queue(c.sqlAnswer, c.group, c.m.Source, c.m.ID, c.m.Action).QueryRow(func(row pgx.Row) error {
		var kept []byte
		err := row.Scan(&kept)
		if err == nil {
			found = append(found, kept)
		} else if errors.Is(err, pgx.ErrNoRows) {
			err = nil
		}
		return err
	})
	return found, c.release(ctx, &b)
}

// release sends a batch and, as its last statement, the release of the savepoint.
func (c *messageCall) release(ctx context.Context, b *pgx.Batch) error {
	b.Queue(sqlRelease)
	err := c.tx.SendBatch(ctx, b).Close()
	c.open = err != nil
	return err
}

// end undoes what a call that has not ended well has done. If it cannot, for example because f has left rows open, it
// rolls back the transaction.
func (c *messageCall) end(ctx context.Context) {
	if conn := c.tx.Conn(); !c.open || conn != nil && conn.IsClosed() {
		return
	}
	ctx, cancel := pg.Bounded(context.WithoutCancel(ctx))
	defer cancel()
	if _, err := c.tx.Exec(ctx, undo); err != nil {
		_ = c.tx.Rollback(ctx)
	}
}

// wrap returns an error of PostgreSQL with what failed, or nil.
func (c *messageCall) wrap(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case pg.IsUndefined(err):
		err = pg.NotMigrated(c.schema, err)
	case isWait(err):
		err = fmt.Errorf("%w: %w", ErrInProgress, err)
	}
	return fmt.Errorf("outbox: %s a message: %w", what, err)
}

// isWait reports whether a transaction has waited in vain for another one to end. Then the error has a context; if a
// table is locked, it has none.
func isWait(err error) bool {
	if failed, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.IsLocked(err) && failed.Where != ""
	}
	// This error is that of lib/pq. W is the context, a field of errors in the protocol.
	failed, ok := errors.AsType[interface {
		error
		SQLState() string
		Get(field byte) string
	}](err)
	return ok && failed.SQLState() == pg.LockNotAvailable && failed.Get('W') != ""
}

// answerIn returns the answer in a value of event_handled.answer.
func (m *Message) answerIn(kept []byte) ([]byte, error) {
	if kept == nil {
		return nil, nil
	}
	digest := kept[:DigestSize]
	if m.Digest != nil && !bytes.Equal(digest, m.Digest) && !bytes.Equal(digest, make([]byte, DigestSize)) {
		return nil, fmt.Errorf("outbox: %w", ErrOtherRequest)
	}
	return orNil(kept[DigestSize:]), nil
}

// orNil returns an answer, or nil for one without bytes: event_handled knows no difference.
func orNil(answer []byte) []byte {
	if len(answer) == 0 {
		return nil
	}
	return answer
}

// orNull returns a value that each driver takes for NULL if it is nil.
func orNull(value []byte) any {
	if value == nil {
		return nil
	}
	return value
}
