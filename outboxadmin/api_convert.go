package outboxadmin

import (
	"encoding/base64"
	"math"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// each translates a list; an empty one is [] in JSON.
func each[A, B any](all []A, f func(A) B) []B {
	list := make([]B, 0, len(all))
	for _, one := range all {
		list = append(list, f(one))
	}
	return list
}

func same[A any](one A) A { return one }

func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}

func relayOf(s outbox.RelayStatus, h *outbox.RelayHealth) apiRelay {
	r := apiRelay{Name: s.Name, Holder: s.Holder, Epoch: s.Epoch, LeaseUntil: orNull(s.LeaseUntil), MovedAt: orNull(s.MovedAt), CursorTopic: s.CursorTopic, Transaction: s.Transaction,
		Pending: s.Pending, PendingMore: s.PendingMore, Oldest: orNull(s.Oldest),
		Waiting: s.Waiting, Failed: s.Failed, Parked: s.Parked, Dead: s.Dead, ParkedKeys: s.ParkedKeys, HeldKeys: s.HeldKeys, State: apiStateOf(s)}
	if h != nil {
		r.Health = &apiHealth{h.Live, h.Ready, h.Works, h.Leading, h.Breaker.String(), each(h.Reasons, same)}
	}
	return r
}

func progressOf(p outboxops.RelayProgress) apiProgress {
	progress := apiProgress{At: p.At.UTC(), Events: p.Events}
	if p.Latency > 0 {
		ms := float64(p.Latency.Microseconds()) / 1000
		progress.LatencyMS = &ms
	}
	return progress
}

// boundOf returns an end of a range of ids, or nil if the range has no end.
func boundOf(id int64) *int64 {
	if id == math.MinInt64 || id == math.MaxInt64 {
		return nil
	}
	return &id
}

func transactionOf(t outboxops.OpenTransaction) apiTransaction {
	return apiTransaction{t.PID, t.Prepared, t.Database, t.User, t.Application, t.Client, t.State, t.Since.UTC(), t.Query, t.Recording,
		each(t.WaitsFor, same)}
}

func countOf(c outboxops.FailureCount) apiCount {
	return apiCount{string(c.Kind), c.Relay, c.Group, c.Action, c.Status, c.Type, c.Class, c.Events, c.More, c.Oldest.UTC()}
}

func failedOf(r failedRow) apiFailed {
	f := apiFailed{ID: r.ID.String(), Kind: string(r.ID.Kind), Relay: r.Relay, Group: r.Group, Action: r.Action, OutboxID: r.OutboxID, EventID: r.EventID, Type: r.Type, Source: r.Source,
		AggregateType: r.AggregateType, AggregateID: r.AggregateID, Topic: r.Topic, Key: r.Key, ContentType: r.ContentType,
		Status: r.Status, Held: r.Held, Retries: r.Retries,
		Attempts: r.Attempts, MaxAttempts: r.MaxAttempts, LastAttemptAt: orNull(r.LastAttemptAt), LockedBy: r.LockedBy, LockedUntil: orNull(r.LockedUntil),
		ChangedAt: orNull(r.ChangedAt), Class: r.Class, Error: errorText(r.Err),
		OccurredAt: r.OccurredAt.UTC(), CreatedAt: r.CreatedAt.UTC(), FailedAt: r.FailedAt.UTC(), NextRetryAt: r.NextRetryAt.UTC(),
		ResolvedAt: orNull(r.ResolvedAt), ResolvedBy: r.ResolvedBy, Resolution: r.Resolution}
	if r.Kafka != nil {
		f.Partition, f.Offset = &r.Kafka.Partition, &r.Kafka.Offset
	}
	return f
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// maxDepth bounds the nesting of a payload in an answer in JSON. Readers such as encoding/json refuse a
// nesting of more than 10,000 levels.
const maxDepth = 1000

func (p payload) api() apiPayload {
	if p.Err != "" {
		return apiPayload{PayloadError: p.Err}
	}
	if depth, _ := shapeOf(p.Data); depth < maxDepth && p.Kind() == "json" && p.IsJSON() {
		return apiPayload{Payload: p.Data, Masked: p.Masked}
	}
	text := base64.StdEncoding.EncodeToString(p.Data)
	return apiPayload{PayloadBase64: &text, Masked: p.Masked}
}

// auditOf translates an entry about an event of a type.
func (a *admin) auditOf(e outboxops.AuditEntry, eventType, contentType string) apiAudit {
	row := a.auditRowOf(e)
	entry := apiAudit{ID: e.ID, At: e.At.UTC(), Operator: e.Operator, Login: e.Login, Action: e.Action, Reason: e.Reason, Relay: e.Relay, Topic: e.Topic,
		Key: row.Key, Group: e.Group, Handler: e.Handler, FailureID: e.Failure.String(), OutboxID: e.OutboxID, EventID: e.EventID}
	if e.Payload != nil || e.PayloadErr != nil {
		before := a.payloadOf(eventType, contentType, e.Payload, e.PayloadErr).api()
		entry.Before = &before
	}
	return entry
}

func groupOf(g outboxops.ConsumerGroup, lag kafkaView) apiGroup {
	return apiGroup{g.Group, pauseOf(g.Pause), each(g.Topics, func(t outboxops.ConsumerTopic) apiGroupTopic {
		return apiGroupTopic{t.Topic, t.Partitions, lag.of(g.Group, t.Topic), orNull(t.SavedAt), t.Lost, pauseOf(t.Pause)}
	})}
}

func deliveryCountOf(c outboxops.DeliveryCount) apiDeliveryCount {
	return apiDeliveryCount{c.Group, c.Stream, c.Action, c.Status, c.Deliveries, c.More, c.Held, c.Oldest.UTC(), orNull(c.Due)}
}

func workersOf(g outboxops.DeliveryGroup) apiWorkers {
	return apiWorkers{g.Group, g.CreatedAt.UTC(), string(g.State), g.Relay, g.ChangedAt.UTC(), g.Pending, g.PendingMore, orNull(g.Oldest), orNull(g.ProgressAt)}
}

func processOf(p processRow) apiProcess {
	return apiProcess{p.Group, p.What, p.Live, p.Works, each(p.Reasons, same)}
}

func staleOf(c outbox.EventCount) apiStale {
	return apiStale{c.Relay, c.Group, c.Action, c.Status, c.Type, c.Class, c.Events, c.More, c.Oldest.UTC()}
}

func pauseOf(p *outboxops.ConsumerPause) *apiPauseInfo {
	if p == nil {
		return nil
	}
	return &apiPauseInfo{p.Operator, p.Reason, p.At.UTC()}
}

func eventOf(r eventRow) apiEvent {
	return apiEvent{OutboxID: r.OutboxID, EventID: r.EventID, Type: r.Type, Source: r.Source, AggregateType: r.AggregateType,
		AggregateID: r.AggregateID, Topic: r.Topic, Key: r.Key, ContentType: r.ContentType, OccurredAt: r.OccurredAt.UTC(),
		CreatedAt: r.CreatedAt.UTC(), Size: r.Size, Removed: r.Removed,
		States: each(r.States, func(s eventState) apiState { return apiState{s.Relay, s.Status, s.Failure.String()} })}
}

func sentOf(s outboxops.EventSent) apiSent {
	return apiSent{s.Relay, s.Batch, s.Topic, s.Partition, s.Offset, s.At.UTC(), s.Retried, s.Repeat, s.Expired}
}

func timelineEntryOf(e outboxops.TimelineEntry) apiTimelineEntry {
	return apiTimelineEntry{orNull(e.At), e.What, e.Err, e.Table, e.Failure.String()}
}
