package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"reflect"
	"regexp"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
)

// DomainEvent is something that happened in the domain, as a plain Go struct. Its
// topic, partition key and encoding are not part of it; the [Registry] has them.
type DomainEvent interface {
	// OccurredAt is when it happened, to the microsecond. It is sent as the
	// CloudEvents attribute time, whether the payload contains it as well or not.
	OccurredAt() time.Time
}

// Definition is an argument of [NewRegistry]: the result of [Event], [ResolveTopics] or [AllowRaw].
type Definition interface {
	define() *definition
}

// ResolveTopics is an argument of [NewRegistry] that replaces the convention by which event
// types without an [EventType.Topic] get one: resolve is called for each of them when the
// registry is made, and for a [RawEvent] of another type when it is recorded. Such types may
// have any form. Where resolve returns no topic, the convention holds.
//
// Events are stored with the topic that was resolved, so relays and workers of any process know it.
func ResolveTopics(resolve func(eventType string) (topic string, err error)) Definition {
	return topicResolver(resolve)
}

// topicResolver is the result of [ResolveTopics].
type topicResolver func(eventType string) (topic string, err error)

// define implements [Definition]. The registry asks no resolver for a definition.
func (topicResolver) define() *definition { return nil }

// EventType defines how events of the Go type E are encoded and where they are sent.
// [Event] returns one. It is immutable: its methods return changed copies.
type EventType[E DomainEvent] struct{ def definition }

// definition is an EventType without its type parameter.
type definition struct {
	goType        reflect.Type
	eventType     string
	aggregateType string
	aggregateID   func(DomainEvent) string
	topic         string                   // "" = derived from eventType
	key           func(DomainEvent) string // nil = aggregateID
	codec         Codec
	attributes    []typeAttribute
}

// typeAttribute is an extension attribute that the events of a type have.
type typeAttribute struct {
	name  string
	value func(DomainEvent) string
}

// Event defines an event type: its CloudEvents type, {company}.{domain}.{action}.v{n},
// the type of its aggregate, and a function that returns the aggregate's id, usually a
// method expression such as OrderCreated.AggregateID.
//
// Events are sent to the topic {domain}-events with the aggregate id as partition key,
// unless [EventType.Topic] or [EventType.Key] changes that. The payload is encoded by
// encoding/json and stored as jsonb, which changes the order of keys, spaces and the
// form of numbers, unless [EventType.Codec] sets another codec.
//
// E is a struct whose methods have value receivers; Record takes pointers to it as
// well. Wrap a type that cannot have such methods, for example a generated Protobuf
// message, in a struct.
func Event[E DomainEvent](eventType, aggregateType string, aggregateID func(E) string) *EventType[E] {
	return &EventType[E]{definition{
		goType:        reflect.TypeFor[E](),
		eventType:     eventType,
		aggregateType: aggregateType,
		aggregateID:   untyped(aggregateID),
		codec:         JSON(),
	}}
}

// Topic sends the events to this topic instead of the one that is derived from the
// event type, which may then have any form, such as LEDGER_POSTED. [With] says another one for
// an event, [ResolveTopics] for all types that have none.
func (t *EventType[E]) Topic(topic string) *EventType[E] {
	c := *t
	c.def.topic = topic
	return &c
}

// Key sets the partition key of the events, which is their aggregate id otherwise.
// Events of one key arrive in the order in which they were recorded.
func (t *EventType[E]) Key(key func(E) string) *EventType[E] {
	c := *t
	c.def.key = untyped(key)
	return &c
}

// Attribute adds an extension attribute of CloudEvents to the events, under a name of
// lower-case letters and digits, for example schemaversion: in Kafka it is the header
// ce_schemaversion, at the handler it is in Metadata.Extensions. Events for which value
// returns "" do not have it. Names that CloudEvents or outbox sets itself are refused.
func (t *EventType[E]) Attribute(name string, value func(E) string) *EventType[E] {
	c := *t
	c.def.attributes = append(slices.Clone(c.def.attributes), typeAttribute{name, untyped(value)})
	return &c
}

// Codec encodes the payload with c instead of JSON.
func (t *EventType[E]) Codec(codec Codec) *EventType[E] {
	c := *t
	c.def.codec = codec
	return &c
}

func (t *EventType[E]) define() *definition {
	def := t.def
	return &def
}

// untyped returns f as a function of any event, so that one map can hold definitions of
// all types. The type assertion cannot fail: the registry looks events up by their type.
func untyped[E DomainEvent](f func(E) string) func(DomainEvent) string {
	if f == nil {
		return nil
	}
	return func(e DomainEvent) string { return f(e.(E)) }
}

// Registry holds the event types of a service. It is immutable and safe for concurrent
// use.
type Registry struct {
	source   string
	byGoType map[reflect.Type]*definition
	byName   map[string]*definition
	resolve  topicResolver // nil = the convention
	allowRaw bool
}

