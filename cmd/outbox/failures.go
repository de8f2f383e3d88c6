package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

var failuresListCommand = command{
	name:    "failures list",
	summary: "events and deliveries that have failed, and why",
	about: `
Lists unresolved failures, the newest first: events that a relay could not send,
and deliveries that a handler could not handle. docs/repair.md explains
statuses.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var l failureList
		l.pick.define(fs)
		fs.IntVar(&l.limit, "limit", 50, "`NUMBER` of failures, up to 1000 (50)")
		fs.Var(&l.after, "after", "`ID,…` continue a list: the value printed at its end")
		return l.run
	},
}

// failureFlags pick failures.
type failureFlags struct {
	kind, relay, group, action, eventType, topic, key, class, event, status string

	of           aggregate
	since, until when
}

func (f *failureFlags) define(fs *flag.FlagSet) {
	fs.StringVar(&f.kind, "kind", "", "`NAME` event (of a relay) or delivery (to a handler)")
	fs.StringVar(&f.status, "status", "", "`LIST` waiting,failed,parked,dead,resolved,done")
	fs.StringVar(&f.eventType, "type", "", "`TYPE` of the event, shop.order.created.v1")
	fs.StringVar(&f.topic, "topic", "", "`NAME` topic of the event")
	fs.StringVar(&f.key, "key", "", "`KEY` of the record")
	fs.Var(&f.of, "aggregate", "`TYPE[/ID]` of the aggregate, Order/42")
	fs.StringVar(&f.event, "event", "", "`UUID` of the event")
	fs.StringVar(&f.class, "class", "", "`NAME` class of the error, message_too_large")
	fs.StringVar(&f.relay, "relay", "", "`NAME` relay of the events")
	fs.StringVar(&f.group, "group", "", "`NAME` consumer group of the deliveries")
	fs.StringVar(&f.action, "action", "", "`NAME` action of the deliveries")
	fs.Var(&f.since, "since", "`TIME` failed first at or after: 2h (ago), 2006-01-02")
	fs.Var(&f.until, "until", "`TIME` failed first before")
}

var (
	kinds    = []string{string(outboxops.KindEvent), string(outboxops.KindDelivery)}
	statuses = []string{outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusParked, outbox.StatusDead, outbox.StatusResolved, outboxops.StatusDone}
)

// filter returns the filter of the flags, and whether any flag was given.
func (f *failureFlags) filter(now time.Time) (filter outboxops.FailureFilter, picks bool, err error) {
	filter = outboxops.FailureFilter{Kind: outboxops.Kind(f.kind), Relay: f.relay, Group: f.group, Action: f.action, Type: f.eventType, Topic: f.topic, Key: f.key,
		AggregateType: f.of.kind, AggregateID: f.of.id, EventID: f.event, Class: f.class, Since: f.since.time(now), Until: f.until.time(now)}
	if f.kind != "" {
		if err := oneOf("--kind", f.kind, kinds); err != nil {
			return filter, false, err
		}
	}
	if f.status != "" {
		filter.Statuses = strings.Split(f.status, ",")
	}
	for _, s := range filter.Statuses {
		if err := oneOf("--status", s, statuses); err != nil {
			return filter, false, err
		}
	}
	if ofEvents, ofDeliveries := f.relay != "", f.group != "" || f.action != ""; ofEvents && (ofDeliveries || filter.Kind == outboxops.KindDelivery) ||
		ofDeliveries && filter.Kind == outboxops.KindEvent {
		return filter, false, usagef("--relay is for events, --group and --action are for deliveries: nothing has both")
	}
	return filter, *f != failureFlags{}, nil
}

type failureList struct {
	pick  failureFlags
	limit int
	after failureIDs
}

func (l *failureList) run(ctx context.Context, e *env) error {
	now, err := e.nowFor(ctx, l.pick.since, l.pick.until)
	if err != nil {
		return err
	}
	filter, picks, err := l.pick.filter(now)
	if err != nil {
		return err
	}
	if err := checkLimit(l.limit); err != nil {
		return err
	}
	failures, err := e.failures(ctx)
	if err != nil {
		return err
	}
	page := outboxops.FailurePage{After: l.after, Limit: min(l.limit+1, 1000)} // one more shows whether there is more
	rows, err := failures.List(ctx, filter, page)
	if err != nil {
		return err
	}
	if len(rows) == 0 && !e.json {
		return l.showNone(ctx, e, failures, filter, picks)
	}
	shown := rows[:min(len(rows), l.limit)]
	return showFailures(e, shown, len(rows) > l.limit, failureIDs(page.Next(shown).After))
}

// showNone says why nothing is listed. Resolved failures are only listed on request, so
// it counts them.
func (l *failureList) showNone(ctx context.Context, e *env, failures *outboxops.Failures, filter outboxops.FailureFilter, picks bool) error {
	resolved := tally{}
	if len(filter.Statuses) == 0 {
		filter.Statuses = []string{outbox.StatusResolved}
		counts, err := failures.Count(ctx, filter)
		if err != nil {
			return err
		}
		for _, c := range counts {
			resolved = resolved.Plus(short.TallyOf(c.Events, c.More))
		}
	}
	text := "Nothing has failed."
	if picks || len(l.after) > 0 {
		text = "No failure matches these flags."
	}
	switch {
	case resolved.More:
		text = fmt.Sprintf("Nothing is unresolved. Not shown: at least %s resolved failures (--status resolved).", count(resolved.N))
	case resolved.N > 0:
		text = fmt.Sprintf("Nothing is unresolved. Not shown: %s (--status resolved).", resolved.Of("resolved failure", "resolved failures"))
	}
	e.printf("%s\n", text)
	return nil
}

// failureJSON is a failure in the output.
type failureJSON struct {
	ID            string            `json:"id"`
	Kind          string            `json:"kind"`
	Relay         string            `json:"relay,omitempty"`
	Group         string            `json:"group,omitempty"`
	Action        string            `json:"action,omitempty"`
	Status        string            `json:"status"`
	Held          bool              `json:"held"`
	OutboxID      int64             `json:"outbox_id,omitempty"`
	Partition     *int32            `json:"partition,omitempty"`
	Offset        *int64            `json:"offset,omitempty"`
	EventID       string            `json:"event_id"`
	Type          string            `json:"type"`
	Source        string            `json:"source"`
	AggregateType string            `json:"aggregate_type"`
	AggregateID   string            `json:"aggregate_id"`
	Topic         string            `json:"topic"`
	Key           string            `json:"key"`
	Retries       int               `json:"retries"`
	Attempts      int               `json:"attempts,omitempty"`
	MaxAttempts   int               `json:"max_attempts,omitempty"`
	Class         string            `json:"class"`
	Error         string            `json:"error"`
	OccurredAt    time.Time         `json:"occurred_at"`
	CreatedAt     time.Time         `json:"created_at"`
	FailedAt      time.Time         `json:"failed_at"`
	NextRetryAt   time.Time         `json:"next_retry_at"`
	LastAttemptAt *time.Time        `json:"last_attempt_at,omitempty"`
	ChangedAt     *time.Time        `json:"changed_at,omitempty"`
	LockedBy      string            `json:"locked_by,omitempty"`
	LockedUntil   *time.Time        `json:"locked_until,omitempty"`
	ResolvedAt    *time.Time        `json:"resolved_at,omitempty"`
	ResolvedBy    string            `json:"resolved_by,omitempty"`
	Resolution    string            `json:"resolution,omitempty"`
	ContentType   string            `json:"content_type"`
	Payload       json.RawMessage   `json:"payload,omitempty"`
	PayloadBase64 []byte            `json:"payload_base64,omitempty"`
	PayloadError  string            `json:"payload_error,omitempty"`
	Headers       map[string]string `json:"headers,omitempty"`
	Audit         []auditJSON       `json:"audit,omitempty"`
}

func failureOf(r outboxops.Failure) failureJSON {
	f := failureJSON{
		ID: r.ID.String(), Kind: string(r.ID.Kind), Relay: r.Relay, Group: r.Group, Action: r.Action, Status: r.Status, Held: r.Held,
		OutboxID: r.OutboxID, EventID: r.EventID, Type: r.Type, Source: r.Source, AggregateType: r.AggregateType, AggregateID: r.AggregateID,
		Topic: r.Topic, Key: r.Key, Retries: r.Retries, Attempts: r.Attempts, MaxAttempts: r.MaxAttempts, Class: r.Class, Error: short.Text(errText(r.Err), maxText),
		OccurredAt: r.OccurredAt.UTC(), CreatedAt: r.CreatedAt.UTC(), FailedAt: r.FailedAt.UTC(), NextRetryAt: r.NextRetryAt.UTC(),
		LastAttemptAt: optional(r.LastAttemptAt), ChangedAt: optional(r.ChangedAt), LockedBy: r.LockedBy, LockedUntil: optional(r.LockedUntil),
		ResolvedAt: optional(r.ResolvedAt), ResolvedBy: r.ResolvedBy, Resolution: r.Resolution, ContentType: r.ContentType, Headers: r.Headers,
	}
	if r.Kafka != nil {
		f.Partition, f.Offset = &r.Kafka.Partition, &r.Kafka.Offset
	}
	return f
}

func showFailures(e *env, rows []outboxops.Failure, more bool, next failureIDs) error {
	if e.json {
		out := make([]failureJSON, 0, len(rows))
		for _, r := range rows {
			out = append(out, failureOf(r))
		}
		return e.writeJSON(map[string]any{"failures": out, "more": more, "next": next.String()})
	}
	t := table{head: []string{"ID", "STATUS", "AGE", "TRIES", "CLASS", "OWNER", "TOPIC", "KEY", "TYPE"}, flex: []int{4, 5, 6, 7, 8}}
	for _, r := range rows {
		t.add(r.ID.String(), heldStatus(r), age(r.FailedAt, e.dbNow()), tries(r), r.Class, owner(r.Relay, r.Group, r.Action), r.Topic, r.Key, r.Type)
	}
	e.writeTable(t)
	if more {
		e.printf("There is more: --after %v\n", next.String())
	}
	return nil
}

func heldStatus(r outboxops.Failure) string {
	if r.Held {
		return r.Status + ",held"
	}
	return r.Status
}

func tries(r outboxops.Failure) string {
	if r.ID.Kind == outboxops.KindDelivery {
		return fmt.Sprintf("%d/%d", r.Attempts, r.MaxAttempts)
	}
	return strconv.Itoa(r.Retries)
}

// owner is the relay, or the group and its action.
func owner(relay, group, action string) string {
	return strings.TrimSpace(relay + group + " " + action)
}

var failuresCountCommand = command{
	name:    "failures count",
	summary: "count failures by kind, status, type and class",
	about: `
Counts what outbox failures list lists, up to 10,000 of a kind (then with a +).
The last line also counts the unresolved failures: events that are not resolved,
and dead deliveries.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var pick failureFlags
		pick.define(fs)
		return func(ctx context.Context, e *env) error { return failuresCount(ctx, e, &pick) }
	},
}

