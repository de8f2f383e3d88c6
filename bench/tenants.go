package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

const (
	tenantMost    = 100.0 // ms from commit to arrival, 99th percentile
	tenantConns   = 20    // of the process that relays
	tenantPool    = 8     // connections of its pool; each plans the statements of all schemas
	tenantWriters = 12    // connections that commit at the same time
	// tenantStatements are those that a relay has: where a connection remembers fewer, PostgreSQL plans them again
	// and again.
	tenantStatements = 20
	tenantWarmUps    = 4 // times -warm-up, until each connection of the writers and of the relays has planned the statements of each schema
	tenantSetUps     = 4 // schemas that are made at the same time
)

// tenantsBench has one process that relays for many schemas of a database, and transactions in another one.
type tenantsBench struct {
	*track
	names     []string // of the schemas
	writers   *pgxpool.Pool
	recorders []*outbox.Recorder
	wakers    []*outbox.Waker
}

// tenants measures what it takes to relay for many schemas in one process, and how long their events take.
func (t *track) tenants(ctx context.Context) (err error) {
	w := &tenantsBench{track: t}
	if w.writers, err = services.NewPool(ctx, t.cfg.Postgres, tenantWriters+1); err != nil {
		return err
	}
	defer w.writers.Close()
	if err := w.prepare(ctx); err != nil {
		return err
	}
	g, running := errgroup.WithContext(ctx)
	running, stop := context.WithCancel(running)
	defer func() { stop(); err = errors.Join(err, g.Wait()) }()
	for _, waker := range w.wakers {
		g.Go(func() error { return waker.Run(running) })
	}
	var u used
	var l *laps.Lap
	var conns int
	j := w.connect(job{Work: "tenants", Schemas: w.names})
	if err := spawn(running, j, t.stderr, &u, func(send func(order) error) (err error) {
		if l, conns, err = w.drive(running, send); err != nil {
			return err
		}
		return send(tenantsEnd)
	}); err != nil {
		return err
	}
	w.addResults(l, u, conns)
	return nil
}

// ddlTenant is the business of the transactions of a tenant.
const ddlTenant = `CREATE TABLE {schema}.orders (id bigserial PRIMARY KEY, customer text NOT NULL)`

// prepare makes the schemas and what records in them.
func (w *tenantsBench) prepare(ctx context.Context) error {
	w.names = make([]string, w.cfg.tenants)
	w.recorders, w.wakers = make([]*outbox.Recorder, w.cfg.tenants), make([]*outbox.Waker, w.cfg.tenants)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(tenantSetUps)
	for i := range w.names {
		name, err := w.NewEmptySchema(ctx, fmt.Sprintf("tenants_%d", i))
		if err != nil {
			return err
		}
		w.names[i] = name
	}
	for i, name := range w.names {
		g.Go(func() (err error) {
			if err := outbox.Migrate(ctx, w.DB, outbox.MigrateConfig{Schema: name}); err != nil {
				return err
			}
			if _, err := w.DB.Exec(ctx, services.InSchema(ddlTenant, name)); err != nil {
				return fmt.Errorf("create table: %w", err)
			}
			if w.recorders[i], err = w.Recorder(name); err != nil {
				return err
			}
			w.wakers[i], err = outbox.NewWaker(w.writers, outbox.WakerConfig{Schema: name})
			return err
		})
	}
	return g.Wait()
}

// errBehind says that relays do not keep up.
var errBehind = errors.New("fell behind")

// drive waits until all schemas have a relay that leads, and measures a lap, which is nil if they fall behind.
func (w *tenantsBench) drive(ctx context.Context, send func(order) error) (l *laps.Lap, conns int, err error) {
	if err := w.awaitLeaders(ctx); err != nil {
		return nil, 0, err
	}
	rate := w.cfg.tenants * w.cfg.tenantRate
	if _, err := w.lap(ctx, rate, max(w.lapTime(), tenantWarmUps*seconds(w.cfg.warmUp))); err != nil && !errors.Is(err, errBehind) {
		return nil, 0, err
	}
	if err := send(tenantsMeasure); err != nil {
		return nil, 0, err
	}
	err = w.rounds.Run(func() (err error) { l, err = w.lap(ctx, rate, seconds(w.cfg.seconds)); return err })
	if err != nil && !errors.Is(err, errBehind) {
		return nil, 0, err
	}
	conns, err = w.relayConns(ctx)
	return l, conns, err
}

