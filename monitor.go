package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// MonitorConfig tunes a [Monitor]. The zero value is ready for production.
type MonitorConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Alerts says when somebody is told, and who.
	Alerts AlertConfig
	// Logger receives trouble of the monitor's own, and the alerts unless there is an
	// Alerter. Nil means slog.Default().
	Logger *slog.Logger
}

// Monitor alerts to what is wrong with the relays of a schema, as far as the
// database knows: all but [AlertBreaker]. A relay that leads alerts by itself, to its
// own name; a monitor is for processes that run none, so that somebody is told even
// when no relay runs any more. Where several monitors run, each alerts.
type Monitor struct {
	w       *watch
	log     *slog.Logger
	running atomic.Bool
}

// NewMonitor returns a monitor of the relays in db. It does no I/O; closing db stays
// with the caller. The error names every bad field.
func NewMonitor(db *pgxpool.Pool, cfg MonitorConfig) (*Monitor, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	cfg.Alerts = cfg.Alerts.withDefaults()
	cfg.Logger = cmp.Or(cfg.Logger, slog.Default())
	err := errors.Join(check.Schema(cfg.Schema), cfg.Alerts.validate())
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: monitor config: %w", err)
	}
	if cfg.Alerts.Alerter == nil {
		cfg.Alerts.Alerter = LogAlerter{Logger: cfg.Logger}
	}
	return &Monitor{w: newWatch(db, cfg.Schema, cfg.Alerts, cfg.Logger), log: cfg.Logger}, nil
}

