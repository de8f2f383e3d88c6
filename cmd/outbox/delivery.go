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

	"github.com/outboxgo/outbox/internal/short"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

var deliveryListCommand = command{
	name:    "delivery list",
	summary: "what is owed to handlers of workers",
	about: `
Lists rows of event_delivery, those that were made last first: all that are not
done and not resolved, unless --status or --resolved says otherwise.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var l deliveryList
		l.pick.define(fs)
		l.pick.defineStatus(fs, "PENDING,PARKED,PROCESSING,DONE,DEAD (not DONE)")
		fs.BoolVar(&l.pick.resolved, "resolved", false, "those that operators have resolved")
		fs.IntVar(&l.limit, "limit", 50, "`NUMBER` deliveries at most, up to 1000 (50)")
		fs.Int64Var(&l.after, "after", 0, "`ID` of the last one known: what follows")
		return l.run
	},
}

// deliveryFlags pick deliveries.
type deliveryFlags struct {
	group, stream, action, eventType, code, key, event, status string

	resolved     bool
	since, until when
}

func (f *deliveryFlags) define(fs *flag.FlagSet) {
	fs.StringVar(&f.group, "group", "", "`NAME` consumer group")
	fs.StringVar(&f.stream, "stream", "", "`NAME` stream, the topic that events have in Kafka")
	fs.StringVar(&f.action, "action", "", "`NAME` handler that gets them")
	fs.StringVar(&f.eventType, "type", "", "`TYPE` of the event, shop.order.created.v1")
	fs.StringVar(&f.code, "code", "", "`NAME` kind of the last error, timeout")
	fs.StringVar(&f.key, "key", "", "`KEY` of the record")
	fs.StringVar(&f.event, "event", "", "`UUID` id of one event")
	fs.Var(&f.since, "since", "`TIME` status changed at or after: 2h (ago), 2006-01-02")
	fs.Var(&f.until, "until", "`TIME` status changed before: 1h (ago), 2006-01-02")
}

func (f *deliveryFlags) defineStatus(fs *flag.FlagSet, usage string) {
	fs.StringVar(&f.status, "status", "", "`LIST` "+usage)
}

var deliveryStatuses = []string{outboxops.DeliveryPending, outboxops.DeliveryParked, outboxops.DeliveryProcessing, outboxops.DeliveryDone, outboxops.DeliveryDead}

// filter returns what the flags say, and whether they say anything.
func (f *deliveryFlags) filter(now time.Time) (filter outboxops.DeliveryFilter, picks bool, err error) {
	filter = outboxops.DeliveryFilter{Group: f.group, Stream: f.stream, Action: f.action, Type: f.eventType, ErrorCode: f.code, Key: f.key,
		EventID: f.event, Resolved: f.resolved, Since: f.since.time(now), Until: f.until.time(now)}
	if f.status != "" {
		for _, s := range strings.Split(f.status, ",") {
			s = strings.ToUpper(s)
			if err := oneOf("--status", s, deliveryStatuses); err != nil {
				return filter, false, err
			}
			filter.Statuses = append(filter.Statuses, s)
		}
	}
	return filter, *f != deliveryFlags{}, nil
}

type deliveryList struct {
	pick  deliveryFlags
	limit int
	after int64
}

func (l *deliveryList) run(ctx context.Context, e *env) error {
	filter, picks, err := l.pick.filter(e.now())
	if err != nil {
		return err
	}
	if l.limit < 1 || l.limit > 1000 {
		return usagef("--limit is 1 to 1000")
	}
	if l.after < 0 {
		return usagef("--after %d: must not be negative", l.after)
	}
	deliveries, err := e.deliveries(ctx)
	if err != nil {
		return err
	}
	rows, err := deliveries.List(ctx, filter, outboxops.DeliveryPage{After: l.after, Limit: min(l.limit+1, 1000)}) // one more shows whether there is more
	if err != nil {
		return err
	}
	if len(rows) == 0 && !e.json {
		if picks || l.after > 0 {
			e.printf("No delivery matches these flags.\n")
		} else {
			e.printf("Nothing is owed to a handler.\n")
		}
		return nil
	}
	return showDeliveries(e, rows[:min(len(rows), l.limit)], len(rows) > l.limit)
}

func (e *env) deliveries(ctx context.Context) (*outboxops.Deliveries, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{Schema: e.schema})
}

// deliveryJSON is a delivery in the output.
type deliveryJSON struct {
	ID            int64             `json:"id"`
	Group         string            `json:"group"`
	Stream        string            `json:"stream"`
	Action        string            `json:"action"`
	Key           string            `json:"key"`
	Status        string            `json:"status"`
	Held          bool              `json:"held"`
	Attempts      int               `json:"attempts"`
	MaxAttempts   int               `json:"max_attempts"`
	NextRetryAt   time.Time         `json:"next_retry_at"`
	LastAttemptAt *time.Time        `json:"last_attempt_at,omitempty"`
	LockedBy      string            `json:"locked_by,omitempty"`
	LockedUntil   *time.Time        `json:"locked_until,omitempty"`
	Code          string            `json:"code"`
	Error         string            `json:"error"`
	CreatedAt     time.Time         `json:"created_at"`
	UpdatedAt     time.Time         `json:"updated_at"`
	ProcessedAt   *time.Time        `json:"processed_at,omitempty"`
	Resolution    string            `json:"resolution,omitempty"`
	ResolvedBy    string            `json:"resolved_by,omitempty"`
	ResolvedAt    *time.Time        `json:"resolved_at,omitempty"`
	Note          string            `json:"note,omitempty"`
	OutboxID      int64             `json:"outbox_id"`
	EventID       string            `json:"event_id"`
	Type          string            `json:"type"`
	Source        string            `json:"source"`
	AggregateType string            `json:"aggregate_type"`
	AggregateID   string            `json:"aggregate_id"`
	OccurredAt    time.Time         `json:"occurred_at"`
	RecordedAt    time.Time         `json:"recorded_at"`
	ContentType   string            `json:"content_type"`
	Payload       json.RawMessage   `json:"payload,omitempty"`
	PayloadBase64 []byte            `json:"payload_base64,omitempty"`
	PayloadError  string            `json:"payload_error,omitempty"`
	Headers       map[string]string `json:"headers,omitempty"`
	Audit         []auditJSON       `json:"audit,omitempty"`
}

func deliveryOf(d outboxops.Delivery) deliveryJSON {
	return deliveryJSON{
		ID: d.ID, Group: d.Group, Stream: d.Stream, Action: d.Action, Key: d.Key, Status: d.Status, Held: d.Held, Attempts: d.Attempts, MaxAttempts: d.MaxAttempts,
		NextRetryAt: d.NextRetryAt.UTC(), LastAttemptAt: optional(d.LastAttemptAt), LockedBy: d.LockedBy, LockedUntil: optional(d.LockedUntil),
		Code: d.ErrorCode, Error: short.Text(errText(d.Err), maxText), CreatedAt: d.CreatedAt.UTC(), UpdatedAt: d.UpdatedAt.UTC(), ProcessedAt: optional(d.ProcessedAt),
		Resolution: d.Resolution, ResolvedBy: d.ResolvedBy, ResolvedAt: optional(d.ResolvedAt), Note: d.Note,
		OutboxID: d.OutboxID, EventID: d.EventID, Type: d.Type, Source: d.Source, AggregateType: d.AggregateType, AggregateID: d.AggregateID,
		OccurredAt: d.OccurredAt.UTC(), RecordedAt: d.RecordedAt.UTC(), ContentType: d.ContentType, Headers: d.Headers,
	}
}

// deliveryStatus is the status for people.
func deliveryStatus(d outboxops.Delivery) string {
	switch {
	case d.Resolution != "":
		return d.Status + "," + d.Resolution
	case d.Held:
		return d.Status + ",held"
	}
	return d.Status
}

func showDeliveries(e *env, rows []outboxops.Delivery, more bool) error {
	if e.json {
		out := make([]deliveryJSON, 0, len(rows))
		for _, d := range rows {
			out = append(out, deliveryOf(d))
		}
		return e.writeJSON(map[string]any{"deliveries": out, "more": more})
	}
	t := table{head: []string{"ID", "STATUS", "AGE", "TRIES", "CODE", "GROUP", "ACTION", "STREAM", "KEY"}, flex: []int{4, 5, 6, 7, 8}}
	for _, d := range rows {
		t.add(strconv.FormatInt(d.ID, 10), deliveryStatus(d), age(d.CreatedAt, e.now()), tries(d), d.ErrorCode, d.Group, d.Action, d.Stream, d.Key)
	}
	e.writeTable(t)
	if more {
		e.printf("There is more: --after %d\n", rows[len(rows)-1].ID)
	}
	return nil
}

func tries(d outboxops.Delivery) string { return fmt.Sprintf("%d/%d", d.Attempts, d.MaxAttempts) }

var deliveryShowCommand = command{
	name: "delivery show", synopsis: "ID", min: 1, max: 1,
	summary: "one of them: error, payload, headers, what was done",
	about: `
Shows the delivery with the payload of its event, which may be personal data:
--no-payload leaves it out.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		bare := fs.Bool("no-payload", false, "without payload and headers")
		return func(ctx context.Context, e *env) error { return deliveryShow(ctx, e, *bare) }
	},
}

