package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	failingEvery   = 100        // one event among so many fails
	failingKeys    = 1000       // of the events that fail; no other event has one of them
	failingPrefix  = "failing-" // of these keys
	failingRetries = 9          // so ten attempts
	failingConns   = 10         // enough for all handlers, and for what else there is to do
)

// failingEvent returns event n. Those that fail, if any do, have keys of their own, so that no other one is
// to wait for them.
func failingEvent(n int) orders.Placed {
	e := orders.New(n)
	if n%failingEvery == 0 {
		e.Order = fmt.Sprintf("%s%05d", failingPrefix, e.Total%failingKeys)
	}
	return e
}

func mayFail(key string) bool { return strings.HasPrefix(key, failingPrefix) }

// failing is the events of all rounds, and what handles them.
type failing struct {
	*bench
	schema string
	shelf  *shelf // the same events in Kafka
	others int    // events that never fail
	groups int    // that have handled them
}

// failingWay is one way to have events handled. Handlers fail before or after their statement.
type failingWay struct {
	name  string
	after bool
	run   func(db *pgxpool.Pool, group string, cfg outbox.HandlerConfig, h outbox.Handler) (func(context.Context) error, error)
}

// failing compares what is handled of events that do not fail while others do with what is handled of them
// while none does, by a consumer and by a worker.
func (b *bench) failing(ctx context.Context) error {
	s, err := b.newFailing(ctx)
	if err != nil {
		return err
	}
	for _, w := range []failingWay{
		{"failing/consumer", false, s.consumer}, {"failing/consumer-after", true, s.consumer},
		{"failing/worker", false, s.worker}, {"failing/worker-after", true, s.worker},
	} {
		if err := s.compare(ctx, w); err != nil {
			return fmt.Errorf("%s: %w", w.name, err)
		}
	}
	return nil
}

// newFailing records the events, and fills a topic with them.
func (b *bench) newFailing(ctx context.Context) (s *failing, err error) {
	n := b.cfg.failingEvents
	s = &failing{bench: b, others: n - (n+failingEvery-1)/failingEvery}
	if s.schema, err = b.NewSchema(ctx, "failing"); err != nil {
		return nil, err
	}
	if s.shelf, err = b.newShelfOf(ctx, "failing", n, shelfPartitions, failingEvent); err != nil {
		return nil, err
	}
	k := smallEvents
	k.event = func(n int) outbox.DomainEvent { return failingEvent(n) }
	return s, b.load(ctx, s.schema, 0, n, k)
}

// compare runs rounds without failures and with them. The first one, for warming up, does not count.
func (s *failing) compare(ctx context.Context, w failingWay) error {
	if _, err := s.round(ctx, w, false); err != nil {
		return err
	}
	var without, with []used
	for round := range s.cfg.runs {
		for _, runs := range []*[]used{&without, &with} {
			u, err := s.round(ctx, w, runs == &with)
			if err != nil {
				return err
			}
			*runs = append(*runs, u)
			s.say("%d/%d %s, failing %v: %s events/s, %d of %d in %.1f s", round+1, s.cfg.runs, w.name, runs == &with, report.Number(u.rate()), u.Events, s.others, u.seconds())
		}
	}
	base := w.name + "-without"
	s.report.Add(report.Measured(base, "events/s", each(without, used.rate)),
		report.Compared(w.name, "events/s", each(with, used.rate), base, each(without, used.rate)).RatioAtLeast(0.9))
	return nil
}

// round has a new group handle all events from the first one on, until those are done that do not fail, or
// the time is up.
func (s *failing) round(ctx context.Context, w failingWay, fails bool) (u used, err error) {
	db, err := services.NewPool(ctx, s.cfg.Postgres, failingConns)
	if err != nil {
		return u, err
	}
	defer db.Close()
	if err := s.prepareTurn(ctx); err != nil {
		return u, err
	}
	s.groups++
	group := fmt.Sprintf("bench-%s-failing-%d", s.ID, s.groups)
	defer func() { err = errors.Join(err, s.forget(context.WithoutCancel(ctx), group)) }()
	m := newOthersMeter(s.others)
	run, err := w.run(db, group, outbox.HandlerConfig{
		Schema: s.schema, Retry: outbox.RetryPolicy{MaxRetries: failingRetries}, Logger: slog.New(slog.DiscardHandler),
		Hooks: outbox.ConsumerHooks{Handled: m.handled},
	}, s.handler(m, fails, w.after))
	if err != nil {
		return u, err
	}
	profiled := func() error { return nil }
	if s.cfg.profile != "" {
		if profiled, err = startProfile(filepath.Join(s.cfg.profile, fmt.Sprintf("%s-%d-%t", strings.ReplaceAll(w.name, "/", "-"), s.groups, fails))); err != nil {
			return u, err
		}
	}
	running, stop := runAside(ctx, run)
	u, err = m.measure(running, seconds(s.cfg.failingSeconds))
	if err := errors.Join(err, stop(), profiled()); err != nil {
		return u, err
	}
	return u, s.checkTurn(ctx, m)
}

// startProfile starts to write profiles of this process, until the returned function is called.
func startProfile(path string) (stop func() error, err error) {
	m, err := startMeter(path)
	if err != nil {
		return nil, err
	}
	return func() error {
		_, err := m.stop(0)
		return err
	}, nil
}

// sqlFailingCounts are the counters of the keys whose events may fail.
const sqlFailingCounts = `INSERT INTO {schema}.counts SELECT '` + failingPrefix + `' || lpad(g::text, 5, '0'), 0 FROM generate_series(0, $1::int - 1) AS g`