// Run checks and alerts until ctx is cancelled; then it returns nil. A second call at
// the same time returns [ErrRunning]. Outages of PostgreSQL are waited out and told
// to the log; [ErrNotMigrated] is returned.
func (m *Monitor) Run(ctx context.Context) error {
	if !m.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer m.running.Store(false)
	postgres := outage.NewLog(m.log, "PostgreSQL, for the monitor,")
	for ctx.Err() == nil {
		err := m.w.check(ctx)
		if pg.IsUndefined(err) {
			return fmt.Errorf("%w: %w", ErrNotMigrated, err)
		}
		pause := m.w.cfg.Interval
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

// watch compares how relays stand with what was told. It belongs to one goroutine.
type watch struct {
	cfg       AlertConfig
	log       *slog.Logger
	inspector *Inspector
	failed    *FailedEvents
	sqlDied   string

	own     string              // the relay whose process this is; empty: all
	breaker func() BreakerState // of own; nil: not known

	told     map[alertKey]RelayStatus // what is wrong, as it was told
	died     map[int64]time.Time      // rows that were told, and when they died
	began    time.Time                // by the clock of the database, as the next
	since    time.Time                // from when on deaths may not be told yet
	idle     map[string]bool          // relays that nobody led at the last check
	reportAt time.Time
}

type alertKey struct {
	kind  AlertKind
	relay string
}

func newWatch(db *pgxpool.Pool, schema string, cfg AlertConfig, log *slog.Logger) *watch {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &watch{
		cfg: cfg, log: log,
		inspector: &Inspector{db: db, sql: inspectorSQL{relays: in(sqlRelays)}},
		failed:    &FailedEvents{db: db, sql: failedSQL{count: in(sqlFailedCount)}},
		sqlDied:   in(sqlDied),
		told:      map[alertKey]RelayStatus{}, died: map[int64]time.Time{}, idle: map[string]bool{},
		reportAt: time.Now().Add(min(cfg.ReportInterval, defaultReports)),
	}
}

// check looks once, and alerts to what has changed. Its error is PostgreSQL's.
func (w *watch) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	relays, err := w.inspector.Relays(ctx)
	if err != nil {
		return err
	}
	first := slices.IndexFunc(relays, func(r RelayStatus) bool { return r.Holder != "" })
	for i, r := range relays {
		if w.own == "" || w.own == r.Name {
			w.judge(ctx, r)
		}
		// Of several relays that lead, one tells of those that nobody leads.
		if w.own == "" || first >= 0 && relays[first].Name == w.own && i != first {
			w.judgeLeader(ctx, r)
		}
	}
	if err := w.tellDead(ctx, relays); err != nil {
		return err
	}
	return w.report(ctx, relays)
}

func (w *watch) judge(ctx context.Context, r RelayStatus) {
	now := time.Now()
	w.turn(ctx, AlertManyDead, r, r.Dead >= int64(w.cfg.DeadThreshold), func(before RelayStatus) bool { return r.Dead > before.Dead })
	w.turn(ctx, AlertStale, r, r.Pending >= int64(w.cfg.StalePending) && now.Sub(r.Oldest) > w.cfg.StaleAfter, nil)
	if w.breaker != nil {
		w.turn(ctx, AlertBreaker, r, w.breaker() != BreakerClosed, nil)
	}
}

// judgeLeader takes two checks without a leader, because a standby needs a moment
// to take over.
func (w *watch) judgeLeader(ctx context.Context, r RelayStatus) {
	nobody := r.Holder == "" && !r.MovedAt.IsZero()
	w.turn(ctx, AlertNoLeader, r, nobody && w.idle[r.Name], nil)
	w.idle[r.Name] = nobody
}

// turn alerts when something becomes wrong, when it becomes worse, and when it is
// over.
func (w *watch) turn(ctx context.Context, kind AlertKind, r RelayStatus, wrong bool, worse func(before RelayStatus) bool) {
	key := alertKey{kind, r.Name}
	before, was := w.told[key]
	again := wrong && was && worse != nil && worse(before)
	if wrong == was && !again {
		return
	}
	switch told := w.alert(ctx, Alert{Kind: kind, Relay: r.Name, Over: !wrong, Status: r}); {
	case !told:
	case wrong:
		w.told[key] = r
	default:
		delete(w.told, key)
	}
}

// alert reports whether the alerter took it.
func (w *watch) alert(ctx context.Context, a Alert) bool {
	a.At = time.Now()
	ctx, cancel := context.WithTimeout(ctx, alertTimeout)
	defer cancel()
	err := w.deliver(ctx, a)
	if err != nil {
		w.log.Warn("outbox: alert not delivered, it comes again at the next check", "alert", a.String(), "error", err)
	}
	return err == nil
}

const (
	alertTimeout = 10 * time.Second
	checkTimeout = 30 * time.Second // of all statements of a check
	maxDeadTold  = 20
	maxDeadRead  = 10_000
	// deadOverlap is how far a check looks back behind the last one: an event's time of
	// death is the start of a transaction.
	deadOverlap = 5 * time.Minute
)

// sqlDied reads who has died since $1 and is not among $3.
const sqlDied = `
SELECT ` + failedRowColumns + `
  FROM {schema}.outbox_failed
 WHERE status = 'dead' AND next_retry_at >= $1 AND ($2::text = '' OR relay = $2) AND id <> ALL ($3::bigint[])
 ORDER BY next_retry_at, id LIMIT $4`

// tellDead alerts to events that have died since the last check, those of a relay
// together. The first check begins with those of the interval before, because the
// process that led then may not have come to it.
func (w *watch) tellDead(ctx context.Context, relays []RelayStatus) error {
	var now time.Time
	if err := w.inspector.db.QueryRow(ctx, `SELECT now()`).Scan(&now); err != nil {
		return fmt.Errorf("ask the time: %w", err)
	}
	if w.began.IsZero() {
		w.began = now.Add(-w.cfg.Interval)
		w.since = w.began
	}
	rows, err := w.inspector.db.Query(ctx, w.sqlDied, w.since, w.own, slices.AppendSeq([]int64{}, maps.Keys(w.died)), maxDeadRead)
	if err != nil {
		return fmt.Errorf("read dead events: %w", err)
	}
	died, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (FailedRow, error) { return scanFailed(row) })
	if err != nil {
		return fmt.Errorf("read dead events: %w", err)
	}
	for _, r := range relays {
		dead := slices.DeleteFunc(slices.Clone(died), func(e FailedRow) bool { return e.Relay != r.Name })
		if len(dead) == 0 {
			continue
		}
		if !w.alert(ctx, Alert{Kind: AlertDead, Relay: r.Name, Status: r, Died: len(dead), Dead: dead[:min(len(dead), maxDeadTold)]}) {
			return nil // again at the next check
		}
		for _, e := range dead {
			w.died[e.ID] = e.NextRetryAt
		}
	}
	if len(died) < maxDeadRead {
		w.since = later(w.began, now.Add(-deadOverlap))
		maps.DeleteFunc(w.died, func(_ int64, at time.Time) bool { return at.Before(w.since) })
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// report tells now and then what waits for a decision.
func (w *watch) report(ctx context.Context, relays []RelayStatus) error {
	if w.cfg.ReportInterval == Forever || time.Now().Before(w.reportAt) {
		return nil
	}
	counts, err := w.failed.Count(ctx, FailedFilter{Relay: w.own, Statuses: []string{StatusWaiting, StatusFailed, StatusDead}})
	if err != nil {
		return err
	}
	for _, r := range relays {
		of := slices.DeleteFunc(slices.Clone(counts), func(c FailedCount) bool { return c.Relay != r.Name })
		if len(of) > 0 && !w.alert(ctx, Alert{Kind: AlertReport, Relay: r.Name, Status: r, Unresolved: of}) {
			return nil // again at the next check
		}
	}
	w.reportAt = time.Now().Add(w.cfg.ReportInterval)
	return nil
}

// deliver calls the alerter. A panic of it counts as an error.
func (w *watch) deliver(ctx context.Context, a Alert) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return w.cfg.Alerter.Alert(ctx, a)
}
