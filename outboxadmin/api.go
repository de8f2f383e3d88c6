package outboxadmin

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"mime"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// The API answers what the pages show. Its types are in api_types.go; tests compare
// openapi.json with them.

func (a *admin) apiFile(w http.ResponseWriter, _ *http.Request) error {
	return serveAsset(w, "openapi.json")
}

func (a *admin) apiRelays(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	if err := q.done(); err != nil {
		return err
	}
	relays, err := a.relays(r.Context(), time.Now())
	if err != nil {
		return err
	}
	health := a.health()
	writeJSON(w, http.StatusOK, apiRelayList{Relays: each(relays, func(s outbox.RelayStatus) apiRelay { return relayOf(s, health[s.Name]) })})
	return nil
}

func (a *admin) apiProgress(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	s := q.span()
	if err := q.done(); err != nil {
		return err
	}
	progress, err := a.inspect.Progress(r.Context(), r.PathValue("relay"), time.Now().Add(-s.length), s.step)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, apiProgressList{StepSeconds: s.step.Seconds(), Progress: each(progress, progressOf)})
	return nil
}

func (a *admin) apiBacklog(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	s := q.span()
	if err := q.done(); err != nil {
		return err
	}
	kept := a.samples.since(r.PathValue("relay"), time.Now().Add(-s.length))
	writeJSON(w, http.StatusOK, apiSampleList{Samples: each(kept, func(s sample) apiSample { return apiSample{s.at.UTC(), s.pending, s.failed} })})
	return nil
}

func (a *admin) apiTransactions(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	least := openFor
	if seconds := q.number("open_seconds"); seconds > 0 {
		least = time.Duration(min(seconds, 1<<30)) * time.Second
	}
	if err := q.done(); err != nil {
		return err
	}
	all, err := a.inspect.Transactions(r.Context(), least)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, apiTransactionList{Transactions: each(all, transactionOf)})
	return nil
}

func (a *admin) apiPartitions(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	if err := q.done(); err != nil {
		return err
	}
	all, err := a.inspect.Partitions(r.Context())
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, apiPartitionList{Partitions: each(all, func(p outboxops.TablePartition) apiPartition {
		return apiPartition{p.Name, boundOf(p.First), boundOf(p.Behind), p.Bytes, p.Current}
	})})
	return nil
}

func (a *admin) apiFailedList(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	filter, after, limit := q.failedFilter(), q.failure("after"), q.limit(100)
	if err := q.done(); err != nil {
		return err
	}
	rows, err := a.failed.List(r.Context(), filter, outboxops.FailurePage{After: after, Limit: limit})
	if err != nil {
		return err
	}
	list := apiFailedList{Failed: each(rows, failedOf)}
	if len(rows) == limit {
		next := rows[limit-1].ID.String()
		list.Next = &next
	}
	writeJSON(w, http.StatusOK, list)
	return nil
}

func (a *admin) apiCounts(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	filter := q.failedFilter()
	if err := q.done(); err != nil {
		return err
	}
	counts, err := a.failed.Count(r.Context(), filter)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, apiCountList{Counts: each(counts, func(c outboxops.FailureCount) apiCount {
		return apiCount{string(c.Kind), c.Relay, c.Status, c.Type, c.Class, c.Events, c.Oldest.UTC()}
	})})
	return nil
}

func (a *admin) apiFailedOne(w http.ResponseWriter, r *http.Request) error {
	id, err := pathFailure(r)
	if err != nil {
		return err
	}
	return a.writeFailed(w, r, id)
}

// writeFailed answers with a failed event as it is now.
func (a *admin) writeFailed(w http.ResponseWriter, r *http.Request, id outboxops.FailureID) error {
	row, history, err := a.failedWhole(r.Context(), id)
	if err != nil {
		return err
	}
	whole := apiFailedWhole{apiFailed: failedOf(row), Headers: headersOf(row.Headers),
		apiPayload: a.payloadOf(row.Type, row.ContentType, row.Payload, row.PayloadErr).api(),
		History:    each(history, func(e outboxops.AuditEntry) apiAudit { return a.auditOf(e, row.Type, row.ContentType) })}
	writeJSON(w, http.StatusOK, whole)
	return nil
}

// readJSON reads the body of a request. A member that the API does not have is an error: a filter
// that was mistyped must not pick everything.
func readJSON(r *http.Request, v any) error {
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != jsonType {
		return &problem{http.StatusUnsupportedMediaType, "Not JSON", "The body is to be application/json."}
	}
	d := json.NewDecoder(r.Body)
	d.DisallowUnknownFields()
	err := d.Decode(v)
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return err
	case err != nil:
		return wrong("body", strings.TrimPrefix(err.Error(), "json: "))
	case d.More():
		return wrong("body", "there is more behind the object")
	}
	return nil
}

