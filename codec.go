package outbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"reflect"
	"strings"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/record"
)

// Codec encodes the payloads of an event type and decodes them again.
//
// Payloads whose content type is exactly application/json are stored as jsonb:
// they can be queried, and PostgreSQL rewrites key order, spaces and numbers.
// Payloads of any other content type are stored and sent byte for byte.
type Codec struct {
	// ContentType is the media type of what Encode returns, for example
	// application/protobuf. At most 100 characters.
	ContentType string
	// Encode returns the payload of an event, which is a value of the registered
	// Go type, never a pointer to it. ctx is the one that [Recorder.Record],
	// [Recorder.Queue] or [Recorder.KafkaRecord] got, or the one that
	// RecorderHooks.Recording made of it.
	Encode func(ctx context.Context, event any) ([]byte, error)
	// Decode reads a payload into event, a pointer to the registered Go type. ctx
	// carries the event's correlation id and traceparent as that of the event's
	// handlers does, and ends when decoding the event takes longer than
	// HandlerTimeout, or when the partition is taken away. An event that cannot be
	// decoded, or not in time, is a dead letter. An error that is marked by
	// [Unavailable] is one of each handler of the event instead: the event is decoded
	// again when they are tried again.
	Decode func(ctx context.Context, data []byte, event any) error
	// DataSchema returns the CloudEvents attribute dataschema of what Encode returns: a URI
	// of its schema, or "" for no attribute. It is called after Encode has succeeded, with
	// the same context. Nil means no attribute.
	DataSchema func(ctx context.Context) string
}

// JSON is the default codec: encoding/json, stored as jsonb. It rejects strings
// that are not valid UTF-8 with [ErrUTF8], where encoding/json would replace
// the bad bytes silently; only what a MarshalJSON of the event's own has replaced
// itself is beyond it.
//
// A payload that is null is no event; and neither is an object, such as {}, that has none
// of the members which the event type always has: encoding/json would make a zero event of
// it. Of a type without members, or with nothing but omitempty ones, {} is an event. A type
// that has a MarshalJSON, or an UnmarshalJSON, of its own decides that by itself.
func JSON() Codec {
	return Codec{ContentType: record.JSONType, Encode: encodeJSON, Decode: decodeJSON}
}

func (c Codec) check() error {
	if err := check.Attribute(c.ContentType, envelope.MaxContentType); err != nil {
		return err
	}
	media, _, err := mime.ParseMediaType(c.ContentType)
	if err != nil || !strings.Contains(media, "/") || strings.TrimSpace(c.ContentType) != c.ContentType {
		return fmt.Errorf("%q %w: want a media type", c.ContentType, ErrMalformed)
	}
	if envelope.SaysWhole(c.ContentType) {
		return fmt.Errorf("%q %w: it says that the payload is a CloudEvent", c.ContentType, ErrMalformed)
	}
	if c.Encode == nil || c.Decode == nil {
		return fmt.Errorf("codec function %w", ErrNilArgument)
	}
	return nil
}

func encodeJSON(_ context.Context, event any) ([]byte, error) {
	event = addressable(event)
	b, err := json.Marshal(event)
	if err != nil {
		return nil, err
	}
	if jsonb.HidesBadText(event, b) {
		return nil, ErrUTF8
	}
	if _, decides := event.(json.Marshaler); !decides && string(b) == "null" {
		return nil, errNullEvent // no consumer could read it
	}
	return b, nil
}

// addressable returns a pointer to a copy of a value: encoding/json asks the methods of pointers only behind one, and
// those of *big.Int, for example, are what decodes a big.Int. Nil and pointers are returned as they are.
func addressable(event any) any {
	v := reflect.ValueOf(event)
	if !v.IsValid() || v.Kind() == reflect.Pointer {
		return event
	}
	p := reflect.New(v.Type())
	p.Elem().Set(v)
	return p.Interface()
}

func decodeJSON(_ context.Context, data []byte, event any) error {
	if err := json.Unmarshal(data, event); err != nil {
		return err
	}
	if _, decides := event.(json.Unmarshaler); decides {
		return nil
	}
	if string(bytes.TrimSpace(data)) == "null" {
		return errNullEvent
	}
	if v := reflect.ValueOf(event).Elem(); v.IsZero() && !hasMemberOf(data, event) {
		return fmt.Errorf("it has no member of %v", v.Type())
	}
	return nil
}

var errNullEvent = errors.New("it is null")

// hasMemberOf reports whether an object has one of the members that a zero event, which is a pointer, has when it
// is encoded. It is true if that is not an object with members.
func hasMemberOf(data []byte, zero any) bool {
	var always, given map[string]json.RawMessage
	encoded, err := json.Marshal(zero)
	if err != nil || json.Unmarshal(encoded, &always) != nil || len(always) == 0 || json.Unmarshal(data, &given) != nil {
		return true
	}
	for name := range given {
		for member := range always {
			if strings.EqualFold(name, member) { // as encoding/json does
				return true
			}
		}
	}
	return false
}