func failuresCount(ctx context.Context, e *env, pick *failureFlags) error {
	now, err := e.nowFor(ctx, pick.since, pick.until)
	if err != nil {
		return err
	}
	filter, _, err := pick.filter(now)
	if err != nil {
		return err
	}
	if slices.Contains(filter.Statuses, outboxops.StatusDone) {
		return usagef("--status done: what is done is not counted")
	}
	failures, err := e.failures(ctx)
	if err != nil {
		return err
	}
	counts, err := failures.Count(ctx, filter)
	if err != nil {
		return err
	}
	return showFailureCounts(e, counts)
}

func showFailureCounts(e *env, counts []outboxops.FailureCount) error {
	type row struct {
		Kind     string    `json:"kind"`
		Relay    string    `json:"relay,omitempty"`
		Group    string    `json:"group,omitempty"`
		Action   string    `json:"action,omitempty"`
		Status   string    `json:"status"`
		Type     string    `json:"type"`
		Class    string    `json:"class"`
		Failures int       `json:"failures"`
		More     bool      `json:"more"`
		Oldest   time.Time `json:"oldest"`
	}
	rows, total, unresolved := make([]row, 0, len(counts)), tally{}, tally{}
	t := table{head: []string{"FAILURES", "KIND", "STATUS", "CLASS", "OLDEST", "OWNER", "TYPE"}, flex: []int{3, 5, 6}}
	for _, c := range counts {
		rows = append(rows, row{string(c.Kind), c.Relay, c.Group, c.Action, c.Status, c.Type, c.Class, c.Events, c.More, c.Oldest.UTC()})
		n := short.TallyOf(c.Events, c.More)
		t.add(n.String(), string(c.Kind), c.Status, c.Class, age(c.Oldest, e.dbNow()), owner(c.Relay, c.Group, c.Action), c.Type)
		total = total.Plus(n)
		if c.IsUnresolved() {
			unresolved = unresolved.Plus(n)
		}
	}
	if e.json {
		return e.writeJSON(map[string]any{"total": total.N, "unresolved": unresolved.N, "more": total.More, "counts": rows})
	}
	if total.N > 0 {
		e.writeTable(t)
	}
	e.printf("%s in all, %s unresolved\n", total, unresolved)
	return nil
}

