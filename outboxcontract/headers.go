package outboxcontract

import (
	"github.com/google/jsonschema-go/jsonschema"
	"github.com/outboxgo/outbox"
)

// sharedHeaders returns the schema of the headers whose values the event type does not say.
func sharedHeaders() *jsonschema.Schema {
	return headers([]header{
		{"ce_specversion", constant("1.0"), true},
		{"ce_id", described("The id of the event. Source, id and type together name the event."), true},
		{"ce_subject", described("The id of the aggregate."), true},
		{"ce_time", &jsonschema.Schema{Type: "string", Format: "date-time", Description: "When the event happened."}, true},
		{"ce_correlationid", described("The request that caused the event."), false},
		{"ce_traceparent", described("The trace of the event, as W3C writes it."), false},
		{"traceparent", described("The same, where tracing libraries look for it."), false},
		{"ce_traceid", described("A trace id of another form."), false},
	})
}

// headersOf returns the schema of the headers of an event type.
func headersOf(source string, reg outbox.Registration) *jsonschema.Schema {
	all := []header{
		{"ce_source", constant(source), true},
		{"ce_type", constant(reg.EventType), true},
		{"ce_aggregatetype", constant(reg.AggregateType), true},
		{"content-type", constant(reg.Codec.ContentType), true},
	}
	for _, name := range reg.Attributes {
		all = append(all, header{"ce_" + name, &jsonschema.Schema{Type: "string"}, false})
	}
	return &jsonschema.Schema{AllOf: []*jsonschema.Schema{{Ref: refPrefix + headersName}, headers(all)}}
}

type header struct {
	name     string
	schema   *jsonschema.Schema
	required bool
}

func headers(all []header) *jsonschema.Schema {
	object := &jsonschema.Schema{Type: "object", Properties: map[string]*jsonschema.Schema{}}
	for _, h := range all {
		object.Properties[h.name] = h.schema
		object.PropertyOrder = append(object.PropertyOrder, h.name)
		if h.required {
			object.Required = append(object.Required, h.name)
		}
	}
	return object
}

func constant(value string) *jsonschema.Schema {
	return &jsonschema.Schema{Const: jsonschema.Ptr[any](value)}
}

func described(text string) *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Description: text}
}
