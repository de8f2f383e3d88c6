package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/watch"
)

// MonitorConfig tunes a [Monitor]. The zero value is ready for production.
type MonitorConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Alerts has thresholds and receivers of alerts.
	Alerts outbox.AlertConfig
	// Logger receives failures of the monitor itself, and the alerts if there is no Alerter. Nil means slog.Default().
	Logger *slog.Logger
}

// Monitor sends alerts about the relays and consumer groups of a schema, from the state of the database. It knows a
// breaker by what the leader has said, see [outbox.RelayStatus].
//
// Relays that lead send alerts themselves, and workers do if no relay leads. A monitor is for processes that run
// neither, so that alerts are sent even if no relay and no worker runs. If several monitors run, each sends alerts.
type Monitor struct {
	watch   *watch.Watch
	log     *slog.Logger
	running atomic.Bool
}

// NewMonitor returns a monitor of the relays in db. It does no I/O; closing db stays
// with the caller. The error names every bad field.
func NewMonitor(db *pgxpool.Pool, cfg MonitorConfig) (*Monitor, error) {
	cfg.Logger = short.Logger(cmp.Or(cfg.Logger, slog.Default()))
	settings := settingsOf(cfg.Alerts)
	if err := errors.Join(checkDB(db, &cfg.Schema), settings.Validate()); err != nil {
		return nil, fmt.Errorf("outbox: monitor config: %w", err)
	}
	alerter := cfg.Alerts.Alerter
	if alerter == nil {
		alerter = outbox.LogAlerter{Logger: cfg.Logger}
	}
	rules := watch.Config{
		Settings: settings,
		Deliver:  func(ctx context.Context, a watch.Alert) error { return alerter.Alert(ctx, alertOf(a)) },
		Logger:   cfg.Logger,
	}
	if to, ok := alerter.(interface {
		Resolve(ctx context.Context, a outbox.Alert) error
	}); ok {
		rules.Resolve = func(ctx context.Context, a watch.Alert) error { return to.Resolve(ctx, alertOf(a)) }
	}
	return &Monitor{log: cfg.Logger, watch: watch.New(watch.NewStore(db, cfg.Schema), rules)}, nil
}

func settingsOf(c outbox.AlertConfig) watch.Settings {
	return watch.Settings{
		Interval: c.Interval, ReportInterval: c.ReportInterval, DeadThreshold: c.DeadThreshold, StaleAfter: c.StaleAfter, StalePending: c.StalePending,
	}.WithDefaults()
}

func alertOf(a watch.Alert) outbox.Alert {
	alert := outbox.Alert{Kind: outbox.AlertKind(a.Kind), Relay: a.Relay, Over: a.Over, At: a.At, Status: relayStatusOf(a.Status), Died: a.Died,
		Group: a.Group, Topic: a.Topic, Lost: a.Lost, FirstAt: a.FirstAt}
	for _, d := range a.Dead {
		alert.Dead = append(alert.Dead, outbox.DeadEvent{FailedEvent: outbox.FailedEvent(d.Event), ID: d.ID, Group: d.Group, Action: d.Action, FailedAt: d.FailedAt})
	}
	for _, c := range a.Counts {
		alert.Counts = append(alert.Counts, outbox.EventCount(c))
	}
	return alert
}

// Run checks and alerts until ctx is cancelled; then it returns nil. A second call at
// the same time returns [outbox.ErrRunning]. Outages of PostgreSQL are waited out and
// logged; [outbox.ErrNotMigrated] is returned.
func (m *Monitor) Run(ctx context.Context) error {
	if !m.running.CompareAndSwap(false, true) {
		return fmt.Errorf("outbox: monitor: %w", outbox.ErrRunning)
	}
	defer m.running.Store(false)
	postgres := outage.NewLog(m.log, "PostgreSQL, for the monitor,")
	for ctx.Err() == nil {
		err := m.watch.Check(ctx)
		if pg.IsUndefined(err) {
			return fmt.Errorf("outbox: monitor: %w", orNotMigrated(err))
		}
		pause := m.watch.Interval()
		if ctx.Err() == nil {
			postgres.Report(err)
		}
		if err != nil {
			pause = min(pause, postgres.Backoff())
		}
		wait.Sleep(ctx, pause)
	}
	return nil
}
