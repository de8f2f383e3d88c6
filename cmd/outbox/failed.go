package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

var failedListCommand = command{
	name:    "failed list",
	summary: "events that did not reach Kafka, and why",
	about: `
Lists events of outbox_failed, those that failed last first, or counts them.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var l failedList
		l.pick.define(fs)
		fs.IntVar(&l.limit, "limit", 50, "`NUMBER` events at most, up to 1000 (50)")
		fs.Var(&l.after, "after", "`ID` of the last one known: what follows")
		fs.BoolVar(&l.count, "count", false, "only how many, by relay, status, type and class")
		return l.run
	},
}

type failedList struct {
	pick  failedFlags
	limit int
	after failureID
	count bool
}

func (l *failedList) run(ctx context.Context, e *env) error {
	filter, picks, err := l.pick.filter(e.now())
	if err != nil {
		return err
	}
	if l.limit < 1 || l.limit > 1000 {
		return usagef("--limit is 1 to 1000")
	}
	failed, err := e.failed(ctx)
	if err != nil {
		return err
	}
	if l.count {
		counts, err := failed.Count(ctx, filter)
		if err != nil {
			return err
		}
		return showCounts(e, counts)
	}
	page := outboxops.FailurePage{After: l.after.FailureID, Limit: min(l.limit+1, 1000)} // one more shows whether there is more
	rows, err := failed.List(ctx, filter, page)
	if err != nil {
		return err
	}
	if len(rows) == 0 && !e.json {
		return l.showNone(ctx, e, failed, filter, picks)
	}
	more := len(rows) > l.limit
	return showFailed(e, rows[:min(len(rows), l.limit)], more)
}

// showNone says why nothing is listed. Resolved events are only listed on request, so
// it counts them.
func (l *failedList) showNone(ctx context.Context, e *env, failed *outboxops.Failures, filter outboxops.FailureFilter, picks bool) error {
	resolved, more := 0, false
	if len(filter.Statuses) == 0 {
		filter.Statuses = []string{outbox.StatusResolved}
		counts, err := failed.Count(ctx, filter)
		if err != nil {
			return err
		}
		for _, c := range counts {
			resolved, more = resolved+c.Events, more || c.Events == outbox.MaxCounted
		}
	}
	text := "Nothing has failed."
	if picks || l.after != (failureID{}) {
		text = "No failed event matches these flags."
	}
	switch {
	case more:
		text = fmt.Sprintf("Nothing is unresolved. Not shown: at least %s resolved events (--status resolved).", count(resolved))
	case resolved > 0:
		text = fmt.Sprintf("Nothing is unresolved. Not shown: %s (--status resolved).", plural(int64(resolved), "resolved event", "resolved events"))
	}
	e.printf("%s\n", text)
	return nil
}

// failedJSON is a failed event in the output.
type failedJSON struct {
	ID            string            `json:"id"`
	Kind          string            `json:"kind"`
	Relay         string            `json:"relay"`
	Status        string            `json:"status"`
	Held          bool              `json:"held"`
	OutboxID      int64             `json:"outbox_id"`
	EventID       string            `json:"event_id"`
	Type          string            `json:"type"`
	Source        string            `json:"source"`
	AggregateType string            `json:"aggregate_type"`
	AggregateID   string            `json:"aggregate_id"`
	Topic         string            `json:"topic"`
	Key           string            `json:"key"`
	Retries       int               `json:"retries"`
	Class         string            `json:"class"`
	Error         string            `json:"error"`
	OccurredAt    time.Time         `json:"occurred_at"`
	CreatedAt     time.Time         `json:"created_at"`
	FailedAt      time.Time         `json:"failed_at"`
	NextRetryAt   time.Time         `json:"next_retry_at"`
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

type auditJSON struct {
	At       time.Time `json:"at"`
	Operator string    `json:"operator"`
	Login    string    `json:"login"`
	Action   string    `json:"action"`
	Reason   string    `json:"reason"`
}

func failedOf(r outboxops.Failure) failedJSON {
	f := failedJSON{
		ID: r.ID.String(), Kind: string(r.ID.Kind), Relay: r.Relay, Status: r.Status, Held: r.Held, OutboxID: r.OutboxID, EventID: r.EventID, Type: r.Type, Source: r.Source,
		AggregateType: r.AggregateType, AggregateID: r.AggregateID, Topic: r.Topic, Key: r.Key, Retries: r.Retries, Class: r.Class,
		OccurredAt: r.OccurredAt.UTC(), CreatedAt: r.CreatedAt.UTC(), FailedAt: r.FailedAt.UTC(), NextRetryAt: r.NextRetryAt.UTC(),
		ResolvedAt: optional(r.ResolvedAt), ResolvedBy: r.ResolvedBy, Resolution: r.Resolution, ContentType: r.ContentType, Headers: r.Headers,
	}
	f.Error = short.Text(errText(r.Err), maxText)
	return f
}

func showFailed(e *env, rows []outboxops.Failure, more bool) error {
	if e.json {
		out := make([]failedJSON, 0, len(rows))
		for _, r := range rows {
			out = append(out, failedOf(r))
		}
		return e.writeJSON(map[string]any{"failed": out, "more": more})
	}
	t := table{head: []string{"ID", "STATUS", "AGE", "RETRIES", "CLASS", "TOPIC", "KEY", "TYPE"}, flex: []int{4, 5, 6, 7}}
	for _, r := range rows {
		status := r.Status
		if r.Held {
			status += ",held"
		}
		t.add(r.ID.String(), status, age(r.FailedAt, e.now()), strconv.Itoa(r.Retries), r.Class, r.Topic, r.Key, r.Type)
	}
	e.writeTable(t)
	if more {
		e.printf("There is more: --after %v\n", rows[len(rows)-1].ID)
	}
	return nil
}

func showCounts(e *env, counts []outboxops.FailureCount) error {
	type row struct {
		Kind   string    `json:"kind"`
		Relay  string    `json:"relay"`
		Status string    `json:"status"`
		Type   string    `json:"type"`
		Class  string    `json:"class"`
		Events int       `json:"events"`
		Oldest time.Time `json:"oldest"`
	}
	rows, total, least := make([]row, 0, len(counts)), 0, ""
	t := table{head: []string{"EVENTS", "STATUS", "CLASS", "OLDEST", "RELAY", "TYPE"}, flex: []int{2, 4, 5}}
	for _, c := range counts {
		rows = append(rows, row{string(c.Kind), c.Relay, c.Status, c.Type, c.Class, c.Events, c.Oldest.UTC()})
		t.add(countUpTo(c.Events), c.Status, c.Class, age(c.Oldest, e.now()), c.Relay, c.Type)
		total += c.Events
		if c.Events == outbox.MaxCounted {
			least = "at least "
		}
	}
	if e.json {
		return e.writeJSON(map[string]any{"total": total, "counts": rows})
	}
	if total > 0 {
		e.writeTable(t)
	}
	e.printf("%s%s in all\n", least, count(total))
	return nil
}

var failedShowCommand = command{
	name: "failed show", synopsis: "ID", min: 1, max: 1,
	summary: "one of them: error, payload, headers, what was done",
	about: `
Shows the event with its payload, which may be personal data: --no-payload
leaves it out. An ID is relay-17, or 17 for short.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		bare := fs.Bool("no-payload", false, "without payload and headers")
		return func(ctx context.Context, e *env) error { return failedShow(ctx, e, *bare) }
	},
}

