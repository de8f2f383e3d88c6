package outboxschema

import (
	"context"
	"fmt"
	"reflect"

	"github.com/twmb/avro"
	"github.com/twmb/franz-go/pkg/sr"
)

// Avro returns the format of events of the struct E in Avro. The schema follows from the struct and its tags "avro", as
// package github.com/twmb/avro describes. A field that is added needs a default in its tag, so that events from before
// can be read. Options set the name and the namespace, for example.
func Avro[E any](options ...avro.SchemaOpt) Format {
	schema := must(avro.SchemaFor[E](options...))("schema of " + reflect.TypeFor[E]().String())
	return avroFormat[E](schema, nil)
}

// AvroSchema returns the format of events of E in Avro, with a given schema. Fields of E are found by their tags
// "avro", or else their names. References are the schemas that define what this one uses.
func AvroSchema[E any](schema string, references ...Reference) Format {
	parsed := must(parseAvro(written{schema, flatten(references)}))("schema for " + reflect.TypeFor[E]().String())
	return avroFormat[E](parsed, references)
}

func avroFormat[E any](schema *avro.Schema, references []Reference) Format {
	return Format{
		goType: reflect.TypeFor[E](), contentType: "application/avro", kind: sr.TypeAvro,
		record: fullName(schema), schema: schema.String(), references: references,
		encode: typed(func(_ context.Context, e E) ([]byte, error) { return schema.Encode(&e) }),
		decode: avroDecoder[E](schema),
		reader: func(w written, _ []int) (decoder, error) {
			writer, err := parseAvro(w)
			if err != nil {
				return nil, err
			}
			resolved, err := avro.Resolve(writer, schema)
			if err != nil {
				return nil, err
			}
			return avroDecoder[E](resolved), nil
		},
	}
}

func avroDecoder[E any](schema *avro.Schema) decoder {
	return into(func(_ context.Context, data []byte, e *E) error {
		rest, err := schema.Decode(data, e)
		if err == nil && len(rest) > 0 {
			err = fmt.Errorf("%d bytes follow the event", len(rest))
		}
		return err
	})
}

// parseAvro parses a schema. Some registries return one that has its references in it already.
func parseAvro(w written) (*avro.Schema, error) {
	if schema, err := avro.Parse(w.schema); err == nil {
		return schema, nil
	}
	var known avro.SchemaCache
	for _, r := range w.references {
		if _, err := known.Parse(r.schema); err != nil {
			return nil, fmt.Errorf("reference %s: %w", r.name, err)
		}
	}
	return known.Parse(w.schema)
}

// fullName returns the name of a record with its namespace.
func fullName(schema *avro.Schema) string {
	root := schema.Root()
	if root.Namespace == "" {
		return root.Name
	}
	return root.Namespace + "." + root.Name
}
