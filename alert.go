package outbox

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/watch"
)

// Alerter passes alerts on to operators. There are [LogAlerter] and, in the package
// outboxhttp, one for Slack's webhooks; your own may send mail or page the operator on
// duty. After an error, which is logged, the alert comes again at the next check.
type Alerter interface {
	Alert(ctx context.Context, a Alert) error
}

// AlertKind is what an alert is about.
type AlertKind string

const (
	// AlertDead means that events died: Kafka refused them once too often.
	AlertDead AlertKind = "dead_events"
	// AlertManyDead means that AlertConfig.DeadThreshold or more events are dead and wait
	// for an operator. It comes again when there are more, until there are [MaxCounted].
	AlertManyDead AlertKind = "many_dead_events"
	// AlertStale means that events wait to be published for longer than they should.
	AlertStale AlertKind = "stale_events"
	// AlertNoLeader means that no process runs a relay that has a cursor.
	AlertNoLeader AlertKind = "no_leader"
	// AlertBreaker means that a relay's circuit breaker is open, because Kafka fails.
	AlertBreaker AlertKind = "breaker_open"
	// AlertLost means that Kafka had removed records of a topic before a consumer group
	// read them, because of the topic's retention.
	AlertLost AlertKind = "lost_records"
	// AlertReport comes every AlertConfig.ReportInterval with what has failed and is not
	// resolved, if there is something.
	AlertReport AlertKind = "report"
)

// Alert is one thing that an operator should know.
type Alert struct {
	// Kind says what it is about.
	Kind AlertKind
	// Relay is the name of the relay. Empty for [AlertLost].
	Relay string
	// Over is set when what an earlier alert was about is over.
	Over bool
	// At is when the check found it.
	At time.Time
	// Status is the state of the relay.
	Status RelayStatus
	// Died is how many events have died, and Dead the first of them, at most 20. Of
	// [AlertDead] only.
	Died int
	// Dead are some of those that died.
	Dead []DeadEvent
	// Unresolved is what has failed and is not resolved, by status, type and class. Of
	// [AlertReport] only.
	Unresolved []FailedCount
	// Group and Topic say which consumer group lost records of which topic, and Lost how
	// many so far: how many offsets are gone, which are not fewer than there were records.
	// Of [AlertLost] only.
	Group, Topic string
	// Lost is in records.
	Lost int64
}

// DeadEvent is an event that has died, as an alert shows it.
type DeadEvent struct {
	FailedEvent

	// ID is outbox_failed.id. The package outboxops and the command outbox name the
	// event by it: event-17.
	ID int64
	// FailedAt is when it failed first.
	FailedAt time.Time
}

// FailedCount is how many events have failed alike, as an alert shows it.
type FailedCount struct {
	// Relay, Status, Type and Class are what they have in common. Class is empty for
	// what is parked.
	Relay, Status, Type, Class string
	// Events is how many there are, counted up to [MaxCounted].
	Events int
	// Oldest is when the first of them failed.
	Oldest time.Time
}

// String returns the alert as a sentence.
func (a Alert) String() string {
	s := a.Status
	switch {
	case a.Over && a.Kind == AlertManyDead:
		return fmt.Sprintf("relay %s: %s dead events are left", a.Relay, upTo(s.Dead))
	case a.Over && a.Kind == AlertStale:
		return fmt.Sprintf("relay %s: events no longer wait too long", a.Relay)
	case a.Over && a.Kind == AlertNoLeader:
		return fmt.Sprintf("relay %s: %s leads", a.Relay, s.Holder)
	case a.Over:
		return fmt.Sprintf("relay %s: the circuit breaker has closed", a.Relay)
	case a.Kind == AlertDead:
		return fmt.Sprintf("relay %s: %s died; %s are dead", a.Relay, counted(a.Died, "event"), upTo(s.Dead))
	case a.Kind == AlertManyDead:
		return fmt.Sprintf("relay %s: %s dead events wait for a decision", a.Relay, upTo(s.Dead))
	case a.Kind == AlertStale:
		more := ""
		if s.PendingMore {
			more = "more than "
		}
		return fmt.Sprintf("relay %s: %s%d events are not published, the oldest for %s", a.Relay, more, s.Pending, a.At.Sub(s.Oldest).Round(time.Second))
	case a.Kind == AlertNoLeader:
		return fmt.Sprintf("relay %s: no process runs it, %d events wait", a.Relay, s.Pending)
	case a.Kind == AlertLost:
		return fmt.Sprintf("consumer group %s: Kafka has removed %s of %s before the group read them", a.Group, counted(int(a.Lost), "record"), a.Topic)
	case a.Kind == AlertBreaker:
		return fmt.Sprintf("relay %s: the circuit breaker is open, Kafka fails", a.Relay)
	}
	return fmt.Sprintf("relay %s: %s", a.Relay, a.report())
}

func (a Alert) report() string {
	var parts []string
	var oldest time.Time
	for _, c := range a.Unresolved {
		parts = append(parts, fmt.Sprintf("%s %s %s", upTo(int64(c.Events)), c.Status, strings.TrimSpace(c.Type+" "+c.Class)))
		if oldest.IsZero() || c.Oldest.Before(oldest) {
			oldest = c.Oldest
		}
	}
	return fmt.Sprintf("failed events: %s; the oldest since %s", strings.Join(parts, ", "), oldest.UTC().Format(time.RFC3339))
}

// upTo writes a number that is counted up to [MaxCounted].
func upTo(n int64) string {
	if n == MaxCounted {
		return strconv.Itoa(MaxCounted) + " or more"
	}
	return strconv.FormatInt(n, 10)
}

func counted(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// AlertConfig says when alerts are sent, and to whom. The zero value is ready for
// production: it logs them.
type AlertConfig struct {
	// Alerter gets the alerts. Nil means a [LogAlerter] on the logger. A relay then
	// leaves out dead events and the breaker, because it logs these itself.
	Alerter Alerter
	// Interval is the time between two checks. A relay also checks when an event dies
	// and when its breaker changes. Zero means 1 min.
	Interval time.Duration
	// ReportInterval is the time between two reports of what has failed and is not
	// resolved; [Forever] means none. Zero means 10 min.
	ReportInterval time.Duration
	// DeadThreshold is how many unresolved dead events of a relay are an alert of
	// their own. At most [MaxCounted]. Zero means 10.
	DeadThreshold int
	// StaleAfter is how long the oldest of at least StalePending pending events may
	// wait before there is an alert. Zero means 5 min.
	StaleAfter time.Duration
	// StalePending is how many events must be pending for this alert. Zero means 100.
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

	quiet bool // without dead events and the breaker
}

// Alert implements [Alerter]. It never fails.
func (l LogAlerter) Alert(ctx context.Context, a Alert) error {
	if l.quiet && (a.Kind == AlertDead || a.Kind == AlertBreaker) {
		return nil
	}
	level := slog.LevelError
	if a.Over || a.Kind == AlertReport {
		level = slog.LevelWarn
	}
	log := short.Logger(cmp.Or(l.Logger, slog.Default()))
	log.Log(ctx, level, "outbox: "+a.String(), "alert", string(a.Kind), "over", a.Over, "dead", a.Status.Dead, "pending", a.Status.Pending)
	for _, e := range a.Dead {
		log.Log(ctx, level, "outbox: event is dead", "failed_id", e.ID, "id", e.OutboxID, "event_id", e.EventID, "type", e.Type,
			"aggregate_type", e.AggregateType, "aggregate_id", e.AggregateID, "retries", e.Retries, "class", e.Class, "error", e.Err,
			"failed_at", e.FailedAt)
	}
	return nil
}
