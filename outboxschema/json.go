package outboxschema

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outboxgo/outbox"
)

// JSON returns the format of events of E in JSON that is checked by a JSON Schema: what does not match it is neither
// recorded nor decoded. With a registry, an event is decoded if it matches the schema that it was written with. The
// schema's title is its name for names of subjects. Without a registry, events are stored as jsonb. References are the
// schemas that $ref names.
func JSON[E any](schema string, references ...Reference) Format {
	own := must(compileJSON(written{schema, flatten(references)}))("schema for " + reflect.TypeFor[E]().String())
	plain := outbox.JSON()
	return Format{
		goType: reflect.TypeFor[E](), contentType: plain.ContentType, kind: sr.TypeJSON,
		record: own.Title, schema: schema, references: references,
		encode: typed(func(ctx context.Context, e E) ([]byte, error) {
			b, err := plain.Encode(ctx, e)
			if err != nil {
				return nil, err
			}
			return b, matchJSON(own, b)
		}),
		decode: jsonDecoder[E](own),
		reader: func(w written, _ []int) (decoder, error) {
			writer, err := compileJSON(w)
			if err != nil {
				return nil, err
			}
			return jsonDecoder[E](writer), nil
		},
	}
}

func jsonDecoder[E any](schema *jsonschema.Schema) decoder {
	plain := outbox.JSON()
	return into(func(ctx context.Context, data []byte, e *E) error {
		if err := matchJSON(schema, data); err != nil {
			return err
		}
		return plain.Decode(ctx, data, e)
	})
}

func matchJSON(schema *jsonschema.Schema, data []byte) error {
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(data))
	if err != nil {
		return err
	}
	return schema.Validate(value)
}

func compileJSON(w written) (*jsonschema.Schema, error) {
	const location = "schema.json"
	compiler := jsonschema.NewCompiler()
	compiler.UseLoader(noLoader{})
	for _, r := range append(w.references, named{location, w.schema}) {
		document, err := jsonschema.UnmarshalJSON(bytes.NewReader([]byte(r.schema)))
		if err == nil {
			err = compiler.AddResource(r.name, document)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
	}
	return compiler.Compile(location)
}

// noLoader refuses schemas that are no references: nothing is read from files or the network.
type noLoader struct{}

// Load implements [jsonschema.URLLoader].
func (noLoader) Load(string) (any, error) { return nil, errors.New("not among the references") }
