package outbox

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/watch"
)

// Alerter passes alerts on to operators. There are [LogAlerter] and, in the package
// outboxalert, those for Slack, PagerDuty and mail. After an error, which is logged, the alert
// comes again at the next check.
type Alerter interface {
	Alert(ctx context.Context, a Alert) error
}

// AlertKind is what an alert is about.
type AlertKind string

const (
	// AlertDead means that events died: Kafka refused them once too often.
	AlertDead AlertKind = "dead_events"
	// AlertDeadDeliveries means that a consumer group has given up deliveries: a handler
	// failed once too often, or there is none.
	AlertDeadDeliveries AlertKind = "dead_deliveries"
	// AlertManyDead means that AlertConfig.DeadThreshold or more events and deliveries are dead
	// and wait for an operator, in the whole database. It comes again when there are more.
	AlertManyDead AlertKind = "many_dead"
	// AlertStale means that events of a relay, or of a consumer group, wait for longer than they
	// should, wherever that is.
	AlertStale AlertKind = "stale_events"
	// AlertNoLeader means that no process runs a relay that has a cursor.
	AlertNoLeader AlertKind = "no_leader"
	// AlertBreaker means that a relay's circuit breaker is open, because Kafka fails.
	AlertBreaker AlertKind = "breaker_open"
	// AlertLost means that Kafka had removed records of a topic before a consumer group
	// read them, because of the topic's retention.
	AlertLost AlertKind = "lost_records"
	// AlertReport comes every AlertConfig.ReportInterval with what has failed and is not
	// resolved in the whole database, if there is something.
	AlertReport AlertKind = "report"
)

// Alert is one thing that an operator should know.
type Alert struct {
	// Kind says what it is about.
	Kind AlertKind
	// Relay is the name of the relay. Empty if it is about a consumer group, or about
	// the whole database.
	Relay string
	// Group is the name of the consumer group. Empty if it is about a relay, or about
	// the whole database.
	Group string
	// Over is set when what an earlier alert was about is over.
	Over bool
	// At is when the check found it.
	At time.Time
	// Status is the state of Relay.
	Status RelayStatus
	// Died is how many events or deliveries have died, and Dead the first of them, at most 20. Of
	// [AlertDead] and [AlertDeadDeliveries] only.
	Died int
	// Dead are some of those that died.
	Dead []DeadEvent
	// Counts is how many events and deliveries it is about, by type. [AlertStale]: those that
	// wait for too long; [AlertManyDead] and [AlertDeadDeliveries]: all that are dead and nobody has
	// resolved; [AlertReport]: these, and what is tried again.
	Counts []EventCount
	// Topic is that of which Group lost records, and Lost how many so far: how many
	// offsets are gone, which are not fewer than there were records. Of [AlertLost] only.
	Topic string
	// Lost is in records.
	Lost int64
}

// DeadEvent is an event that has died, or a delivery that was given up, as an alert shows it.
// Of a delivery, Retries and Class are those of its attempts, and Topic is its stream.
type DeadEvent struct {
	FailedEvent

	// ID is outbox_failed.id, or of a delivery event_delivery.id. The package outboxops and the
	// command outbox name it with the kind: event-17, delivery-17.
	ID int64
	// Group and Action say whose delivery it is; empty for an event of a relay.
	Group, Action string
	// FailedAt is when an event failed first, or a delivery was given up.
	FailedAt time.Time
}

// EventCount is how many events or deliveries are alike, as an alert shows it.
type EventCount struct {
	// Relay is the relay whose events they are; empty for those of a consumer group.
	Relay string
	// Group and Action say for whom deliveries are; empty for events of a relay. Action is also
	// empty for what the group's workers have not looked at yet.
	Group, Action string
	// Status is one of the constants, [StatusDead] for example, or pending for what is in
	// outbox and was not attempted. A delivery is [StatusFailed] once an attempt has failed, and
	// [StatusWaiting] until then.
	Status string
	// Type is the CloudEvents type, and Class that of the last error; empty without one.
	Type, Class string
	// Events is how many there are, of each kind counted up to [MaxCounted].
	Events int
	// Oldest is when the first of them failed; of a delivery, when its row was made; of what
	// waits for too long, when it was recorded.
	Oldest time.Time
}

// String returns the alert as a sentence.
func (a Alert) String() string {
	if a.Over {
		return a.subject() + a.overText()
	}
	s := a.Status
	switch a.Kind {
	case AlertDead:
		return fmt.Sprintf("%s%s died; %s are dead", a.subject(), counted(a.Died, "event"), upTo(s.Dead))
	case AlertDeadDeliveries:
		n, _ := sum(a.Counts)
		return fmt.Sprintf("%s%s given up; %s are dead", a.subject(), counted(a.Died, "delivery"), n)
	case AlertManyDead:
		n, _ := sum(a.Counts)
		return fmt.Sprintf("%s dead events and deliveries wait for a decision: %s", n, listed(a.Counts))
	case AlertStale:
		n, oldest := sum(a.Counts)
		return fmt.Sprintf("%s%s events are not %s, the oldest for %s: %s", a.subject(), n, a.goal(), a.At.Sub(oldest).Round(time.Second), listed(a.Counts))
	case AlertNoLeader:
		return fmt.Sprintf("%sno process runs it, %d events wait", a.subject(), s.Pending)
	case AlertLost:
		return fmt.Sprintf("%sKafka has removed %s of %s before the group read them", a.subject(), counted(int(a.Lost), "record"), a.Topic)
	case AlertBreaker:
		return a.subject() + "the circuit breaker is open, Kafka fails"
	case AlertReport:
		_, oldest := sum(a.Counts)
		return fmt.Sprintf("unresolved failures: %s; the oldest since %s", listed(a.Counts), oldest.UTC().Format(time.RFC3339))
	}
	return a.subject() + string(a.Kind)
}

