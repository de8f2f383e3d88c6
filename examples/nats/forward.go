// Package nats passes events on to NATS JetStream: a worker takes them from PostgreSQL, and a
// handler publishes them. README.md says what that promises.
package nats

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
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

// Payload is an event whose payload stays as it was recorded, with members that the forwarder does not know. The
// registry of a forwarder has a type for each event type, which embeds it:
//
//	type paid struct{ nats.Payload }
//
// Types that are not JSON need a codec whose Decode keeps the bytes in RawMessage.
type Payload struct{ json.RawMessage }

// OccurredAt implements [outbox.DomainEvent]. The metadata has the time: the forwarder records nothing.
func (Payload) OccurredAt() time.Time { return time.Time{} }

// AggregateID is for [outbox.Event].
func (Payload) AggregateID() string { return "" }

func (p Payload) recorded() []byte { return p.RawMessage }

// payload is implemented by types that embed [Payload].
type payload interface {
	outbox.DomainEvent
	recorded() []byte
}

// Forward returns a handler that publishes the events of a type to the subject that is named like their
// topic. It returns when a stream has stored the event.
func Forward[E payload](action string, stream jetstream.Publisher) outbox.Handler {
	return outbox.HandleNoTx(action, func(ctx context.Context, event E, m outbox.Metadata) error {
		ctx, cancel := context.WithTimeout(ctx, ackTimeout)
		defer cancel()
		_, err := stream.PublishMsg(ctx, message(event.recorded(), m), jetstream.WithMsgID(m.ID))
		if errors.Is(err, nats.ErrMaxPayload) {
			return outbox.Permanent(err)
		}
		return err
	})
}

// message returns an event as CloudEvents has it in a message of NATS, in binary mode. The message of a tombstone has
// no data and no content type, and an extension that says why.
func message(data []byte, m outbox.Metadata) *nats.Msg {
	msg := nats.NewMsg(m.Topic())
	maps.Copy(msg.Header, m.Headers)
	for name, value := range map[string]string{
		"specversion": "1.0", "id": m.ID, "source": m.Source, "type": m.Type, "subject": m.Subject,
		"time": m.Time.Format(time.RFC3339Nano), "partitionkey": m.Key(),
	} {
		msg.Header.Set("ce-"+name, value)
	}
	for name, value := range m.Extensions { // correlationid and traceparent among them
		msg.Header.Set("ce-"+name, value)
	}
	if m.Tombstone {
		msg.Header.Set("ce-tombstone", "true")
		return msg
	}
	msg.Data = data
	msg.Header.Set("Content-Type", m.ContentType)
	return msg
}
