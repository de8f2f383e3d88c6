package consumer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/twmb/franz-go/pkg/kgo"
)

// DecodeCloudEvent reads a record in either mode of the CloudEvents Kafka protocol binding.
func DecodeCloudEvent(r *kgo.Record) (*envelope.Message, error) {
	return envelope.DecodeRecord(r.Value, kafka.Headers(r))
}

// PlainRecords reads records that are no CloudEvents. The package outbox documents the fields.
type PlainRecords struct {
	Type                             string
	Source                           string
	IDHeader                         string
	TypeHeader                       string
	TimeHeader                       string
	IDMember, TypeMember, TimeMember string
	DataMember                       string
	Connect                          bool
}

// DecodeDebezium reads a record of Debezium's outbox event router.
func DecodeDebezium(r *kgo.Record) (*envelope.Message, error) {
	r, err := withStoredHeaders(r)
	if err != nil {
		return nil, err
	}
	return PlainRecords{Connect: true}.Decode(r)
}

// storedHeaders is the header that holds the column headers of outbox.
const storedHeaders = "outbox-headers"

// withStoredHeaders returns a record with the headers of the column headers and the time of expiry, in the form a relay
// sends.
func withStoredHeaders(r *kgo.Record) (*kgo.Record, error) {
	at := headerIndex(r, storedHeaders)
	if at < 0 {
		return r, nil
	}
	all := *r
	all.Headers = slices.Delete(slices.Clone(r.Headers), at, at+1)
	withExpiry(&all)
	e := envelope.Event{Headers: r.Headers[at].Value}
	if len(e.Headers) == 0 { // NULL
		return &all, nil
	}
	own, err := e.OwnHeaders()
	if err != nil {
		return nil, envelope.Unreadable("", storedHeaders, fmt.Errorf("%w: no object of texts", check.ErrMalformed))
	}
	isEvent := isCloudEvent(r)
	for _, name := range slices.Sorted(maps.Keys(own)) {
		key := name
		if attribute := eventheader.Attribute(name); isEvent && attribute != "" {
			key = eventheader.Prefix + attribute
		}
		all.Headers = append(all.Headers, kgo.RecordHeader{Key: key, Value: []byte(own[name])})
	}
	return &all, nil
}

// withExpiry writes the time of expiry as a relay does. Debezium sends all digits of it. If an event does not expire,
// Debezium sends the header without a value.
func withExpiry(r *kgo.Record) {
	at := headerIndex(r, eventheader.Prefix+eventheader.ExpiryTime)
	if at < 0 {
		return
	}
	if len(r.Headers[at].Value) == 0 {
		r.Headers = slices.Delete(r.Headers, at, at+1)
	} else if expires, err := time.Parse(time.RFC3339, string(r.Headers[at].Value)); err == nil {
		r.Headers[at].Value = envelope.AppendTime(nil, expires)
	}
}

// headerIndex returns the index of the first header with a name in any case, or -1.
func headerIndex(r *kgo.Record, name string) int {
	return slices.IndexFunc(r.Headers, func(h kgo.RecordHeader) bool { return strings.EqualFold(h.Key, name) })
}

// Decode reads a record. Its error is a [*FieldError].
func (p PlainRecords) Decode(r *kgo.Record) (*envelope.Message, error) {
	if isCloudEvent(r) {
		return DecodeCloudEvent(r)
	}
	f := p.headers(r)
	contentType := f.take("content-type")
	data, err := p.payload(&f, r.Value, contentType)
	if err != nil {
		return nil, err
	}
	position := cmp.Or(f.take(deadletter.ReplayOf), deadletter.Origin(r.Topic, r.Partition, r.Offset))
	id := f.find(p.IDMember, p.IDHeader, "event-id", "id")
	eventType := cmp.Or(f.find(p.TypeMember, p.TypeHeader, "event-type", "eventtype", "type"), p.Type)
	at := f.find(p.TimeMember, p.TimeHeader, "event-time")
	if f.err != nil {
		return nil, f.err
	}
	attributes := f.headers // the rest of them; headers cannot set the attributes below
	attributes["specversion"], attributes["id"], attributes["type"] = string(envelope.SpecVersion), cmp.Or(id, position), eventType
	subject, _ := p.text(r.Key) // nothing, where the key is no text
	attributes["source"], attributes["subject"] = cmp.Or(p.Source, r.Topic), subject
	attributes["time"], attributes["datacontenttype"] = timeText(at, r.Timestamp), contentType
	m, err := envelope.NewMessage(attributes, data)
	if err != nil {
		return nil, err
	}
	m.ByPosition = id == ""
	return m, nil
}

func isCloudEvent(r *kgo.Record) bool {
	return slices.ContainsFunc(r.Headers, func(h kgo.RecordHeader) bool {
		name := strings.ToLower(h.Key)
		return strings.HasPrefix(name, "ce_") ||
			name == "content-type" && strings.HasPrefix(envelope.MediaType(string(h.Value)), "application/cloudevents")
	})
}

// externalRecord is a record's headers and, if needed, the members of its JSON value.
type externalRecord struct {
	headers map[string]string // by names in lower case
	binary  map[string]error  // headers that are not text, for example some trace contexts, with the reason
	members map[string]json.RawMessage
	err     error // the first error of take and find
}

