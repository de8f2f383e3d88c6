package outboxschema

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/sr"

	"github.com/outboxgo/outbox"
)

const (
	// requestTimeout bounds the requests for one schema, and the wait for those of other callers before.
	requestTimeout = 10 * time.Second
	// slow is the time after which a registry counts as away whose request a deadline of the caller has ended.
	slow = time.Second
	// pause is how long a registry that is away is not asked again. Meanwhile what needs it fails at once.
	pause = time.Second
	// maxIndex bounds the index of a Protobuf message: how deep messages are nested.
	maxIndex = 100
)

var header = new(sr.ConfluentHeader)

// contentTypes are those of payloads in the wire format. They are no JSON, so they are stored as bytes.
var contentTypes = map[sr.SchemaType]string{
	sr.TypeProtobuf: "application/vnd.schemaregistry.protobuf",
	sr.TypeAvro:     "application/vnd.schemaregistry.avro",
	sr.TypeJSON:     "application/vnd.schemaregistry.json",
}

// SubjectName returns the subject under which the schema of a record is registered: topic is where its events are sent,
// record the full name of the record.
type SubjectName func(topic, record string) string

// TopicName is the usual [SubjectName]: order-events-value. It permits one type of events per topic.
func TopicName(topic, _ string) string { return topic + "-value" }

// RecordName is the [SubjectName] by the record alone: loopers.shop.v1.OrderCreated.
func RecordName(_, record string) string { return record }

// TopicRecordName is the [SubjectName] by both: order-events-loopers.shop.v1.OrderCreated.
func TopicRecordName(topic, record string) string { return topic + "-" + record }

// Registry is a client of a schema registry, with a cache of what it has seen there. It starts no goroutine, and may be
// used by several.
type Registry struct {
	client  *sr.Client
	address string // of the registry, for dataschema
	subject SubjectName

	readers sync.Map // readerKey: decoder

	mu         sync.Mutex
	formats    map[reflect.Type]map[sr.SchemaType]Format // of the events that can be decoded
	writers    []*writer
	outage     error // the last error of a registry that is away
	pauseUntil time.Time

	asking chan struct{} // full while a schema is asked for
}

// New returns a client of the registry that client asks. A nil subject is [TopicName]. It does no I/O.
func New(client *sr.Client, subject SubjectName) *Registry {
	if subject == nil {
		subject = TopicName
	}
	r := &Registry{client: client, subject: subject, formats: map[reflect.Type]map[sr.SchemaType]Format{}, asking: make(chan struct{}, 1)}
	if urls, is := client.OptValue(sr.URLs).([]string); is && len(urls) > 0 {
		if address, err := url.Parse(urls[0]); err == nil {
			address.User = nil // it belongs into no event
			r.address = address.String()
		}
	}
	return r
}

// Codec returns the codec for a format whose schema is in the registry under the subject of a topic: that of the
// events, as [outbox.Registry.Topic] says.
//
// Encode asks for the id of the schema once, if neither [Registry.Register] nor [Registry.Lookup] has; the transaction
// of Record waits for that up to 10 s. It fails if the schema is not registered.
func (r *Registry) Codec(topic string, f Format) outbox.Codec {
	w := &writer{registry: r, format: f, subject: r.subject(topic, f.record)}
	r.mu.Lock()
	r.writers = append(r.writers, w)
	r.mu.Unlock()
	codec := r.Reader(f)
	codec.Encode, codec.DataSchema = w.encode, w.dataSchema
	return codec
}

// Reader returns a codec that only decodes, for events of other services, and for Codecs of [outbox.HandlerConfig]. It
// decodes events of all Go types of whose formats of this kind Reader or Codec was called.
func (r *Registry) Reader(f Format) outbox.Codec {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.formats[f.goType] == nil {
		r.formats[f.goType] = map[sr.SchemaType]Format{}
	}
	r.formats[f.goType][f.kind] = f
	return outbox.Codec{
		ContentType: contentTypes[f.kind],
		Encode: func(_ context.Context, event any) ([]byte, error) {
			return nil, fmt.Errorf("event is %T, and this codec only reads", event)
		},
		Decode: func(ctx context.Context, data []byte, event any) error { return r.decode(ctx, f.kind, data, event) },
	}
}

