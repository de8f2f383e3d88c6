package watch

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
)

// maxName is how much of a name an alert repeats, in bytes.
const maxName = 300

// name returns a text of an event, or of a table, for a sentence.
func name(text string) string { return short.Line(text, maxName) }

// String returns the alert as a sentence, which is one line.
func (a Alert) String() string {
	if a.Over {
		return a.subject() + a.overText()
	}
	switch a.Kind {
	case Dead:
		return fmt.Sprintf("%s%s died; %s are dead", a.subject(), counted(a.Died, "event"), orMore(a.Status.Dead, a.Status.Dead == tables.MaxCounted))
	case DeadDeliveries:
		n, _ := Sum(a.Counts)
		return fmt.Sprintf("%s%s given up; %s are dead", a.subject(), counted(a.Died, "delivery"), n)
	case ManyDead:
		n, _ := Sum(a.Counts)
		return fmt.Sprintf("%s dead events and deliveries wait for a decision: %s", n, listed(a.Counts))
	case Stale:
		n, oldest := Sum(a.Counts)
		return fmt.Sprintf("%s%s events are not %s, the oldest for %s: %s", a.subject(), n, a.goal(), a.At.Sub(oldest).Round(time.Second), listed(a.Counts))
	case NoLeader:
		return fmt.Sprintf("%sno process runs it, %s events wait", a.subject(), orMore(a.Status.Pending, a.Status.PendingMore))
	case Lost:
		return fmt.Sprintf("%sKafka has removed or lost %s of %s, which the group may lack", a.subject(), counted(int(a.Lost), "record"), name(a.Topic))
	case Breaker:
		return a.subject() + breakerText(a.Status.Said)
	case Report:
		_, oldest := Sum(a.Counts)
		return fmt.Sprintf("unresolved failures: %s; the oldest since %s", listed(a.Counts), oldest.UTC().Format(time.RFC3339))
	}
	return a.subject() + name(a.Kind)
}

func (a Alert) overText() string {
	isRemoved := a.Relay != "" && a.Status.Name == "" && a.Status.Holder == ""
	if isRemoved && (a.Kind == NoLeader || a.Kind == Breaker) {
		return "it is removed"
	}
	switch a.Kind {
	case ManyDead:
		n, _ := Sum(a.Counts)
		return n + " dead events and deliveries are left"
	case Stale:
		return "events no longer wait too long"
	case NoLeader:
		if _, ended := tables.HandedOver(a.Status.Holder); ended {
			return "it has ended by a cut"
		}
		return name(a.Status.Holder) + " leads"
	case Breaker:
		return "the circuit breaker is closed"
	default:
		return name(a.Kind) + " is over"
	}
}

// maxOutages is how many outages a sentence names.
const maxOutages = 3

// breakerText describes a breaker that is not closed by what the leader has said. Its row may be a second older than
// the state of the breaker.
func breakerText(said *tables.Said) string {
	text := "the circuit breaker is open"
	if said == nil {
		return text + ", Kafka fails"
	}
	if state, since := said.RelayBreaker(); state != breaker.Closed {
		text = fmt.Sprintf("the circuit breaker is %s, not closed since %s", state, since.UTC().Format(time.RFC3339))
	}
	var outages []string
	for _, o := range said.Outages[:min(len(said.Outages), maxOutages)] {
		outages = append(outages, fmt.Sprintf("%s has been failing since %s (%s)", name(o.What), o.Since.UTC().Format(time.RFC3339), name(o.Class)))
	}
	if more := len(said.Outages) + said.More - maxOutages; more > 0 {
		outages = append(outages, counted(more, "more outage"))
	}
	if len(outages) == 0 {
		return text + ", Kafka fails"
	}
	return text + ": " + strings.Join(outages, ", ")
}

// subject begins a sentence with the relay or the group that the alert is about.
func (a Alert) subject() string {
	switch {
	case a.Relay != "":
		return "relay " + name(a.Relay) + ": "
	case a.Group != "":
		return "consumer group " + name(a.Group) + ": "
	}
	return ""
}

// goal is what events wait for.
func (a Alert) goal() string {
	if a.Group != "" {
		return "handled"
	}
	return "published"
}

// Sum adds up counts, as a text, and returns the time of the oldest.
func Sum(counts []tables.EventCount) (n string, oldest time.Time) {
	events, more := 0, false
	for _, c := range counts {
		events, more = events+c.Events, more || c.More
		if oldest.IsZero() || c.Oldest.Before(oldest) {
			oldest = c.Oldest
		}
	}
	return orMore(int64(events), more), oldest
}

// maxListed is how many kinds of events a sentence names.
const maxListed = 20

// listed returns counts as a list.
func listed(counts []tables.EventCount) string {
	var parts []string
	for _, c := range counts[:min(len(counts), maxListed)] {
		parts = append(parts, orMore(int64(c.Events), c.More)+" "+kind(c))
	}
	if more := len(counts) - maxListed; more > 0 {
		parts = append(parts, counted(more, "more kind"))
	}
	return strings.Join(parts, ", ")
}

// kind is what the counted events have in common, except for the relay.
func kind(c tables.EventCount) string {
	parts := []string{name(c.Status), name(c.Type), name(c.Class)}
	if c.Group != "" {
		parts = append(parts, "for", name(c.Group), name(c.Action))
	}
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), " ")
}

// orMore writes a number, and whether there may be more.
func orMore(n int64, more bool) string {
	text := strconv.FormatInt(n, 10)
	if more {
		text += " or more"
	}
	return text
}

func counted(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "y"):
		return fmt.Sprintf("%d %sies", n, strings.TrimSuffix(what, "y"))
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// Log logs the alert: as ERROR, with a line for each event that died; as WARN if it is a report or says that
// something is over.
func (a Alert) Log(ctx context.Context, log *slog.Logger) {
	level := slog.LevelError
	if a.Over || a.Kind == Report {
		level = slog.LevelWarn
	}
	about := []any{"alert", a.Kind, "over", a.Over}
	if a.Relay != "" {
		about = append(about, "dead", a.Status.Dead, "pending", a.Status.Pending)
	}
	log.Log(ctx, level, "outbox: "+a.String(), about...)
	for _, e := range a.Dead {
		what, about := "event", []any{"failed_id", e.ID}
		if e.Group != "" {
			what, about = "delivery", []any{"delivery_id", e.ID, "group", name(e.Group), "action", name(e.Action)}
		}
		if e.OutboxID != 0 { // of an event from Kafka it is not known
			about = append(about, "id", e.OutboxID)
		}
		log.Log(ctx, level, "outbox: "+what+" is dead", append(about, "event_id", name(e.EventID), "type", name(e.Type),
			"aggregate_type", name(e.AggregateType), "aggregate_id", name(e.AggregateID), "retries", e.Retries, "class", name(e.Class),
			"error", oneLine(e.Err), "failed_at", e.FailedAt)...)
	}
}

// oneLine returns an error whose text is one line.
func oneLine(err error) error {
	if err == nil {
		return nil
	}
	return lineError{err}
}

type lineError struct{ error }

func (e lineError) Error() string { return short.Line(e.error.Error(), short.MaxText) }
func (e lineError) Unwrap() error { return e.error }
