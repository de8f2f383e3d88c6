package outboxadmin

import (
	"bytes"
	"errors"

	"github.com/outboxgo/outbox/outboxops"
)

// TextKind is the kind of a [Text].
type TextKind string

// The kinds of texts that [Config.Mask] gets.
const (
	// TextPayload is the payload of an event, or its payload before an edit.
	TextPayload TextKind = "payload"
	// TextHeader is the value of a Kafka header.
	TextHeader TextKind = "header"
	// TextKey is a record key, or the id of an aggregate, which often are the same.
	TextKey TextKind = "key"
	// TextError is an error of Kafka or PostgreSQL about an event.
	TextError TextKind = "error"
	// TextStatement is a statement of an open transaction, of any user of the cluster.
	TextStatement TextKind = "statement"
)

// Text is a text that may hold personal data or secrets, because another program wrote it.
type Text struct {
	// Kind is a constant, [TextPayload] for example.
	Kind TextKind
	// EventType is the CloudEvents type of the event that it is part of. It is empty for a
	// statement, and for a key in the audit.
	EventType string
	// Name of a header; empty for all else.
	Name string
	// Value is the text. It must not be changed.
	Value []byte
}

// masked returns the version of a text that may be shown. All texts of these kinds must pass through it.
func (a *admin) masked(kind TextKind, eventType, name, value string) string {
	if a.cfg.Mask == nil || value == "" {
		return value
	}
	return string(a.cfg.Mask(Text{Kind: kind, EventType: eventType, Name: name, Value: []byte(value)}))
}

// maskedError is [admin.masked] for an error.
func (a *admin) maskedError(eventType string, err error) error {
	if err == nil || a.cfg.Mask == nil {
		return err
	}
	return errors.New(a.masked(TextError, eventType, "", err.Error()))
}

func (a *admin) maskedHeaders(eventType string, headers map[string]string) map[string]string {
	shown := make(map[string]string, len(headers))
	for name, value := range headers {
		shown[name] = a.masked(TextHeader, eventType, name, value)
	}
	return shown
}

// payloadOf masks a payload, or shows why it could not be read. Every payload that is shown
// comes from here.
func (a *admin) payloadOf(eventType, contentType string, data []byte, err error) payload {
	p := payload{Type: contentType, Size: len(data), Data: data, Err: errorText(a.maskedError(eventType, err))}
	if a.cfg.Mask != nil && err == nil {
		p.Data = a.cfg.Mask(Text{Kind: TextPayload, EventType: eventType, Value: data})
		p.Masked = !bytes.Equal(p.Data, data)
	}
	return p
}

// failedRow is a failed event as it is shown.
type failedRow struct {
	outboxops.Failure
	KeyMasked bool // the key or the id of the aggregate, so no link leads to their events
}

func (a *admin) failedRowOf(f outboxops.Failure) failedRow {
	row := failedRow{Failure: f}
	row.Key, row.AggregateID = a.masked(TextKey, f.Type, "", f.Key), a.masked(TextKey, f.Type, "", f.AggregateID)
	row.KeyMasked = row.Key != f.Key || row.AggregateID != f.AggregateID
	row.Err, row.Headers = a.maskedError(f.Type, f.Err), a.maskedHeaders(f.Type, f.Headers)
	return row
}

// maskEvents masks recorded events in place.
func (a *admin) maskEvents(rows []eventRow) []eventRow {
	for i := range rows {
		r := &rows[i]
		key, id := r.Key, r.AggregateID
		r.Key, r.AggregateID = a.masked(TextKey, r.Type, "", key), a.masked(TextKey, r.Type, "", id)
		r.KeyMasked = r.Key != key || r.AggregateID != id
		r.Headers = a.maskedHeaders(r.Type, r.Headers)
	}
	return rows
}

// auditRow is an entry of the audit as it is shown.
type auditRow struct {
	outboxops.AuditEntry
	KeyMasked bool
}

func (a *admin) auditRowOf(e outboxops.AuditEntry) auditRow {
	row := auditRow{AuditEntry: e}
	if e.Action != "expire" { // its Key is the name of a partition
		row.Key = a.masked(TextKey, "", "", e.Key)
		row.KeyMasked = row.Key != e.Key
	}
	return row
}

// maskTransactions masks the statements of transactions in place.
func (a *admin) maskTransactions(all []outboxops.OpenTransaction) []outboxops.OpenTransaction {
	for i := range all {
		all[i].Query = a.masked(TextStatement, "", "", all[i].Query)
	}
	return all
}
