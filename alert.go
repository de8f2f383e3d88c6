package outbox

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/watch"
)

// Alerter passes alerts on to operators. There are [LogAlerter] and, in the package
// outboxalert, those for Slack, PagerDuty and mail. After an error, which is logged, the alert
// comes again at the next check.
//
// Another process that leads next does not know which alerts were not delivered. It alerts to every condition that
// holds, and to events and deliveries that died, and records that were lost, within AlertConfig.Interval before it led
// (in a group: plus two leases). [AlertManyDead] and [AlertReport] count what died earlier.
//
// A process does not know which alerts another one has begun that led before. An Alerter that also has a method
// Resolve, with the same parameters and result, gets once in each term what does not hold, with Over set, whether it
// has begun or not. PagerDuty resolves incidents by that; the others do not hear of it.
type Alerter interface {
	Alert(ctx context.Context, a Alert) error
}

// resolver is an [Alerter] that gets ends of what other processes may have begun.
type resolver interface {
	Resolve(ctx context.Context, a Alert) error
}

// AlertKind is what an alert is about.
type AlertKind string

const (
	// AlertDead means that events died: Kafka refused them once too often.
	AlertDead AlertKind = "dead_events"
	// AlertDeadDeliveries means that deliveries of a consumer group are dead: a handler failed once
	// too often, or there is none.
	AlertDeadDeliveries AlertKind = "dead_deliveries"
	// AlertManyDead means that AlertConfig.DeadThreshold or more events and deliveries are dead
	// and wait for an operator, in the whole database. It comes again when there are more. Workers and consumers do not
	// see dead events, so they do not end it where a relay may lead.
	AlertManyDead AlertKind = "many_dead"
	// AlertStale means that events of a relay, or of a consumer group, wait for longer than they
	// should, wherever that is.
	AlertStale AlertKind = "stale_events"
	// AlertNoLeader means that no process runs a relay that has a cursor.
	AlertNoLeader AlertKind = "no_leader"
	// AlertBreaker means that a relay's circuit breaker is open, because Kafka fails. The Outages of Status.Said name
	// the classes of errors. It is over when the breaker is known to be closed.
	AlertBreaker AlertKind = "breaker_open"
	// AlertLost means that Kafka had removed records of a topic before a consumer group
	// read them, because of the topic's retention, or has lost records with a broker.
	AlertLost AlertKind = "lost_records"
	// AlertReport comes every AlertConfig.ReportInterval with the unresolved events and deliveries
	// of the whole database, if there are any.
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
	// At is when the check found it, by the clock of the database.
	At time.Time
	// FirstAt is At of the first try. An alert that comes again after an error has the same FirstAt, unless it has
	// become worse meanwhile, as by a later death; then it is a new alert.
	FirstAt time.Time
	// Status is the state of Relay. It is zero if the relay is removed.
	Status RelayStatus
	// Died is how many events or deliveries have died, and Dead the first of them, at most 20. Of
	// [AlertDead] and [AlertDeadDeliveries] only.
	Died int
	// Dead are some of those that died.
	Dead []DeadEvent
	// Counts is how many events and deliveries it is about, by type. [AlertStale]: those that wait
	// for too long. [AlertManyDead] and [AlertDeadDeliveries]: all dead ones that are not resolved.
	// [AlertReport]: the same, and those that are retried.
	Counts []EventCount
	// Topic is the topic of which Group lost records. Lost is how many offsets are gone so far,
	// which is at least the number of records. Of [AlertLost] only.
	Topic string
	// Lost is in records.
	Lost int64
}

// String returns the alert as a sentence.
func (a Alert) String() string { return a.engine().String() }

// engine returns the alert as the engine has it.
func (a Alert) engine() watch.Alert {
	alert := watch.Alert{Kind: string(a.Kind), Relay: a.Relay, Group: a.Group, Over: a.Over, At: a.At, Status: a.Status.engine(), Died: a.Died,
		Topic: a.Topic, Lost: a.Lost, FirstAt: a.FirstAt}
	for _, d := range a.Dead {
		alert.Dead = append(alert.Dead, watch.DeadEvent{Event: tables.Event(d.FailedEvent), ID: d.ID, Group: d.Group, Action: d.Action, FailedAt: d.FailedAt})
	}
	for _, c := range a.Counts {
		alert.Counts = append(alert.Counts, tables.EventCount(c))
	}
	return alert
}

