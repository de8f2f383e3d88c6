package outboxcontract

import (
	"cmp"
	"fmt"
	"reflect"
	"regexp"
	"strconv"

	"github.com/google/jsonschema-go/jsonschema"
	"github.com/outboxgo/outbox"
)

// document is an AsyncAPI 3 document.
type document struct {
	AsyncAPI   string               `json:"asyncapi"`
	Info       info                 `json:"info"`
	Channels   map[string]channel   `json:"channels"`
	Operations map[string]operation `json:"operations"`
	Components components           `json:"components"`
}

type info struct {
	Title       string `json:"title"`
	Version     string `json:"version"`
	Description string `json:"description"`
}

type channel struct {
	Address  string         `json:"address"`
	Messages map[string]ref `json:"messages"`
}

type operation struct {
	Action   string `json:"action"`
	Channel  ref    `json:"channel"`
	Messages []ref  `json:"messages"`
}

type components struct {
	Messages map[string]message            `json:"messages"`
	Schemas  map[string]*jsonschema.Schema `json:"schemas"`
}

type ref struct {
	Ref string `json:"$ref"`
}

// message is an event type.
type message struct {
	Name        string             `json:"name"`
	ContentType string             `json:"contentType"`
	Headers     *jsonschema.Schema `json:"headers"`
	Payload     *jsonschema.Schema `json:"payload,omitempty"`
	Correlation location           `json:"correlationId"`
	Bindings    bindings           `json:"bindings"`
	Outbox      extension          `json:"x-outbox"`
}

type location struct {
	Location string `json:"location"`
}

type bindings struct {
	Kafka kafkaBinding `json:"kafka"`
}

type kafkaBinding struct {
	Key     *jsonschema.Schema `json:"key"`
	Version string             `json:"bindingVersion"`
}

// extension has what AsyncAPI has no place for.
type extension struct {
	Version       int      `json:"version,omitempty"`
	AggregateType string   `json:"aggregateType"`
	Key           string   `json:"key"` // keyAggregate or keyOwn
	Upcasts       []string `json:"upcasts,omitempty"`
}

// What the key of an event is.
const (
	keyAggregate = "aggregate id"
	keyOwn       = "own"
)

// headersName is the schema of the headers that all events have.
const headersName = "outbox.headers"

const description = "Events of the outbox as records in Kafka: CloudEvents 1.0 in binary mode, whose attributes are headers. " +
	"Readers ignore members and headers that they do not know."

// newDocument returns the document of a registry.
func newDocument(events *outbox.Registry, upcasters []outbox.Upcaster) (*document, error) {
	doc := &document{
		AsyncAPI: "3.0.0", Info: info{events.Source(), "1.0.0", description},
		Channels: map[string]channel{}, Operations: map[string]operation{},
		Components: components{map[string]message{}, map[string]*jsonschema.Schema{headersName: sharedHeaders()}},
	}
	of := &schemas{doc.Components.Schemas, map[reflect.Type]string{}}
	upcasts, err := upcastsOf(events, upcasters)
	if err != nil {
		return nil, err
	}
	for _, reg := range events.Registrations() {
		m := newMessage(events.Source(), reg)
		m.Outbox.Upcasts = upcasts[reg.EventType]
		if reg.Codec.ContentType == outbox.JSON().ContentType {
			if doc.Components.Schemas[reg.EventType], err = of.event(reg.GoType); err != nil {
				return nil, fmt.Errorf("%s: %w", reg.EventType, err)
			}
			m.Payload = &jsonschema.Schema{Ref: refPrefix + reg.EventType}
		}
		doc.Components.Messages[reg.EventType] = m
		doc.send(reg)
	}
	return doc, nil
}

// send adds an event type to its channel.
func (doc *document) send(reg outbox.Registration) {
	c, has := doc.Channels[reg.Topic]
	if !has {
		c = channel{reg.Topic, map[string]ref{}}
		doc.Channels[reg.Topic] = c
	}
	c.Messages[reg.EventType] = ref{"#/components/messages/" + reg.EventType}
	name := "send." + reg.Topic
	op := cmp.Or(doc.Operations[name].Action, "send")
	doc.Operations[name] = operation{op, ref{"#/channels/" + reg.Topic},
		append(doc.Operations[name].Messages, ref{"#/channels/" + reg.Topic + "/messages/" + reg.EventType})}
}

// event returns the schema of the payload of an event, which is never null.
func (s *schemas) event(t reflect.Type) (*jsonschema.Schema, error) {
	own, err := leaf(t)
	if own == nil && err == nil {
		own, err = s.composite(t)
	}
	if err != nil {
		return nil, err
	}
	return present(own), nil
}

func newMessage(source string, reg outbox.Registration) message {
	key, what := keyAggregate, "The id of the "+reg.AggregateType+"."
	if reg.OwnKey {
		key, what = keyOwn, "The key of the event type."
	}
	return message{
		Name: reg.EventType, ContentType: reg.Codec.ContentType, Headers: headersOf(source, reg),
		Correlation: location{"$message.header#/ce_correlationid"},
		Bindings:    bindings{kafkaBinding{&jsonschema.Schema{Type: "string", Description: what}, "0.5.0"}},
		Outbox:      extension{Version: versionOf(reg.EventType), AggregateType: reg.AggregateType, Key: key},
	}
}

var versionSuffix = regexp.MustCompile(`[._-]v([1-9][0-9]*)$`)

// versionOf returns the version that a name ends with, 0 for none.
func versionOf(eventType string) int {
	match := versionSuffix.FindStringSubmatch(eventType)
	if match == nil {
		return 0
	}
	n, _ := strconv.Atoi(match[1])
	return n
}

// upcastsOf returns, for each event type, those whose events become events of it.
func upcastsOf(events *outbox.Registry, upcasters []outbox.Upcaster) (map[string][]string, error) {
	names := map[reflect.Type]string{}
	for _, reg := range events.Registrations() {
		names[reg.GoType] = reg.EventType
	}
	upcasts := map[string][]string{}
	for _, u := range upcasters {
		from, to := u.Types()
		if names[from] == "" || names[to] == "" {
			return nil, fmt.Errorf("upcaster from %v to %v: %w", from, to, outbox.ErrUnregistered)
		}
		upcasts[names[to]] = append(upcasts[names[to]], names[from])
	}
	return upcasts, nil
}