var failuresShowCommand = command{
	name: "failures show", synopsis: "ID", min: 1, max: 1,
	summary: "show a failure: error, payload, headers, actions",
	about: `
ID is event-17 or delivery-17. The payload may be personal data: --no-payload
leaves it out.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		bare := fs.Bool("no-payload", false, "no payload, no headers")
		return func(ctx context.Context, e *env) error { return failuresShow(ctx, e, *bare) }
	},
}

// ids returns the arguments as ids, each once, the events first.
func (e *env) ids() (ids failureIDs, err error) {
	for _, arg := range e.args {
		id, err := outboxops.ParseFailureID(arg)
		if err != nil {
			return nil, usagef("%q is no id, as event-17 or delivery-17 is: outbox failures list shows them", arg)
		}
		if !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b outboxops.FailureID) int {
		if a.Kind != b.Kind {
			return slices.Index(kinds, string(a.Kind)) - slices.Index(kinds, string(b.Kind))
		}
		return int(min(1, max(-1, a.Number-b.Number)))
	})
	return ids, nil
}

func failuresShow(ctx context.Context, e *env, bare bool) error {
	ids, err := e.ids()
	if err != nil {
		return err
	}
	failures, err := e.failures(ctx)
	if err != nil {
		return err
	}
	row, err := failures.Get(ctx, ids[0])
	if err != nil {
		return err
	}
	audit, err := failures.Audit(ctx, ids[0], outboxops.AuditPage{Limit: 1000})
	if err != nil {
		return err
	}
	if bare {
		row.Payload, row.PayloadErr, row.Headers = nil, nil, nil
	}
	if e.json {
		out := failureOf(row)
		out.Payload, out.PayloadBase64 = body(row.Payload)
		out.PayloadError = errText(row.PayloadErr)
		for _, a := range audit {
			out.Audit = append(out.Audit, auditOf(a))
		}
		return e.writeJSON(out)
	}
	showFailure(e, row)
	for _, a := range audit {
		e.printf("%s  %s by %s: %s\n", clock(a.At), a.Action, who(a), visible(a.Reason))
	}
	return nil
}

func showFailure(e *env, r outboxops.Failure) {
	status := r.Status
	if r.Held {
		status += ", its key is held"
	}
	fields := [][2]string{{"id", r.ID.String()}, {"status", status}}
	add := func(name, value string) { fields = append(fields, [2]string{name, value}) }
	add("type", r.Type)
	add("aggregate", r.AggregateType+"/"+r.AggregateID)
	add("topic", r.Topic)
	add("key", r.Key)
	add("event id", r.EventID)
	if r.Kafka != nil {
		add("record", fmt.Sprintf("partition %d, offset %d", r.Kafka.Partition, r.Kafka.Offset))
	} else {
		add("outbox id", strconv.FormatInt(r.OutboxID, 10))
	}
	add("source", r.Source)
	if r.ID.Kind == outboxops.KindDelivery {
		add("group", r.Group)
		add("action", r.Action)
	} else {
		add("relay", r.Relay)
	}
	add("occurred", clock(r.OccurredAt))
	add("recorded", clock(r.CreatedAt))
	if r.ID.Kind == outboxops.KindDelivery {
		add("made", clock(r.FailedAt))
		add("changed", clock(r.ChangedAt))
		add("attempts", fmt.Sprintf("%d of %d, the last at %s", r.Attempts, r.MaxAttempts, clock(r.LastAttemptAt)))
	} else {
		add("failed", clock(r.FailedAt))
		add("retries", strconv.Itoa(r.Retries))
	}
	switch {
	case r.LockedBy != "":
		add("worker", r.LockedBy+" until "+clock(r.LockedUntil))
	case r.Status == outbox.StatusWaiting || r.Status == outbox.StatusFailed:
		add("next retry", clock(r.NextRetryAt))
	}
	if r.Err != nil || r.Class != "" {
		add("class", r.Class)
		add("error", short.Text(errText(r.Err), maxText))
	}
	if !r.ResolvedAt.IsZero() {
		add("resolved", clock(r.ResolvedAt)+" by "+r.ResolvedBy)
		add("note", r.Resolution)
	}
	e.writeFields(fields)
	e.writeHeaders(r.Headers)
	e.printf("\n")
	e.writePayload(r.ContentType, r.Payload, r.PayloadErr)
}