func (a Alert) overText() string {
	switch a.Kind {
	case AlertManyDead:
		n, _ := sum(a.Counts)
		return n + " dead events and deliveries are left"
	case AlertStale:
		return "events no longer wait too long"
	case AlertNoLeader:
		return a.Status.Holder + " leads"
	case AlertBreaker:
		return "the circuit breaker has closed"
	default:
		return string(a.Kind) + " is over"
	}
}

// subject returns whom the alert is about, to begin a sentence.
func (a Alert) subject() string {
	switch {
	case a.Relay != "":
		return "relay " + a.Relay + ": "
	case a.Group != "":
		return "consumer group " + a.Group + ": "
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

// sum adds up counts, as a text, and returns the time of the oldest.
func sum(counts []EventCount) (n string, oldest time.Time) {
	events, more := 0, ""
	for _, c := range counts {
		events += c.Events
		if c.Events == MaxCounted {
			more = " or more"
		}
		if oldest.IsZero() || c.Oldest.Before(oldest) {
			oldest = c.Oldest
		}
	}
	return strconv.Itoa(events) + more, oldest
}

// maxListed is how many kinds of events a sentence names.
const maxListed = 20

// listed returns counts as a list.
func listed(counts []EventCount) string {
	var parts []string
	for _, c := range counts[:min(len(counts), maxListed)] {
		parts = append(parts, upTo(int64(c.Events))+" "+c.kind())
	}
	if more := len(counts) - maxListed; more > 0 {
		parts = append(parts, counted(more, "more kind"))
	}
	return strings.Join(parts, ", ")
}

// kind is what the events have in common, but for the relay.
func (c EventCount) kind() string {
	parts := []string{c.Status, c.Type, c.Class}
	if c.Group != "" {
		parts = append(parts, "for", c.Group, c.Action)
	}
	return strings.Join(slices.DeleteFunc(parts, func(part string) bool { return part == "" }), " ")
}

// upTo writes a number that is counted up to [MaxCounted].
func upTo(n int64) string {
	if n == MaxCounted {
		return strconv.Itoa(MaxCounted) + " or more"
	}
	return strconv.FormatInt(n, 10)
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

// AlertConfig says when alerts are sent, and to whom. The zero value is ready for
// production: it logs them.
type AlertConfig struct {
	// Alerter gets the alerts. Nil means a [LogAlerter] on the logger. A relay then
	// leaves out dead events and the breaker, a worker dead deliveries, and a consumer these and lost
	// records, because they log these themselves.
	Alerter Alerter
	// Interval is the time between two checks. A relay also checks when an event dies
	// and when its breaker changes. Zero means 1 min.
	Interval time.Duration
	// ReportInterval is the time between two reports of what has failed and is not
	// resolved; [Forever] means none. Zero means 10 min.
	ReportInterval time.Duration
	// DeadThreshold is how many unresolved dead events and deliveries of the database are an
	// alert of their own. At most [MaxCounted]. Zero means 10.
	DeadThreshold int
	// StaleAfter is how long events may wait, from when they were recorded until they are
	// published or handled. When StalePending of a relay or a consumer group have waited for
	// longer there is an alert, and the relay is not ready. Zero means 5 min.
	StaleAfter time.Duration
	// StalePending is how many events must have waited for longer than StaleAfter for this
	// alert. Zero means 100.
	StalePending int
}

func (c AlertConfig) settings() watch.Settings {
	return watch.Settings{
		Interval: c.Interval, ReportInterval: c.ReportInterval, DeadThreshold: c.DeadThreshold, StaleAfter: c.StaleAfter, StalePending: c.StalePending,
	}
}

// LogAlerter logs alerts: as ERROR what is wrong, with a line for each event that died,
// and as WARN reports and what is over.
type LogAlerter struct {
	// Logger gets the lines. Nil means slog.Default().
	Logger *slog.Logger

	without []AlertKind // what the owner logs itself
}

// Alert implements [Alerter]. It never fails.
func (l LogAlerter) Alert(ctx context.Context, a Alert) error {
	if slices.Contains(l.without, a.Kind) {
		return nil
	}
	level := slog.LevelError
	if a.Over || a.Kind == AlertReport {
		level = slog.LevelWarn
	}
	log := short.Logger(cmp.Or(l.Logger, slog.Default()))
	log.Log(ctx, level, "outbox: "+a.String(), "alert", string(a.Kind), "over", a.Over, "dead", a.Status.Dead, "pending", a.Status.Pending)
	for _, e := range a.Dead {
		what, about := "event", []any{"failed_id", e.ID}
		if e.Group != "" {
			what, about = "delivery", []any{"delivery_id", e.ID, "group", e.Group, "action", e.Action}
		}
		log.Log(ctx, level, "outbox: "+what+" is dead", append(about, "id", e.OutboxID, "event_id", e.EventID, "type", e.Type,
			"aggregate_type", e.AggregateType, "aggregate_id", e.AggregateID, "retries", e.Retries, "class", e.Class, "error", e.Err,
			"failed_at", e.FailedAt)...)
	}
	return nil
}