// deliveryIDs returns the arguments as ids, in their order and each once.
func (e *env) deliveryIDs() ([]int64, error) {
	var ids []int64
	for _, arg := range e.args {
		id, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || id < 1 {
			return nil, usagef("%q is no id: outbox delivery list shows them", arg)
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

func deliveryShow(ctx context.Context, e *env, bare bool) error {
	ids, err := e.deliveryIDs()
	if err != nil {
		return err
	}
	deliveries, err := e.deliveries(ctx)
	if err != nil {
		return err
	}
	row, err := deliveries.Get(ctx, ids[0])
	if err != nil {
		return err
	}
	audit, err := deliveries.Audit(ctx, ids[0], outboxops.AuditPage{Limit: 1000})
	if err != nil {
		return err
	}
	if bare {
		row.Payload, row.PayloadErr, row.Headers = nil, nil, nil
	}
	if e.json {
		out := deliveryOf(row)
		out.Payload, out.PayloadBase64 = body(row.Payload)
		out.PayloadError = errText(row.PayloadErr)
		for _, a := range audit {
			out.Audit = append(out.Audit, auditJSON{a.At.UTC(), a.Operator, a.Login, a.Action, a.Reason})
		}
		return e.writeJSON(out)
	}
	showDelivery(e, row)
	for _, a := range audit {
		e.printf("%s  %s by %s: %s\n", clock(a.At), a.Action, who(a), visible(a.Reason))
	}
	return nil
}

func showDelivery(e *env, d outboxops.Delivery) {
	fields := [][2]string{
		{"id", strconv.FormatInt(d.ID, 10)}, {"status", deliveryStatus(d)}, {"group", d.Group}, {"action", d.Action}, {"stream", d.Stream}, {"key", d.Key},
		{"type", d.Type}, {"aggregate", d.AggregateType + "/" + d.AggregateID}, {"event id", d.EventID}, {"outbox id", strconv.FormatInt(d.OutboxID, 10)},
		{"source", d.Source}, {"occurred", clock(d.OccurredAt)}, {"recorded", clock(d.RecordedAt)}, {"changed", clock(d.UpdatedAt)},
		{"attempts", fmt.Sprintf("%d of %d, the last at %s", d.Attempts, d.MaxAttempts, clock(d.LastAttemptAt))},
	}
	switch d.Status {
	case outboxops.DeliveryPending:
		fields = append(fields, [2]string{"next retry", clock(d.NextRetryAt)})
	case outboxops.DeliveryProcessing:
		fields = append(fields, [2]string{"worker", d.LockedBy + " until " + clock(d.LockedUntil)})
	}
	if d.Err != nil || d.ErrorCode != "" {
		fields = append(fields, [2]string{"code", d.ErrorCode}, [2]string{"error", short.Text(errText(d.Err), maxText)})
	}
	if !d.ResolvedAt.IsZero() {
		fields = append(fields, [2]string{"resolved", clock(d.ResolvedAt) + " by " + d.ResolvedBy}, [2]string{"note", d.Note})
	}
	e.writeFields(fields)
	e.writeHeaders(d.Headers)
	e.printf("\n")
	e.writePayload(d.ContentType, d.Payload, d.PayloadErr)
}

var deliveryCountsCommand = command{
	name:    "delivery counts",
	summary: "how many there are by group, stream, action and status",
	about: `
Counts what is not done and not resolved, up to 10,000 of a kind. DUE says when
the first one that is PENDING was or is due, and when another worker can take
the first one that is PROCESSING. Below it are the events that wait in outbox,
because workers make no more deliveries than they have room for.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var pick deliveryFlags
		pick.define(fs)
		pick.defineStatus(fs, "PENDING,PARKED,PROCESSING,DEAD (all)")
		return func(ctx context.Context, e *env) error { return deliveryCounts(ctx, e, &pick) }
	},
}

func deliveryCounts(ctx context.Context, e *env, pick *deliveryFlags) error {
	filter, _, err := pick.filter(e.now())
	if err != nil {
		return err
	}
	if slices.Contains(filter.Statuses, outboxops.DeliveryDone) {
		return usagef("--status DONE: what is done is not counted")
	}
	deliveries, err := e.deliveries(ctx)
	if err != nil {
		return err
	}
	counts, err := deliveries.Count(ctx, filter)
	if err != nil {
		return err
	}
	groups, err := deliveries.Groups(ctx)
	if err != nil {
		return err
	}
	groups = slices.DeleteFunc(groups, func(g outboxops.DeliveryGroup) bool { return pick.group != "" && g.Group != pick.group })
	return showDeliveryCounts(e, counts, groups)
}

func showDeliveryCounts(e *env, counts []outboxops.DeliveryCount, groups []outboxops.DeliveryGroup) error {
	type row struct {
		Group      string     `json:"group"`
		Stream     string     `json:"stream"`
		Action     string     `json:"action"`
		Status     string     `json:"status"`
		Deliveries int        `json:"deliveries"`
		Held       int        `json:"held"`
		Oldest     time.Time  `json:"oldest"`
		Due        *time.Time `json:"due"`
	}
	rows, total, least := make([]row, 0, len(counts)), 0, ""
	t := table{head: []string{"DELIVERIES", "STATUS", "HELD", "OLDEST", "DUE", "GROUP", "ACTION", "STREAM"}, flex: []int{5, 6, 7}}
	for _, c := range counts {
		rows = append(rows, row{c.Group, c.Stream, c.Action, c.Status, c.Deliveries, c.Held, c.Oldest.UTC(), optional(c.Due)})
		t.add(countUpTo(c.Deliveries), c.Status, count(c.Held), age(c.Oldest, e.now()), due(c.Due, e.now()), c.Group, c.Action, c.Stream)
		total += c.Deliveries
		if c.Deliveries == outbox.MaxCounted {
			least = "at least "
		}
	}
	if e.json {
		return e.writeJSON(map[string]any{"total": total, "counts": rows, "groups": deliveryGroupsOf(groups)})
	}
	if total > 0 {
		e.writeTable(t)
	}
	e.printf("%s%s in all\n", least, count(total))
	for _, g := range groups {
		switch {
		case g.State != outboxops.SubscriptionActive:
			e.printf("group %s: %s since %s, with relay %s\n", visible(g.Group), visible(string(g.State)), clock(g.ChangedAt), visible(g.Relay))
		case g.Pending > 0:
			e.printf("group %s: %s no deliveries yet, the oldest is %s old\n", visible(g.Group), eventsHave(g), age(g.Oldest, e.now()))
		}
	}
	return nil
}

// eventsHave says how many events of a group are behind its position.
func eventsHave(g outboxops.DeliveryGroup) string {
	if g.PendingMore {
		return "more than " + count(g.Pending) + " events have"
	}
	return plural(g.Pending, "event has", "events have")
}

// deliveryGroupJSON is a group of workers in the output.
type deliveryGroupJSON struct {
	Group       string     `json:"group"`
	CreatedAt   time.Time  `json:"created_at"`
	State       string     `json:"state"`
	Relay       string     `json:"relay"`
	ChangedAt   time.Time  `json:"changed_at"`
	Pending     int64      `json:"pending"`
	PendingMore bool       `json:"pending_more"`
	Oldest      *time.Time `json:"oldest"`
	ProgressAt  *time.Time `json:"progress_at"`
}

func deliveryGroupsOf(groups []outboxops.DeliveryGroup) []deliveryGroupJSON {
	all := make([]deliveryGroupJSON, 0, len(groups))
	for _, g := range groups {
		all = append(all, deliveryGroupJSON{g.Group, g.CreatedAt.UTC(), string(g.State), g.Relay, g.ChangedAt.UTC(), g.Pending, g.PendingMore, optional(g.Oldest), optional(g.ProgressAt)})
	}
	return all
}

// due writes when something is due, or for how long it has been.
func due(t, now time.Time) string {
	switch {
	case t.IsZero():
		return "-"
	case t.After(now):
		return "in " + length(t.Sub(now))
	}
	return length(now.Sub(t)) + " ago"
}