// alertOf returns an alert of the engine.
func alertOf(a watch.Alert) Alert {
	alert := Alert{Kind: AlertKind(a.Kind), Relay: a.Relay, Group: a.Group, Over: a.Over, At: a.At, Status: relayStatusOf(a.Status), Died: a.Died,
		Topic: a.Topic, Lost: a.Lost, FirstAt: a.FirstAt}
	for _, d := range a.Dead {
		alert.Dead = append(alert.Dead, DeadEvent{FailedEvent: FailedEvent(d.Event), ID: d.ID, Group: d.Group, Action: d.Action, FailedAt: d.FailedAt})
	}
	for _, c := range a.Counts {
		alert.Counts = append(alert.Counts, EventCount(c))
	}
	return alert
}

// AlertConfig says when alerts are sent, and to whom. The zero value logs them.
type AlertConfig struct {
	// Alerter gets the alerts. Nil means a [LogAlerter], except for alerts that the process logs anyway.
	Alerter Alerter
	// Interval is the time between checks. Zero means 1 min.
	Interval time.Duration
	// ReportInterval is the time between reports of unresolved events and deliveries; [Forever] means none. Zero
	// means 10 min.
	ReportInterval time.Duration
	// DeadThreshold is how many unresolved dead events and deliveries cause an alert, at most [MaxCounted]. Zero means
	// 10.
	DeadThreshold int
	// StaleAfter is the age at which a waiting event is stale. StalePending stale events of a relay or group cause an
	// alert, and the leader's [Relay.Health] says that it does not work. Zero means 5 min.
	StaleAfter time.Duration
	// StalePending is how many stale events cause an alert. Zero means 100.
	StalePending int
}

func (c AlertConfig) settings() watch.Settings {
	return watch.Settings{
		Interval: c.Interval, ReportInterval: c.ReportInterval, DeadThreshold: c.DeadThreshold, StaleAfter: c.StaleAfter, StalePending: c.StalePending,
	}
}

// rules returns the configuration as the engine takes it.
func (c AlertConfig) rules(log *slog.Logger) watch.Config {
	rules := watch.Config{Settings: c.settings().WithDefaults(), Logger: log, Deliver: func(ctx context.Context, a watch.Alert) error {
		return c.Alerter.Alert(ctx, alertOf(a))
	}}
	if to, ok := c.Alerter.(resolver); ok {
		rules.Resolve = func(ctx context.Context, a watch.Alert) error { return to.Resolve(ctx, alertOf(a)) }
	}
	return rules
}

// groupAlerts returns what alerts in the process that has the lease of a group, see [lease.Role].
func (c AlertConfig) groupAlerts(store watch.Store, group string, consumes bool, lasts time.Duration, log *slog.Logger) func(context.Context) {
	rules := c.rules(log)
	rules.Group, rules.Consumes, rules.Takeover = group, consumes, watch.Takeover(lasts)
	monitor := watch.NewMonitor(store, rules, log, nil)
	return func(ctx context.Context) {
		monitor.Lead(lease.EpochOf(ctx))
		monitor.Run(ctx)
	}
}

// LogAlerter logs alerts. An alert is an ERROR, with a line for each event that died. Reports and
// ends of alerts are a WARN.
type LogAlerter struct {
	// Logger gets the lines. Nil means slog.Default().
	Logger *slog.Logger

	without []AlertKind // kinds that the owner logs itself
}

// Alert implements [Alerter]. It never fails.
func (l LogAlerter) Alert(ctx context.Context, a Alert) error {
	if slices.Contains(l.without, a.Kind) {
		return nil
	}
	a.engine().Log(ctx, short.Logger(cmp.Or(l.Logger, slog.Default())))
	return nil
}
