package outboxadmin

import (
	"encoding/base64"
	"net/url"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// The API returns the data of the pages. Its types are in api_types.go; tests compare openapi.json with
// them.

func (a *admin) apiFile(*request) (answer, error) {
	return assetAnswer("openapi.json")
}

func (a *admin) apiRelays(r *request) (answer, error) {
	q := &r.query
	if err := q.done(); err != nil {
		return answer{}, err
	}
	relays, err := a.relays(r.Context(), a.now())
	if err != nil {
		return answer{}, err
	}
	health := a.health()
	return okJSON(apiRelayList{Relays: each(relays, func(s outbox.RelayStatus) apiRelay { return relayOf(s, health[s.Name]) })})
}

func (a *admin) apiProgress(r *request) (answer, error) {
	return a.progress(r, r.PathValue("relay"))
}

func (a *admin) apiGroupProgress(r *request) (answer, error) {
	return a.progress(r, tables.WorkerPrefix+r.PathValue("group"))
}

// progress returns the moves of a position, of a relay or of a group of workers.
func (a *admin) progress(r *request, name string) (answer, error) {
	q := &r.query
	s := q.span()
	if err := q.done(); err != nil {
		return answer{}, err
	}
	progress, err := a.inspect.Progress(r.Context(), name, a.now().Add(-s.length), s.step)
	if err != nil {
		return answer{}, err
	}
	return okJSON(apiProgressList{StepSeconds: s.step.Seconds(), Progress: each(progress, progressOf)})
}

func (a *admin) apiBacklog(r *request) (answer, error) {
	q := &r.query
	s := q.span()
	if err := q.done(); err != nil {
		return answer{}, err
	}
	kept := a.samples.since(r.PathValue("relay"), a.now().Add(-s.length))
	return okJSON(apiSampleList{Samples: each(kept, func(s sample) apiSample { return apiSample{s.at.UTC(), s.pending, s.failed} })})
}

func (a *admin) apiGroupBacklog(r *request) (answer, error) {
	q := &r.query
	s := q.span()
	if err := q.done(); err != nil {
		return answer{}, err
	}
	kept := a.groupSamples.since(r.PathValue("group"), a.now().Add(-s.length))
	return okJSON(apiGroupSampleList{Samples: each(kept, func(s sample) apiGroupSample { return apiGroupSample{s.at.UTC(), s.pending, s.failed, s.lag} })})
}

func (a *admin) apiTransactions(r *request) (answer, error) {
	q := &r.query
	least := openFor
	if seconds := q.number("open_seconds"); seconds > 0 {
		least = time.Duration(min(seconds, 1<<30)) * time.Second
	}
	if err := q.done(); err != nil {
		return answer{}, err
	}
	all, err := a.inspect.Transactions(r.Context(), least)
	if err != nil {
		return answer{}, err
	}
	return okJSON(apiTransactionList{Transactions: each(a.maskTransactions(all), transactionOf)})
}

func (a *admin) apiPartitions(r *request) (answer, error) {
	q := &r.query
	if err := q.done(); err != nil {
		return answer{}, err
	}
	all, err := a.inspect.Partitions(r.Context())
	if err != nil {
		return answer{}, err
	}
	return okJSON(apiPartitionList{Partitions: each(all, func(p outboxops.TablePartition) apiPartition {
		return apiPartition{p.Name, boundOf(p.First), boundOf(p.Behind), p.Bytes, p.Current}
	})})
}

func (a *admin) apiFailedList(r *request) (answer, error) {
	q := &r.query
	filter, after, limit := q.failedFilter(), q.failures("after"), q.limit(100)
	if err := q.done(); err != nil {
		return answer{}, err
	}
	page := outboxops.FailurePage{After: after, Limit: limit}
	rows, err := a.failed.List(r.Context(), filter, page)
	if err != nil {
		return answer{}, err
	}
	list := apiFailedList{Failed: each(rows, func(f outboxops.Failure) apiFailed { return failedOf(a.failedRowOf(f)) })}
	if len(rows) == limit {
		next := failuresText(page.Next(rows).After)
		list.Next = &next
	}
	return okJSON(list)
}

func (a *admin) apiCounts(r *request) (answer, error) {
	q := &r.query
	filter := q.failedFilter()
	if slices.Contains(filter.Statuses, outboxops.StatusDone) {
		q.fail("status", "what is done is not counted")
	}
	if err := q.done(); err != nil {
		return answer{}, err
	}
	counts, err := a.failed.Count(r.Context(), filter)
	if err != nil {
		return answer{}, err
	}
	return okJSON(apiCountList{Counts: each(counts, countOf)})
}

func (a *admin) apiFailedOne(r *request) (answer, error) {
	id, err := pathFailure(r)
	if err != nil {
		return answer{}, err
	}
	row, history, err := a.failedWhole(r, id)
	if err != nil {
		return answer{}, err
	}
	shown := a.failedRowOf(row)
	whole := apiFailedWhole{apiFailed: failedOf(shown), Headers: shown.Headers,
		apiPayload: a.payloadOf(row.Type, row.ContentType, row.Payload, row.PayloadErr).api(),
		History:    each(history, func(e outboxops.AuditEntry) apiAudit { return a.auditOf(e, row.Type, row.ContentType) }), Seen: row.Seen}
	return okJSON(whole)
}

// apiAct is retry, resolve, hold or release for one failure.
func apiAct(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		var body apiReason
		if err := r.decode(&body); err != nil {
			return answer{}, err
		}
		return a.actOn(r, action, body, nil)
	}
}