// argID returns the first argument as the id of a failed event.
func (e *env) argID() (outboxops.FailureID, error) {
	var id failureID
	if err := id.Set(e.args[0]); err != nil {
		return outboxops.FailureID{}, usagef("%q is no id: outbox failed list shows them", e.args[0])
	}
	return id.FailureID, nil
}

func failedShow(ctx context.Context, e *env, bare bool) error {
	id, err := e.argID()
	if err != nil {
		return err
	}
	failed, err := e.failed(ctx)
	if err != nil {
		return err
	}
	row, err := failed.Get(ctx, id)
	if err != nil {
		return err
	}
	audit, err := failed.Audit(ctx, id, outboxops.AuditPage{Limit: 1000})
	if err != nil {
		return err
	}
	if bare {
		row.Payload, row.PayloadErr, row.Headers = nil, nil, nil
	}
	if e.json {
		out := failedOf(row)
		out.Payload, out.PayloadBase64 = body(row.Payload)
		out.PayloadError = errText(row.PayloadErr)
		for _, a := range audit {
			out.Audit = append(out.Audit, auditJSON{a.At.UTC(), a.Operator, a.Login, a.Action, a.Reason})
		}
		return e.writeJSON(out)
	}
	showEvent(e, row)
	for _, a := range audit {
		e.printf("%s  %s by %s: %s\n", clock(a.At), a.Action, who(a), visible(a.Reason))
	}
	return nil
}

