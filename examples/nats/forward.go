// Package nats passes events on to NATS JetStream: a worker takes them from PostgreSQL, and a
// handler publishes them. README.md says what that promises.
package nats

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/outboxgo/outbox"
)

// ackTimeout is how long the stream has to confirm an event before it is published again.
const ackTimeout = 5 * time.Second

// Connect connects to NATS as a forwarder should: an event is published again by its worker, so the
// client keeps none of them back while it has no connection.
func Connect(url string) (*nats.Conn, error) {
	return nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond), nats.ReconnectBufSize(-1), nats.RetryOnFailedConnect(true))
}

// Forward returns a handler that publishes the events of a type to the subject that is named like their
// topic. It returns when a stream has stored the event.
func Forward[E outbox.DomainEvent](action string, stream jetstream.Publisher) outbox.Handler {
	return outbox.HandleNoTx(action, func(ctx context.Context, event E, m outbox.Metadata) error {
		msg, err := message(event, m)
		if err != nil {
			return outbox.Permanent(err)
		}
		ctx, cancel := context.WithTimeout(ctx, ackTimeout)
		defer cancel()
		_, err = stream.PublishMsg(ctx, msg, jetstream.WithMsgID(m.ID))
		if errors.Is(err, nats.ErrMaxPayload) {
			return outbox.Permanent(err)
		}
		return err
	})
}

// message returns an event as CloudEvents has it in a message of NATS, in binary mode.
func message(event outbox.DomainEvent, m outbox.Metadata) (*nats.Msg, error) {
	data, err := json.Marshal(event)
	if err != nil {
		return nil, fmt.Errorf("encode event: %w", err)
	}
	msg := nats.NewMsg(m.Topic())
	msg.Data = data
	for name, value := range map[string]string{
		"specversion": "1.0", "id": m.ID, "source": m.Source, "type": m.Type, "subject": m.Subject,
		"time": m.Time.Format(time.RFC3339Nano), "partitionkey": m.Key(),
	} {
		msg.Header.Set("ce-"+name, value)
	}
	for name, value := range m.Extensions { // correlationid and traceparent among them
		msg.Header.Set("ce-"+name, value)
	}
	msg.Header.Set("Content-Type", "application/json")
	return msg, nil
}