// NewRegistry returns the registry of the service source, which becomes the
// CloudEvents source of its events: a URI reference of at most 100 characters,
// for example commerce-api. All bad definitions are reported in one error; each
// is a [*FieldError].
func NewRegistry(source string, events ...Definition) (*Registry, error) {
	r := &Registry{
		source:   source,
		byGoType: make(map[reflect.Type]*definition, len(events)),
		byName:   make(map[string]*definition, len(events)),
	}
	var bad []error
	if err := checkSource(source); err != nil {
		bad = append(bad, &FieldError{Index: -1, Field: "source", Err: err})
	}
	for i, e := range events {
		if err := r.setRule(i, e); err != nil {
			bad = append(bad, err)
		}
	}
	for i, e := range events {
		switch e.(type) {
		case topicResolver, rawAllowed:
			continue
		}
		if err := r.add(i, e); err != nil {
			bad = append(bad, err)
		}
	}
	if len(bad) > 0 {
		return nil, errors.Join(bad...)
	}
	return r, nil
}

// uriReference matches the characters that RFC 3986 allows. net/url accepts others and
// escapes them when it prints, so that some readers would see another source.
var uriReference = regexp.MustCompile(`^([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+$`)

// checkSource accepts URI references, as CloudEvents demands, in the form in which
// net/url prints them.
func checkSource(source string) error {
	if err := check.Text(source, envelope.MaxSource); err != nil {
		return err
	}
	if u, err := url.Parse(source); err != nil || u.String() != source || !uriReference.MatchString(source) {
		return fmt.Errorf("%q %w: want a URI reference, other characters as %%XX", source, ErrMalformed)
	}
	return nil
}

// setRule notes a definition that is a [ResolveTopics] or an [AllowRaw].
func (r *Registry) setRule(i int, e Definition) error {
	if _, is := e.(rawAllowed); is {
		r.allowRaw = true
	}
	resolve, is := e.(topicResolver)
	switch {
	case !is:
		return nil
	case resolve == nil:
		return &FieldError{EventType: "no definition", Index: i, Field: "topic", Err: fmt.Errorf("resolver %w", ErrNilArgument)}
	case r.resolve != nil:
		return &FieldError{EventType: "no definition", Index: i, Field: "topic", Err: fmt.Errorf("resolver %w", ErrDuplicate)}
	}
	r.resolve = resolve
	return nil
}

// add checks and stores one definition.
func (r *Registry) add(i int, e Definition) error {
	reject := func(name, field string, err error) error {
		return &FieldError{EventType: name, Index: i, Field: field, Err: err}
	}
	if check.IsNil(e) {
		return reject("no definition", "event", ErrNilArgument)
	}
	def := e.define()
	name := cmp.Or(def.eventType, def.goType.String())
	if def.topic == "" && def.eventType != "" && r.resolve != nil {
		topic, err := r.resolve(def.eventType)
		if err != nil {
			return reject(name, "topic", fmt.Errorf("cannot be resolved: %w", err))
		}
		def.topic = topic
	}
	if def.goType == reflect.TypeFor[RawEvent]() {
		return reject(name, "event", fmt.Errorf("of Go type %s %w: AllowRaw takes such events, of all types", def.goType, ErrMalformed))
	}
	if err := def.check(); err != nil {
		return reject(name, err.Field, err.Err)
	}
	if r.byName[def.eventType] != nil {
		return reject(name, "event_type", ErrDuplicate)
	}
	if other := r.byGoType[def.goType]; other != nil {
		return reject(name, "event", fmt.Errorf("%s %w as %s", def.goType, ErrDuplicate, other.eventType))
	}
	r.byName[def.eventType], r.byGoType[def.goType] = def, def
	return nil
}

// check returns the first error in a definition, or nil.
func (d *definition) check() *FieldError {
	if d.goType.Kind() == reflect.Pointer || d.goType.Kind() == reflect.Interface {
		return &FieldError{Field: "event", Err: fmt.Errorf("of Go type %s %w: want a struct whose methods have value receivers, or one that wraps it; Record takes pointers to it", d.goType, ErrMalformed)}
	}
	if err := checkEventType(d.eventType, d.topic == ""); err != nil {
		return &FieldError{Field: "event_type", Err: err}
	}
	if err := check.Attribute(d.aggregateType, envelope.MaxAggregateType); err != nil {
		return &FieldError{Field: "aggregate_type", Err: err}
	}
	if d.aggregateID == nil {
		return &FieldError{Field: "aggregate_id", Err: fmt.Errorf("function %w", ErrNilArgument)}
	}
	if err := check.Topic(d.topic); err != nil && d.topic != "" {
		return &FieldError{Field: "topic", Err: err}
	}
	if err := d.codec.check(); err != nil {
		return &FieldError{Field: "content_type", Err: err}
	}
	return d.checkAttributes()
}