// who is the operator, and the role that was logged in.
func who(a outboxops.AuditEntry) string {
	if a.Login == "" {
		return visible(a.Operator)
	}
	return fmt.Sprintf("%s (%s)", visible(a.Operator), visible(a.Login))
}

func showEvent(e *env, r outboxops.Failure) {
	status := r.Status
	if r.Held {
		status += ", its key is held"
	}
	fields := [][2]string{
		{"id", r.ID.String()}, {"status", status}, {"type", r.Type}, {"aggregate", r.AggregateType + "/" + r.AggregateID},
		{"topic", r.Topic}, {"key", r.Key}, {"event id", r.EventID}, {"outbox id", strconv.FormatInt(r.OutboxID, 10)}, {"source", r.Source},
		{"relay", r.Relay}, {"occurred", clock(r.OccurredAt)}, {"recorded", clock(r.CreatedAt)}, {"failed", clock(r.FailedAt)},
		{"retries", strconv.Itoa(r.Retries)},
	}
	if r.Status == outbox.StatusWaiting || r.Status == outbox.StatusFailed {
		fields = append(fields, [2]string{"next retry", clock(r.NextRetryAt)})
	}
	if r.Err != nil {
		fields = append(fields, [2]string{"class", r.Class}, [2]string{"error", short.Text(r.Err.Error(), maxText)})
	}
	if !r.ResolvedAt.IsZero() {
		fields = append(fields, [2]string{"resolved", clock(r.ResolvedAt) + " by " + r.ResolvedBy}, [2]string{"note", r.Resolution})
	}
	e.writeFields(fields)
	e.writeHeaders(r.Headers)
	e.printf("\n")
	e.writePayload(r.ContentType, r.Payload, r.PayloadErr)
}

// errText is the text of an error, if it is one.
func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// writeFields writes names and values below each other; what is long is wrapped.
func (e *env) writeFields(fields [][2]string) {
	const width = 11
	for _, f := range fields {
		for i, line := range wrap(visible(f[1]), max(e.width, usualWidth)-width) {
			name := ""
			if i == 0 {
				name = f[0]
			}
			e.printf("%s\n", strings.TrimRight(name+strings.Repeat(" ", width-len(name))+line, " "))
		}
	}
}

// writeHeaders writes headers below the fields of an event.
func (e *env) writeHeaders(headers map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		e.printf("header     %s: %s\n", visible(name), visible(headers[name]))
	}
}

// writePayload writes a payload, or why it could not be read.
func (e *env) writePayload(contentType string, payload []byte, reason error) {
	switch {
	case reason != nil:
		e.printf("%s\n\n", visible(reason.Error()))
	case payload != nil:
		e.printf("%s\n\n", payloadText(contentType, payload))
	}
}

// payloadText is a payload for people.
func payloadText(contentType string, payload []byte) string {
	var pretty bytes.Buffer
	if json.Indent(&pretty, payload, "", "  ") == nil {
		lines := strings.Split(pretty.String(), "\n")
		for i, line := range lines {
			lines[i] = visible(line)
		}
		return strings.Join(lines, "\n")
	}
	return count(len(payload)) + " bytes of " + visible(contentType) + " (--json has them)"
}
