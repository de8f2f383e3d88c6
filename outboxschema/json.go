package outboxschema

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"reflect"
	"slices"
	"strings"

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

// ownSchema is the URL of a schema. No reference has its name.
var ownSchema = &url.URL{Scheme: "file", Path: "/.schema"}

func compileJSON(w written) (*jsonschema.Schema, error) {
	own, err := jsonschema.UnmarshalJSON(strings.NewReader(w.schema))
	if err != nil {
		return nil, err
	}
	loader := referenceLoader{references: w.references, documents: map[string]any{}}
	for i, r := range w.references {
		if loader.documents[r.name], err = jsonschema.UnmarshalJSON(strings.NewReader(r.schema)); err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
		if slices.ContainsFunc(w.references[:i], func(o named) bool { return o.name == r.name && o.schema != r.schema }) {
			return nil, fmt.Errorf("two schemas have the name %s", r.name)
		}
	}
	loader.loaded(ownSchema, own)
	compiler := jsonschema.NewCompiler()
	compiler.UseLoader(&loader)
	if err := compiler.AddResource(ownSchema.String(), own); err != nil {
		return nil, err
	}
	return compiler.Compile(ownSchema.String())
}

// referenceLoader loads the schemas that are references, and nothing from files or the network. The compiler takes what
// a $ref says as relative to the URL of the schema around it, or to its $id. So the name of a reference, which is what
// a $ref says, is relative to any of those that were loaded.
type referenceLoader struct {
	references []named
	documents  map[string]any // by name
	bases      []*url.URL
}

// Load implements [jsonschema.URLLoader].
func (l *referenceLoader) Load(location string) (any, error) {
	for _, r := range l.references {
		for _, base := range l.bases {
			if at, err := base.Parse(r.name); err == nil && at.String() == location {
				l.loaded(at, l.documents[r.name])
				return l.documents[r.name], nil
			}
		}
	}
	return nil, errors.New("not among the references")
}

// loaded adds the URLs that names may be relative to in a schema at base: also those of its parts. Draft 4 has id
// instead of $id.
func (l *referenceLoader) loaded(base *url.URL, schema any) {
	l.bases = append(l.bases, base)
	l.addIDs(base, schema)
}

func (l *referenceLoader) addIDs(base *url.URL, part any) {
	switch part := part.(type) {
	case []any:
		for _, value := range part {
			l.addIDs(base, value)
		}
	case map[string]any:
		id, is := part["$id"].(string)
		if !is {
			id, is = part["id"].(string)
		}
		if at, err := base.Parse(id); is && err == nil {
			base = at
			l.bases = append(l.bases, base)
		}
		for _, value := range part {
			l.addIDs(base, value)
		}
	}
}