func (a *admin) apiEdit(r *request) (answer, error) {
	var body apiEdit
	if err := r.decode(&body); err != nil {
		return answer{}, err
	}
	data := []byte(body.Payload)
	switch {
	case (body.Payload != nil) == (body.PayloadBase64 != nil):
		return answer{}, wrong("payload", "one of payload and payload_base64 is to be there")
	case body.PayloadBase64 != nil:
		var err error
		if data, err = base64.StdEncoding.DecodeString(string(*body.PayloadBase64)); err != nil {
			return answer{}, wrong("payload_base64", err.Error())
		}
	}
	return a.actOn(r, "edit", body.apiReason, data)
}

// actOn does something about the failure in the path. An event may be on its way then, and gone
// from here.
func (a *admin) actOn(r *request, action string, reason apiReason, data []byte) (answer, error) {
	id, err := pathFailure(r)
	if err != nil {
		return answer{}, err
	}
	why := auditInfo(r, string(reason.Reason))
	why.Seen = string(reason.Seen)
	switch action {
	case "retry":
		err = a.failed.Retry(r.Context(), id, why)
	case "resolve":
		err = a.failed.Resolve(r.Context(), id, why)
	case "hold":
		err = a.failed.Hold(r.Context(), id, why)
	case "release":
		err = a.failed.Release(r.Context(), id, why)
	default:
		err = a.failed.Edit(r.Context(), id, data, why)
	}
	return done, err
}

// apiBulk is retry or resolve for all that a filter picks.
func apiBulk(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		var body apiBulkRequest
		if err := r.decode(&body); err != nil {
			return answer{}, err
		}
		if body.Filter == nil {
			return answer{}, wrong("filter", "is missing; {} picks all that is not resolved")
		}
		if err := checkValues(url.Values(body.Filter), route{names: filterNames}); err != nil {
			return answer{}, err
		}
		q := query{values: url.Values(body.Filter)}
		filter := q.actFilter(action)
		if err := q.done(); err != nil {
			return answer{}, err
		}
		if body.DryRun && body.Reason == "" {
			body.Reason = "dry run"
		}
		n, err := a.bulk(r, action, filter, bool(body.DryRun), nil, string(body.Reason))
		if err != nil {
			return answer{}, err
		}
		topics, _ := topicsOf(n.topics, filter)
		groups, _ := groupsOf(n.handlers, filter)
		return okJSON(apiBulkResult{n.all, bool(body.DryRun), each(topics, func(t topicCount) apiTopic { return apiTopic{t.Topic, t.Events} }),
			each(groups, func(g groupCount) apiHandler { return apiHandler{g.Group, g.Action, g.Deliveries} })})
	}
}

func (a *admin) apiEvents(r *request) (answer, error) {
	q := &r.query
	filter, before, limit := q.eventFilter(), q.number("before"), q.limit(100)
	if err := q.done(); err != nil {
		return answer{}, err
	}
	rows, last, err := a.events(r.Context(), filter, before, limit)
	if err != nil {
		return answer{}, err
	}
	list := apiEventList{Events: each(rows, eventOf)}
	if last != 0 {
		list.Next = &last
	}
	return okJSON(list)
}

func (a *admin) apiEvent(r *request) (answer, error) {
	id, err := pathID(r)
	if err != nil {
		return answer{}, err
	}
	e, err := a.recordedWhole(r, id)
	if err != nil {
		return answer{}, err
	}
	row := a.eventRowOf(e)
	return okJSON(apiEventWhole{apiEvent: eventOf(row), Headers: row.Headers, Sent: each(row.Sent, sentOf),
		apiPayload: a.payloadOf(e.Type, e.ContentType, e.Payload, e.PayloadErr).api()})
}

func (a *admin) apiTimeline(r *request) (answer, error) {
	t, err := a.timeline(r)
	if err != nil {
		return answer{}, err
	}
	return okJSON(apiTimeline{t.OutboxID, t.EventID, t.InOutbox, each(t.Entries, timelineEntryOf), each(t.Searched, same), each(t.NotSearched, same)})
}

func (a *admin) apiAudit(r *request) (answer, error) {
	q := &r.query
	id, page := q.auditFilter(100)
	if err := q.done(); err != nil {
		return answer{}, err
	}
	entries, err := a.auditEntries(r.Context(), id, page)
	if err != nil {
		return answer{}, err
	}
	list := apiAuditList{Audit: each(entries, func(e outboxops.AuditEntry) apiAudit { return a.auditOf(e, "", "") })}
	if len(entries) == page.Limit {
		list.Next = &entries[page.Limit-1].ID
	}
	return okJSON(list)
}