// prepareTurn makes the counters anew, and leaves nothing to autovacuum and checkpoints.
func (s *failing) prepareTurn(ctx context.Context) error {
	if _, err := s.DB.Exec(ctx, services.InSchema(ddlCounts, s.schema), pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("create counters: %w", err)
	}
	if _, err := s.DB.Exec(ctx, services.InSchema(sqlFailingCounts, s.schema), failingKeys); err != nil {
		return fmt.Errorf("create counters: %w", err)
	}
	for _, sql := range []string{`VACUUM (ANALYZE) {schema}.counts`, `VACUUM (ANALYZE) {schema}.event_handled`, `VACUUM (ANALYZE) {schema}.event_delivery`, `CHECKPOINT`} {
		if _, err := s.DB.Exec(ctx, services.InSchema(sql, s.schema)); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

// forget removes what a group leaves behind, so that the next one finds the same: deliveries, notes, and
// in Kafka its offsets.
func (s *failing) forget(ctx context.Context, group string) error {
	var errs []error
	for _, sql := range []string{`DELETE FROM {schema}.event_delivery WHERE consumer_group = $1`, `DELETE FROM {schema}.event_handled WHERE consumer_group = $1`} {
		_, err := s.DB.Exec(ctx, services.InSchema(sql, s.schema), group)
		errs = append(errs, err)
	}
	_, err := s.Admin.DeleteGroups(ctx, group) // there is none of workers, which is no error
	return errors.Join(append(errs, err)...)
}

// handler counts an event by its key, or fails as those with such a key do.
func (s *failing) handler(m *othersMeter, fails, after bool) outbox.Handler {
	count := services.InSchema(sqlCount, s.schema)
	return outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e orders.Placed, _ outbox.Metadata) error {
		m.called()
		fails := fails && mayFail(e.Order)
		if fails && !after {
			return errFailing
		}
		_, err := tx.Exec(ctx, count, e.Order)
		if fails && err == nil {
			err = errFailing
		}
		return err
	})
}

var errFailing = errors.New("it fails always")

// consumer is [failingWay.run] with Kafka.
func (s *failing) consumer(db *pgxpool.Pool, group string, cfg outbox.HandlerConfig, h outbox.Handler) (func(context.Context) error, error) {
	events, err := outbox.NewRegistry(orders.Source, outbox.Event(s.EventType(), orders.Aggregate, orders.Placed.Key).Topic(s.shelf.topic))
	if err != nil {
		return nil, err
	}
	cfg.From = outbox.FromStart
	c, err := outbox.NewConsumer(db, []kgo.Opt{kgo.SeedBrokers(s.cfg.Brokers...)}, events, group, outbox.ConsumerConfig{HandlerConfig: cfg}, h)
	if err != nil {
		return nil, err
	}
	return c.Run, nil
}

// worker is [failingWay.run] on PostgreSQL alone.
func (s *failing) worker(db *pgxpool.Pool, group string, cfg outbox.HandlerConfig, h outbox.Handler) (func(context.Context) error, error) {
	events, err := outbox.NewRegistry(orders.Source, outbox.Event(s.EventType(), orders.Aggregate, orders.Placed.Key))
	if err != nil {
		return nil, err
	}
	cfg.From = outbox.FromStart
	w, err := outbox.NewWorker(db, events, group, outbox.WorkerConfig{HandlerConfig: cfg}, h)
	if err != nil {
		return nil, err
	}
	return w.Run, nil
}

// sqlOthersCounted adds up what handlers have counted of other keys than those whose events may fail.
const sqlOthersCounted = `SELECT coalesce(sum(n), 0)::bigint FROM {schema}.counts WHERE NOT starts_with(key, '` + failingPrefix + `')`

// checkTurn finds out whether each event was counted once.
func (s *failing) checkTurn(ctx context.Context, m *othersMeter) error {
	var counted int64
	if err := s.DB.QueryRow(ctx, services.InSchema(sqlOthersCounted, s.schema)).Scan(&counted); err != nil {
		return fmt.Errorf("read counters: %w", err)
	}
	if n := m.done.Load(); n != counted {
		return fmt.Errorf("%d events were handled and counted %d times", n, counted)
	}
	return nil
}

// othersMeter measures the events that do not fail, from the first call of a handler on.
type othersMeter struct {
	others int64

	once  sync.Once
	start time.Time     // before began is closed
	began chan struct{} // closed by the first call
	done  atomic.Int64
	all   chan struct{} // closed with the last one
}

func newOthersMeter(others int) *othersMeter {
	return &othersMeter{others: int64(others), began: make(chan struct{}), all: make(chan struct{})}
}

// called notes that a handler is called.
func (m *othersMeter) called() {
	m.once.Do(func() {
		m.start = time.Now()
		close(m.began)
	})
}

// handled is the hook Handled.
func (m *othersMeter) handled(meta outbox.Metadata, _ string, _ time.Duration) {
	if !mayFail(meta.Key()) && m.done.Add(1) == m.others {
		close(m.all)
	}
}

// measure waits until all others are done, or for limit. Running must go on meanwhile.
func (m *othersMeter) measure(running context.Context, limit time.Duration) (used, error) {
	select {
	case <-m.began:
	case <-running.Done():
		return used{}, context.Cause(running)
	}
	enough := time.NewTimer(limit - time.Since(m.start))
	defer enough.Stop()
	select {
	case <-m.all:
	case <-enough.C:
	case <-running.Done():
		return used{}, context.Cause(running)
	}
	return used{Events: int(m.done.Load()), Elapsed: time.Since(m.start), Start: m.start}, nil
}