// Register registers the schemas of all codecs that [Registry.Codec] has returned, and those that they refer to. The
// error of one that the registry refuses has the registry's reason. Call it when a service starts, or before it is
// deployed if the service has no right to do so.
func (r *Registry) Register(ctx context.Context) error {
	return r.each(func(w *writer) error { return w.find(ctx, r.register) })
}

// Lookup finds the ids of the schemas of all codecs that [Registry.Codec] has returned. The error names each one that
// is not registered. Some registries compare texts: for them, only what Register would write is registered.
func (r *Registry) Lookup(ctx context.Context) error {
	return r.each(func(w *writer) error { return w.find(ctx, r.lookup) })
}

func (r *Registry) each(f func(*writer) error) error {
	r.mu.Lock()
	writers := r.writers
	r.mu.Unlock()
	var errs []error
	for _, w := range writers {
		if err := f(w); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// writer is a format whose events are recorded.
type writer struct {
	registry *Registry
	format   Format
	subject  string
	id       atomic.Pointer[int] // of the schema; nil while it is unknown
}

func (w *writer) encode(ctx context.Context, event any) ([]byte, error) {
	payload, err := w.format.encode(ctx, event)
	if err != nil {
		return nil, err
	}
	id, err := w.schemaID(ctx)
	if err != nil {
		return nil, err
	}
	b, err := header.AppendEncode(make([]byte, 0, len(payload)+16), id, w.format.index)
	return append(b, payload...), err
}

// dataSchema returns the address of the schema. It does not ask: encode has found the id.
func (w *writer) dataSchema(context.Context) string {
	id := w.id.Load()
	if id == nil {
		return ""
	}
	return w.registry.address + "/schemas/ids/" + strconv.Itoa(*id)
}

func (w *writer) schemaID(ctx context.Context) (int, error) {
	if id := w.id.Load(); id != nil {
		return *id, nil
	}
	if err := w.find(ctx, w.registry.lookup); err != nil {
		return 0, err
	}
	return *w.id.Load(), nil
}

// place registers a schema, or looks it up.
type place func(ctx context.Context, subject string, schema sr.Schema) (sr.SubjectSchema, error)

func (w *writer) find(ctx context.Context, by place) error {
	err := w.registry.ask(ctx, func(ctx context.Context) error {
		if w.id.Load() != nil { // found while this goroutine waited
			return nil
		}
		references, err := found(ctx, w.format.kind, w.format.references, by)
		if err != nil {
			return err
		}
		schema, err := by(ctx, w.subject, sr.Schema{Schema: w.format.schema, Type: w.format.kind, References: references})
		if err == nil {
			w.id.Store(&schema.ID)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("schema of %v: subject %s: %w", w.format.goType, w.subject, err)
	}
	return nil
}

// found returns references with the versions that they have in the registry.
func found(ctx context.Context, kind sr.SchemaType, references []Reference, by place) (all []sr.SchemaReference, err error) {
	for _, one := range references {
		inner, err := found(ctx, kind, one.References, by)
		if err != nil {
			return nil, err
		}
		schema, err := by(ctx, one.Subject, sr.Schema{Schema: one.Schema, Type: kind, References: inner})
		if err != nil {
			return nil, fmt.Errorf("reference %s: subject %s: %w", one.Name, one.Subject, err)
		}
		all = append(all, sr.SchemaReference{Name: one.Name, Subject: one.Subject, Version: schema.Version})
	}
	return all, nil
}

func (r *Registry) register(ctx context.Context, subject string, schema sr.Schema) (sr.SubjectSchema, error) {
	return r.client.CreateSchema(ctx, subject, schema)
}

func (r *Registry) lookup(ctx context.Context, subject string, schema sr.Schema) (sr.SubjectSchema, error) {
	return r.client.LookupSchema(ctx, subject, schema)
}

// readerKey names a decoder: the schema and the message that it reads, and what it makes of them.
type readerKey struct {
	id     int
	index  string // of the message; one index has many encodings
	goType reflect.Type
}

// decode reads a payload in the wire format with the schema that it was written with.
func (r *Registry) decode(ctx context.Context, kind sr.SchemaType, data []byte, event any) error {
	r.mu.Lock()
	f, known := r.formats[reflect.TypeOf(event).Elem()][kind]
	r.mu.Unlock()
	if !known {
		return fmt.Errorf("no %v format for %T", kind, event)
	}
	id, payload, err := header.DecodeID(data)
	if err != nil {
		return err
	}
	key := readerKey{id: id, goType: f.goType}
	var index []int
	if kind == sr.TypeProtobuf {
		if index, payload, err = header.DecodeIndex(payload, maxIndex); err != nil {
			return fmt.Errorf("index of the message: %w", err)
		}
		key.index = fmt.Sprint(index)
	}
	read, cached := r.readers.Load(key)
	if !cached {
		if read, err = r.newReader(ctx, f, key, index); err != nil {
			return err
		}
	}
	return read.(decoder)(ctx, payload, event)
}

// newReader returns the decoder for a schema of the registry. Its error is an outage if the registry is away.
func (r *Registry) newReader(ctx context.Context, f Format, key readerKey, index []int) (read decoder, err error) {
	err = r.ask(ctx, func(ctx context.Context) error {
		if cached, is := r.readers.Load(key); is { // found while this goroutine waited
			read = cached.(decoder)
			return nil
		}
		w, err := r.fetch(ctx, key.id)
		if err != nil {
			return err
		}
		if read, err = f.reader(w, index); err != nil {
			return &schemaError{err}
		}
		r.readers.Store(key, read)
		return nil
	})
	if err == nil {
		return read, nil
	}
	err = fmt.Errorf("schema %d: %w", key.id, err)
	if isOutage(err) {
		return nil, outbox.Unavailable(err)
	}
	return nil, err
}

// schemaError is the error of a schema that was found, and cannot be used.
type schemaError struct{ error }

func (e *schemaError) Unwrap() error { return e.error }

// fetch returns a schema of the registry with those that it uses.
func (r *Registry) fetch(ctx context.Context, id int) (w written, err error) {
	schema, err := r.client.SchemaByID(ctx, id)
	if err != nil {
		return w, err
	}
	w.schema = schema.Schema
	w.references, err = r.fetchAll(ctx, schema.References, map[sr.SchemaReference]bool{})
	return w, err
}

func (r *Registry) fetchAll(ctx context.Context, references []sr.SchemaReference, seen map[sr.SchemaReference]bool) (all []named, err error) {
	for _, one := range references {
		if seen[one] {
			continue
		}
		seen[one] = true
		schema, err := r.client.SchemaByVersion(ctx, one.Subject, one.Version)
		if err != nil {
			return nil, err
		}
		inner, err := r.fetchAll(ctx, schema.References, seen)
		if err != nil {
			return nil, err
		}
		all = append(append(all, inner...), named{one.Name, schema.Schema.Schema})
	}
	return all, nil
}

// ask calls f, which asks the registry, unless it was away just now. One call is made at a time: the next one mostly
// finds what it needs in the cache, or that the registry is away.
func (r *Registry) ask(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	select {
	case r.asking <- struct{}{}:
		defer func() { <-r.asking }()
	case <-ctx.Done():
		return ctx.Err()
	}
	r.mu.Lock()
	outage := r.outage
	if !time.Now().Before(r.pauseUntil) {
		outage = nil
	}
	r.mu.Unlock()
	if outage != nil {
		return outage
	}
	began := time.Now()
	err := f(ctx)
	hangs := errors.Is(ctx.Err(), context.DeadlineExceeded) && time.Since(began) > slow
	if err != nil && isOutage(err) && (ctx.Err() == nil || hangs) {
		r.mu.Lock()
		r.outage, r.pauseUntil = err, time.Now().Add(pause)
		r.mu.Unlock()
	}
	return err
}

// isOutage reports whether an error says nothing about a schema: the registry cannot be reached, is overloaded or
// broken, or refuses a login.
func isOutage(err error) bool {
	var unusable *schemaError
	var answer *sr.ResponseError
	switch {
	case errors.As(err, &unusable):
		return false
	case !errors.As(err, &answer):
		return true
	}
	switch answer.ErrorCode {
	case sr.ErrSubjectNotFound.Code, sr.ErrVersionNotFound.Code, sr.ErrSchemaNotFound.Code:
		return false // 404 without a code comes from something that is no registry
	}
	return answer.StatusCode != http.StatusConflict && answer.StatusCode != http.StatusUnprocessableEntity
}