// headers returns the headers of a record. Of several with the same name it returns the last.
func (p PlainRecords) headers(r *kgo.Record) externalRecord {
	f := externalRecord{headers: map[string]string{}, binary: map[string]error{}}
	for _, h := range r.Headers {
		name := strings.ToLower(h.Key)
		if deadletter.IsOwn(name) && name != deadletter.ReplayOf {
			continue
		}
		if value, err := p.text(h.Value); err != nil {
			f.binary[name] = err
		} else if value != "" && check.Text(name, math.MaxInt) == nil {
			f.headers[name] = value
		}
	}
	return f
}

// text returns a key or the value of a header.
func (p PlainRecords) text(b []byte) (string, error) {
	if p.Connect && json.Valid(b) {
		b = connectPayload(b)
		var text string
		if json.Unmarshal(b, &text) == nil {
			b = []byte(text)
		}
	}
	if err := check.Text(string(b), math.MaxInt); err != nil && len(b) > 0 {
		return "", err
	}
	return string(b), nil
}

// take removes headers and returns the value of the first that was present.
func (f *externalRecord) take(names ...string) (value string) {
	for _, name := range names {
		if err := f.binary[name]; err != nil && value == "" && f.err == nil {
			f.err = envelope.Unreadable("", name, err)
		}
		value = cmp.Or(value, f.headers[name])
		delete(f.headers, name)
	}
	return value
}

// find returns the value of header, or of one of the usual headers if header is "". Without such a
// header it returns the value of member.
func (f *externalRecord) find(member, header string, usual ...string) string {
	if header != "" {
		usual = []string{strings.ToLower(header)}
	}
	if said := f.take(usual...); said != "" || member == "" {
		return said
	}
	raw := f.members[member]
	if raw == nil || isNull(raw) {
		return ""
	}
	text, err := envelope.AttributeText(raw)
	if err != nil && f.err == nil {
		f.err = envelope.Unreadable("", member, err)
	}
	return text
}

func isNull(raw []byte) bool { return string(bytes.TrimSpace(raw)) == "null" }

// payload returns the payload of a record's value, and keeps the other members in f.
func (p PlainRecords) payload(f *externalRecord, value []byte, contentType string) ([]byte, error) {
	if value == nil {
		return nil, envelope.Unreadable("", "value", check.ErrEmpty)
	}
	if !envelope.IsJSONType(contentType) {
		return value, nil
	}
	if p.Connect {
		value = connectPayload(value)
	}
	value, err := unquoted(value)
	if err != nil {
		return nil, envelope.Unreadable("", "value", err)
	}
	if err := p.readMembers(f, value); err != nil {
		return nil, envelope.Unreadable("", "value", err)
	}
	if p.DataMember != "" {
		if value, err = unquoted(f.members[p.DataMember]); err != nil {
			return nil, envelope.Unreadable("", p.DataMember, err)
		}
	}
	if len(value) == 0 || isNull(value) {
		return nil, envelope.Unreadable("", "data", check.ErrEmpty)
	}
	return value, nil
}

// readMembers reads the members of a JSON object, if a field of p names one.
func (p PlainRecords) readMembers(f *externalRecord, value []byte) error {
	if cmp.Or(p.IDMember, p.TypeMember, p.TimeMember, p.DataMember) == "" {
		return nil
	}
	if !utf8.Valid(value) {
		return check.ErrUTF8
	}
	if err := json.Unmarshal(value, &f.members); err != nil {
		return fmt.Errorf("%w: %w", check.ErrMalformed, err)
	}
	return nil
}

// connectPayload returns the payload of a value that Kafka Connect's converter wrote with its schema.
func connectPayload(value []byte) []byte {
	var object map[string]json.RawMessage
	if json.Unmarshal(value, &object) != nil || len(object) != 2 || object["schema"] == nil || object["payload"] == nil {
		return value
	}
	return object["payload"]
}

// unquoted returns the object or array that a JSON text holds, or the value as it is.
func unquoted(value []byte) ([]byte, error) {
	trimmed := bytes.TrimSpace(value)
	if !bytes.HasPrefix(trimmed, []byte{'"'}) || !json.Valid(trimmed) {
		return value, nil
	}
	if !utf8.Valid(trimmed) {
		return nil, check.ErrUTF8
	}
	var text string
	if err := json.Unmarshal(trimmed, &text); err != nil {
		return nil, fmt.Errorf("%w: %w", check.ErrMalformed, err)
	}
	if inner := strings.TrimSpace(text); !strings.HasPrefix(inner, "{") && !strings.HasPrefix(inner, "[") {
		return value, nil
	}
	if err := jsonb.CheckString(trimmed); err != nil { // json.Unmarshal replaces invalid text silently
		return nil, err
	}
	return []byte(text), nil
}

// timeText returns a time in RFC 3339: the one that the record names in said, or else its timestamp.
// It returns "" if the record has neither. A malformed time is returned as it is: the check of
// CloudEvents rejects it.
func timeText(said string, timestamp time.Time) string {
	at := timestamp
	switch ms, err := strconv.ParseInt(said, 10, 64); {
	case said == "":
		if at.UnixMilli() <= 0 { // the producer has set none
			return ""
		}
	case err == nil:
		at = time.UnixMilli(ms)
	default:
		return said
	}
	return at.UTC().Format(time.RFC3339Nano)
}