// checkAttributes returns the first error in the attributes of a definition, or nil.
func (d *definition) checkAttributes() *FieldError {
	for i, a := range d.attributes {
		err := eventheader.CheckAttribute(a.name)
		switch {
		case err != nil:
		case a.value == nil:
			err = fmt.Errorf("%s: function %w", a.name, ErrNilArgument)
		case slices.ContainsFunc(d.attributes[:i], func(other typeAttribute) bool { return other.name == a.name }):
			err = fmt.Errorf("%s %w", a.name, ErrDuplicate)
		}
		if err != nil {
			return &FieldError{Field: "attributes", Err: err}
		}
	}
	return nil
}

// keyOf returns the partition key of an event, if it is another one than the aggregate's id.
func (d *definition) keyOf(e DomainEvent, own *EventOptions) (key string, has bool) {
	switch {
	case own.Key != "":
		return own.Key, true
	case d.key != nil:
		return d.key(e), true
	}
	return "", false
}

// attributesOf returns the attributes that an event has by its type, nil for none.
func (d *definition) attributesOf(e DomainEvent) map[string]string {
	if len(d.attributes) == 0 {
		return nil
	}
	all := make(map[string]string, len(d.attributes))
	for _, a := range d.attributes {
		all[a.name] = a.value(e)
	}
	return all
}

// Topic returns the Kafka topic of an event type: the topic of its registration, or the topic of
// [ResolveTopics], or else the second segment of its name followed by "-events":
// loopers.order.created.v1 is sent to order-events. It returns [ErrUnregistered] for a type that is
// not in the registry.
func (r *Registry) Topic(eventType string) (string, error) {
	def := r.byName[eventType]
	if def == nil {
		return "", &FieldError{EventType: eventType, Index: -1, Field: "event_type", Err: ErrUnregistered}
	}
	return def.destination(), nil
}

func (d *definition) destination() string { return cmp.Or(d.topic, check.TopicOf(d.eventType)) }

// Source returns the CloudEvents source of the events.
func (r *Registry) Source() string { return r.source }

// Types returns the registered event types, sorted.
func (r *Registry) Types() []string { return slices.Sorted(maps.Keys(r.byName)) }

// Registration describes an event type of a [Registry].
type Registration struct {
	// EventType is the CloudEvents type.
	EventType string
	// GoType is the type of the events, a value and not a pointer.
	GoType reflect.Type
	// AggregateType is the type of their aggregate.
	AggregateType string
	// Topic is where they are sent: see [Registry.Topic].
	Topic string
	// OwnKey says that [EventType.Key] sets their partition key, which is their aggregate id otherwise.
	OwnKey bool
	// Attributes are the names of their extension attributes: see [EventType.Attribute].
	Attributes []string
	// Codec encodes their payloads.
	Codec Codec
}

// Registrations describes all event types, sorted by name, for tools and tests.
func (r *Registry) Registrations() []Registration {
	all := make([]Registration, 0, len(r.byName))
	for _, eventType := range r.Types() {
		def := r.byName[eventType]
		reg := Registration{
			EventType: eventType, GoType: def.goType, AggregateType: def.aggregateType,
			Topic: def.destination(), OwnKey: def.key != nil, Codec: def.codec,
		}
		for _, a := range def.attributes {
			reg.Attributes = append(reg.Attributes, a.name)
		}
		all = append(all, reg)
	}
	return all
}

// lookup returns the definition of an event with its own options, and the event itself as a value, also if e
// is a pointer to it.
func (r *Registry) lookup(e DomainEvent, own *EventOptions) (*definition, DomainEvent, error) {
	if check.IsNil(e) {
		return nil, nil, &FieldError{EventType: fmt.Sprintf("%T", e), Field: "event", Err: ErrNilArgument}
	}
	if v := reflect.ValueOf(e); v.Kind() == reflect.Pointer {
		value, ok := v.Elem().Interface().(DomainEvent)
		if !ok { // OccurredAt has a pointer receiver, so the value type cannot be registered
			return nil, nil, unregistered(e)
		}
		e = value
	}
	if def := r.byGoType[reflect.TypeOf(e)]; def != nil {
		return def, e, nil
	}
	raw, is := e.(RawEvent)
	if !is {
		return nil, nil, unregistered(e)
	}
	def, err := r.rawDefinition(&raw, own)
	return def, e, err
}

func unregistered(e DomainEvent) error {
	return &FieldError{EventType: fmt.Sprintf("%T", e), Field: "event", Err: ErrUnregistered}
}

var (
	plainName        = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)
	conventionalName = regexp.MustCompile(`^[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+\.v[1-9][0-9]*$`)
)

// checkEventType checks the name of an event type. With deriveTopic, the name must have
// the form from which a topic can be derived; otherwise only its characters matter.
func checkEventType(name string, deriveTopic bool) error {
	if err := check.Text(name, envelope.MaxEventType); err != nil {
		return err
	}
	if deriveTopic && !conventionalName.MatchString(name) {
		return fmt.Errorf("%q %w: want {company}.{domain}.{action}.v{n}, or a Topic of its own", name, ErrMalformed)
	}
	if !plainName.MatchString(name) {
		return fmt.Errorf("%q %w: want segments of letters, digits, - and _, with dots between them if there are several", name, ErrMalformed)
	}
	return nil
}
