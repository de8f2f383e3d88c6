package envelope

import (
	"iter"
	"maps"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/kafka"
)

// Message is an event as a decoder has read it from a record. The package outbox shows it as its own Message.
type Message struct {
	ID, Source, Type     string
	ByPosition           bool // the record names no id, and ID is its position in Kafka
	Subject, ContentType string
	Time                 time.Time
	Extensions           map[string]string // the other attributes
	Data                 []byte
}

// IsTombstone reports whether a message whose record has a null value is a tombstone: it has no content type. With one,
// its payload is missing, as Debezium's router leaves out payloads that are in another column. A nil message is none.
func (m *Message) IsTombstone() bool { return m != nil && m.Data == nil && m.ContentType == "" }

// Received is an event as it arrived at its handlers, but for its payload. The package outbox makes a Metadata
// of it where it calls a function of the host.
type Received struct {
	ID, Source, Type, Subject string
	Time                      time.Time
	ContentType               string
	Extensions                map[string]string // the attributes of CloudEvents that have no field here
	Headers                   map[string][]string
	Kafka                     *Place    // of the record that brought the event; nil where no record did
	Attempt                   int       // of this action on this event, from 1
	Tombstone                 bool      // its record has a null value
	ByPosition                bool      // see [Message]
	Expires                   time.Time // zero: never
	Expired                   bool      // that is why no handler got it
	Origin                    *Origin
}

// Place is where a Kafka record is, and its key. The package outbox shows it as its own KafkaMetadata.
type Place struct {
	Topic     string
	Partition int32
	Offset    int64
	Key       []byte
}

// Origin is where an event came from. Each record and each delivery has its own Origin, and its
// address distinguishes the events of a transaction.
type Origin struct {
	Key        []byte        // events of the same key are handled in order; events without a key have no order
	Record     Place         // of a record; Received.Kafka points to it
	TopicID    kafka.TopicID // of the record's topic; zero if it is not known
	DeliveryID int64         // of a delivery
	Stream     string        // the topic of a delivery
}

// Topic returns the topic of the record that brought the event. For a delivery it is the topic to which a relay
// would send the event.
func (r *Received) Topic() string {
	switch {
	case r.Kafka != nil:
		return r.Kafka.Topic
	case r.Origin != nil:
		return r.Origin.Stream
	}
	return ""
}

// Key returns the key of the record that brought the event. For a delivery it is the key of the record that a
// relay would send.
func (r *Received) Key() []byte {
	switch {
	case r.Kafka != nil:
		return r.Kafka.Key
	case r.Origin != nil:
		return r.Origin.Key
	}
	return nil
}

// AggregateType returns the type of the aggregate of an event of outbox, or "".
func (r *Received) AggregateType() string { return r.Extensions["aggregatetype"] }

// Header returns the last value of a header, or "". Names are not case-sensitive.
func (r *Received) Header(name string) string { return HeaderOf(r.Headers, name) }

// HeaderOf returns the last value of a header, or "". Names are not case-sensitive.
func HeaderOf(headers map[string][]string, name string) string {
	values, found := headers[name], ""
	if values == nil {
		for other := range headers {
			if strings.EqualFold(other, name) && other > found { // of several spellings always the same one
				values, found = headers[other], other
			}
		}
	}
	if len(values) == 0 {
		return ""
	}
	return values[len(values)-1]
}

// Describe takes over what a message says about its event.
func (r *Received) Describe(m *Message) {
	r.ID, r.Source, r.Type, r.Subject = m.ID, m.Source, m.Type, m.Subject
	r.Time, r.ContentType, r.Extensions, r.ByPosition = m.Time, m.ContentType, m.Extensions, m.ByPosition
	if at := m.Extensions[eventheader.ExpiryTime]; at != "" {
		r.Expires, _ = time.Parse(time.RFC3339, strings.ToUpper(at)) // zero for what another producer means by it
	}
}

// SetExtension sets an extension attribute. An empty value removes it. The map itself may belong to the decoder, so
// it is copied.
func (r *Received) SetExtension(name, value string) {
	all := maps.Clone(r.Extensions)
	switch {
	case value == "":
		delete(all, name)
	case all == nil:
		all = map[string]string{name: value}
	default:
		all[name] = value
	}
	r.Extensions = all
}

// PlainHeaders returns the headers of a record that are neither attributes of CloudEvents nor those of a dead
// letter or a replay. It returns nil if there are none.
func PlainHeaders(headers iter.Seq2[string, []byte]) (all map[string][]string) {
	for name, value := range headers {
		if isAttributeHeader(name) {
			continue
		}
		if all == nil {
			all = map[string][]string{}
		}
		all[name] = append(all[name], string(value))
	}
	return all
}

func isAttributeHeader(name string) bool {
	const contentType = "content-type"
	return len(name) >= len(eventheader.Prefix) && strings.EqualFold(name[:len(eventheader.Prefix)], eventheader.Prefix) ||
		len(name) == len(contentType) && strings.EqualFold(name, contentType) || deadletter.IsOwn(name)
}