// apiAct is retry or resolve for one event.
func apiAct(action string) func(*admin, http.ResponseWriter, *http.Request) error {
	return func(a *admin, w http.ResponseWriter, r *http.Request) error {
		var body apiReason
		if err := readJSON(r, &body); err != nil {
			return err
		}
		return a.actOn(w, r, action, body.Reason, nil)
	}
}

func (a *admin) apiEdit(w http.ResponseWriter, r *http.Request) error {
	var body apiEdit
	if err := readJSON(r, &body); err != nil {
		return err
	}
	data := []byte(body.Payload)
	switch {
	case (body.Payload != nil) == (body.PayloadBase64 != nil):
		return wrong("payload", "one of payload and payload_base64 is to be there")
	case body.PayloadBase64 != nil:
		var err error
		if data, err = base64.StdEncoding.DecodeString(*body.PayloadBase64); err != nil {
			return wrong("payload_base64", err.Error())
		}
	}
	return a.actOn(w, r, "edit", body.Reason, data)
}

// actOn does something about the event in the path, and answers with what it is then.
func (a *admin) actOn(w http.ResponseWriter, r *http.Request, action, reason string, data []byte) error {
	id, err := pathFailure(r)
	if err != nil {
		return err
	}
	why := auditInfo(r, reason)
	switch action {
	case "retry":
		err = a.failed.Retry(r.Context(), id, why)
	case "resolve":
		err = a.failed.Resolve(r.Context(), id, why)
	default:
		err = a.failed.Edit(r.Context(), id, data, why)
	}
	if err == nil {
		w.WriteHeader(http.StatusNoContent) // the event may be on its way, and gone from here
	}
	return err
}

// apiBulk is retry or resolve for all that a filter picks.
func apiBulk(action string) func(*admin, http.ResponseWriter, *http.Request) error {
	return func(a *admin, w http.ResponseWriter, r *http.Request) error {
		var body apiBulkRequest
		if err := readJSON(r, &body); err != nil {
			return err
		}
		if body.Filter == nil {
			return wrong("filter", "is missing; {} picks all that is not resolved")
		}
		values := url.Values{}
		for name, value := range body.Filter {
			values.Set(name, value)
		}
		q := query{values: values}
		filter := q.failedFilter()
		if err := q.done(); err != nil {
			return err
		}
		if body.DryRun && body.Reason == "" {
			body.Reason = "dry run"
		}
		n, err := a.bulk(r.Context(), action, filter, body.DryRun, auditInfo(r, body.Reason))
		if err != nil {
			return err
		}
		writeJSON(w, http.StatusOK, apiBulkResult{n, body.DryRun})
		return nil
	}
}

// apiKey is hold or release.
func apiKey(action string) func(*admin, http.ResponseWriter, *http.Request) error {
	return func(a *admin, w http.ResponseWriter, r *http.Request) error {
		var body apiKeyRequest
		if err := readJSON(r, &body); err != nil {
			return err
		}
		do := map[string]func(context.Context, string, string, string, outboxops.AuditInfo) error{"hold": a.failed.Hold, "release": a.failed.Release}[action]
		err := do(r.Context(), body.Relay, body.Topic, body.Key, auditInfo(r, body.Reason))
		if err == nil {
			w.WriteHeader(http.StatusNoContent)
		}
		return err
	}
}

func (a *admin) apiEvents(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	filter, before, limit := q.eventFilter(), q.number("before"), q.limit(100)
	if err := q.done(); err != nil {
		return err
	}
	rows, last, err := a.events(r.Context(), filter, before, limit)
	if err != nil {
		return err
	}
	list := apiEventList{Events: each(rows, eventOf)}
	if last != 0 {
		list.Next = &last
	}
	writeJSON(w, http.StatusOK, list)
	return nil
}

func (a *admin) apiEvent(w http.ResponseWriter, r *http.Request) error {
	id, err := pathID(r)
	if err != nil {
		return err
	}
	e, err := a.inspect.Event(r.Context(), id)
	if err != nil {
		return err
	}
	writeJSON(w, http.StatusOK, apiEventWhole{apiEvent: eventOf(eventRow{RecordedEvent: e, States: statesOf(e)}),
		Headers: headersOf(e.Headers), apiPayload: a.payloadOf(e.Type, e.ContentType, e.Payload, e.PayloadErr).api()})
	return nil
}

func (a *admin) apiAudit(w http.ResponseWriter, r *http.Request) error {
	q := query{values: r.URL.Query()}
	before, limit := q.number("before"), q.limit(100)
	if err := q.done(); err != nil {
		return err
	}
	entries, err := a.failed.Audit(r.Context(), outboxops.FailureID{}, outboxops.AuditPage{Before: before, Limit: limit})
	if err != nil {
		return err
	}
	list := apiAuditList{Audit: each(entries, func(e outboxops.AuditEntry) apiAudit { return a.auditOf(e, "", "") })}
	if len(entries) == limit {
		list.Next = &entries[limit-1].ID
	}
	writeJSON(w, http.StatusOK, list)
	return nil
}