// lap runs a lap. The error is errBehind if events are missing when its patience is over.
func (w *tenantsBench) lap(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	l := w.newLap(rate, measured)
	err := w.run(ctx, l, w.recordSomewhere)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return nil, errBehind
	}
	return l, err
}

// recordSomewhere is a transaction of one of the schemas, which get events by turns.
func (w *tenantsBench) recordSomewhere(ctx context.Context, n int, committed func()) error {
	i := n % len(w.names)
	e := orders.New(n)
	var batch pgx.Batch
	batch.Queue(services.InSchema(sqlOrder, w.names[i]), e.Customer)
	if err := w.recorders[i].Queue(ctx, &batch, e); err != nil {
		return err
	}
	if err := transact(ctx, w.writers, &batch); err != nil {
		return err
	}
	committed()
	w.wakers[i].Wake()
	return nil
}

// relayConns returns how many connections to PostgreSQL the process that relays has.
func (w *tenantsBench) relayConns(ctx context.Context) (n int, err error) {
	err = w.DB.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE application_name = $1`, childName()).Scan(&n)
	return n, err
}

func (w *tenantsBench) awaitLeaders(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(w.cfg.tenants)*time.Second+laps.Patience)
	defer cancel()
	for _, name := range w.names {
		for leads := false; !leads; {
			if err := w.DB.QueryRow(ctx, services.InSchema(`SELECT count(*) > 0 FROM {schema}.outbox_cursor`, name)).Scan(&leads); err != nil {
				return fmt.Errorf("wait for the relay of %s: %w", name, err)
			}
			if !leads {
				if err := schedule.Sleep(ctx, 10*time.Millisecond); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// addResults reports a lap, or without one what the process that relays took while it fell behind.
func (w *tenantsBench) addResults(l *laps.Lap, u used, conns int) {
	name := fmt.Sprintf("tenants/%d-%d", w.cfg.tenants, w.cfg.tenantRate)
	rate := w.cfg.tenants * w.cfg.tenantRate
	one := func(what, unit string, value float64) report.Result {
		return report.Measured(name+"-"+what, unit, stats.Series{value})
	}
	switch {
	case l == nil:
		w.report.Add(report.Failed(name, fmt.Sprintf("fell behind %d transactions/s: events were missing %v after the schedule", rate, laps.Patience)))
	case l.Achieved() < laps.EnoughOfRate*float64(rate):
		w.report.Add(report.Failed(name, fmt.Sprintf("the rate was %.0f transactions/s, not %d", l.Achieved(), rate)))
	default:
		w.report.Add(one("p50", "ms", l.Latencies().Percentile(50)), one("p99", "ms", l.Latencies().Percentile(99)).ValueAtMost(tenantMost),
			one("machine-cores", "cores", l.MachineCPU()*float64(rate)/1e6))
	}
	w.report.Add(
		one("connections", "", float64(conns)).ValueAtMost(tenantConns), one("relay-cores", "cores", float64(u.CPU)/float64(u.Elapsed)),
		one("heap", "MiB", u.peak()), one("resident", "MiB", u.resident()),
	)
}

// The orders of the process that relays, in this sequence.
const (
	tenantsMeasure order = "measure"
	tenantsEnd     order = "end"
)

// relayTenants relays for many schemas, and measures itself between two orders.
func relayTenants(ctx context.Context, j job) (u used, err error) {
	address, err := url.Parse(j.Postgres)
	if err != nil {
		return u, err
	}
	query := address.Query()
	query.Set("statement_cache_capacity", strconv.Itoa(tenantStatements*len(j.Schemas)))
	address.RawQuery = query.Encode()
	db, err := services.NewPool(ctx, address.String(), tenantPool)
	if err != nil {
		return u, err
	}
	defer db.Close()
	g, running := errgroup.WithContext(ctx)
	running, stop := context.WithCancel(running)
	defer func() { stop(); err = errors.Join(err, g.Wait()) }()
	for _, schema := range j.Schemas {
		relay, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(j.Brokers...)}, outbox.RelayConfig{Schema: schema, Logger: quiet})
		if err != nil {
			return u, err
		}
		g.Go(func() error { return relay.Run(running) })
	}
	if err := j.await(running, tenantsMeasure); err != nil {
		return u, err
	}
	m, err := startMeter(j.Profile)
	if err != nil {
		return u, err
	}
	err = j.await(running, tenantsEnd)
	u, merr := m.stop(0)
	return u, errors.Join(err, merr)
}
