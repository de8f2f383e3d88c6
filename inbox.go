package outbox

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
)

// MaxAnswer is the largest number of bytes in an answer that an [Inbox] keeps: 64 KiB.
const MaxAnswer = 64 << 10

// Inbox does once what a message asks for that does not come through Kafka and may come more than once: a webhook, a
// message of SQS or NATS, an HTTP request with an Idempotency-Key. See [Inbox.Once]. It is safe for concurrent use
// and holds nothing that must be closed.
type Inbox struct{ engine *handling.Inbox }

// NewInbox returns an inbox whose notes are in event_handled of a schema; an empty schema means public. Messages of two
// inboxes are not repeats of one another. The name has at most 249 characters; in event_handled and consumer_group_role
// inbox: precedes it, so that a consumer group may have the same name. NewInbox does no I/O. The error names every bad
// argument.
func NewInbox(schema, name string) (*Inbox, error) {
	schema = cmp.Or(schema, pg.DefaultSchema)
	err := check.Schema(schema)
	if bad := check.Text(name, maxGroup-len(handling.InboxPrefix)); bad != nil {
		err = errors.Join(err, fmt.Errorf("name %w", bad))
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: inbox: %w", err)
	}
	return &Inbox{handling.NewInbox(schema, name)}, nil
}

// InboxMessage is what has arrived, for [Inbox.Once]. Source, ID and Action identify it: another message with the
// same three is a repeat.
type InboxMessage struct {
	// Source is who has sent it, at most 100 characters: stripe, or a queue. An id that clients choose, such as an
	// Idempotency-Key, is unique for its client only, so Source has to name the client that has been authenticated.
	// Otherwise a client gets the answers of another one whose key it knows.
	Source string
	// ID is the sender's id of it, at most 255 characters, the same in each repeat.
	ID string
	// Action is what is done, at most 100 characters, for example PAYMENT_RECORDED. Each action on a message is done
	// once.
	Action string
	// Request is what was sent, for example method, path and body of a request. A repeat with another Request gets
	// [ErrOtherRequest]. Its SHA-256 digest is stored. Nil means that requests are not compared.
	Request []byte
}

// Once calls f in tx unless the message was handled before, and returns what f has answered, now or the first time.
// The note that the message is handled, the answer and what f does in tx commit together. So f takes effect once per
// message for as long as the note is kept, HandledFor of [RetentionConfig]; see [CleanHandled] where neither a relay
// nor a worker runs.
//
// A call waits while another transaction handles the same message. If that one commits, the call returns its answer;
// if it rolls back, the call runs f. The lock_timeout of tx bounds the wait: then the error is [ErrInProgress]. At
// REPEATABLE READ and SERIALIZABLE, PostgreSQL fails the call with 40001 if the other transaction has committed after
// tx began: roll back and repeat the transaction, which then gets the answer. Transactions that handle several
// messages handle them in the same order, or PostgreSQL may end one of them as a deadlock (40P01).
//
// If f returns an error, Once returns it, and takes back the note and what f has done in tx. The transaction goes on.
// So a refusal that repeats are to get as well is an answer, not an error. The answer has at most [MaxAnswer] bytes.
// One without bytes comes back as nil. F must neither commit nor roll back tx, and close its rows before it returns.
//
// Once rejects a message that cannot be noted before it sends anything: the error is a [*FieldError] whose Field is
// tx, source, id, action or function. If the answer is too large, the field is answer, and what f has done is taken
// back. Both leave tx usable, and so do [ErrInProgress] and [ErrOtherRequest]. Any other error is PostgreSQL's: roll
// tx back. It is [ErrNotMigrated] too if the tables are not those of this release.
//
// Package outboxsql does the same in a [database/sql.Tx].
func (i *Inbox) Once(ctx context.Context, tx pgx.Tx, m InboxMessage, f func() (answer []byte, err error)) (answer []byte, err error) {
	if err := m.validate(tx, f); err != nil {
		return nil, err
	}
	own := handling.Message{Source: m.Source, ID: m.ID, Action: m.Action}
	if m.Request != nil {
		digest := sha256.Sum256(m.Request)
		own.Digest = digest[:]
	}
	return i.engine.Handle(ctx, tx, &own, func() ([]byte, error) {
		answer, err := f()
		if err == nil && len(answer) > MaxAnswer {
			err = fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(answer), MaxAnswer)
			return nil, &FieldError{Index: -1, Field: "answer", Err: err}
		}
		return answer, err
	})
}

func (m *InboxMessage) validate(tx pgx.Tx, f func() ([]byte, error)) error {
	bad := func(field string, err error) error { return &FieldError{Index: -1, Field: field, Err: err} }
	switch {
	case check.IsNil(tx):
		return bad("tx", ErrNilArgument)
	case f == nil:
		return bad("function", ErrNilArgument)
	}
	if err := check.Text(m.Source, envelope.MaxAggregateType); err != nil {
		return bad("source", err)
	}
	if err := check.Text(m.ID, envelope.MaxAggregateID); err != nil {
		return bad("id", err)
	}
	if err := check.Text(m.Action, handling.MaxAction); err != nil {
		return bad("action", err)
	}
	return nil
}
