package outboxschema

import (
	"context"
	"fmt"
	"reflect"

	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outboxgo/outbox"
)

// Format is how the events of one Go type become bytes, and the schema of these bytes. The functions that return one
// panic if schema or Go type cannot be used, because both are part of the program. A Format may be used by several
// goroutines.
type Format struct {
	goType      reflect.Type
	contentType string // without a registry
	kind        sr.SchemaType
	record      string // the full name of the record, for names of subjects
	schema      string
	references  []Reference
	index       []int // of the message in its file; Protobuf only

	encode func(ctx context.Context, event any) ([]byte, error)
	decode decoder
	// reader returns the decoder for what was written with another schema. Index is the writer's.
	reader func(w written, index []int) (decoder, error)
}

// decoder reads a payload into a pointer to an event.
type decoder func(ctx context.Context, data []byte, event any) error

// Reference is a schema that another schema uses. Files that a Protobuf message imports need none.
type Reference struct {
	// Name is what the other schema calls it: the full name of a record in Avro, a URI in JSON Schema.
	Name string
	// Subject is where it is in the registry.
	Subject string
	// Schema is its text.
	Schema string
	// References are the schemas that it uses itself.
	References []Reference
}

// written is a schema of the registry, with the schemas that it uses.
type written struct {
	schema     string
	references []named // in an order in which each comes after those that it uses
}

// named is a schema that another one uses, and the name by which it does.
type named struct{ name, schema string }

// flatten returns references with all that they use, in an order in which each comes after those that it uses.
func flatten(references []Reference) (all []named) {
	for _, r := range references {
		all = append(append(all, flatten(r.References)...), named{r.Name, r.Schema})
	}
	return all
}

// Codec returns the codec of a format without a registry. Its content type is application/protobuf, application/avro
// or application/json. Readers of Avro need the schema that the events were written with, so use it without a registry
// only for schemas that never change.
func (f Format) Codec() outbox.Codec {
	return outbox.Codec{ContentType: f.contentType, Encode: f.encode, Decode: f.decode}
}

// typed returns a function that takes events of any type as one that takes events of E.
func typed[E any](encode func(context.Context, E) ([]byte, error)) func(context.Context, any) ([]byte, error) {
	return func(ctx context.Context, event any) ([]byte, error) {
		e, is := event.(E)
		if !is {
			return nil, wrongType[E](event)
		}
		return encode(ctx, e)
	}
}

// into is [typed] for decoders.
func into[E any](decode func(context.Context, []byte, *E) error) decoder {
	return func(ctx context.Context, data []byte, event any) error {
		e, is := event.(*E)
		if !is {
			return wrongType[E](event)
		}
		return decode(ctx, data, e)
	}
}

func wrongType[E any](event any) error {
	return fmt.Errorf("event is %T, the codec is for %v", event, reflect.TypeFor[E]())
}

// must returns a function that returns v, or panics with what could not be made.
func must[T any](v T, err error) func(what string) T {
	return func(what string) T {
		if err != nil {
			panic(fmt.Sprintf("outboxschema: %s: %v", what, err))
		}
		return v
	}
}
