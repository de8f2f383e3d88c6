package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/examples/trading/simulator"
	"golang.org/x/sync/errgroup"
)

// app is what the parts of the program share.
type app struct {
	schema   string // of this run
	exchange string // its address, which is that of the push service, too
	db       *pgxpool.Pool
	events   *outbox.Registry
	bus      EventBus
	log      *slog.Logger
	lease    time.Duration
	bar      time.Duration
	running  []*outbox.Worker // set before they run, read by their handlers
}

// maxConns is for each process.
const maxConns = 12

// open connects to PostgreSQL.
func open(ctx context.Context, cfg config) (*app, error) {
	a := &app{schema: cfg.schema, exchange: cfg.exchange, lease: cfg.lease, bar: cfg.backtest / backtestBars, log: show.Log(cfg.verbose)}
	if err := a.wire(); err != nil {
		return nil, err
	}
	var err error
	a.db, err = show.Connect(ctx, cfg.Postgres, cfg.schema, maxConns)
	return a, err
}

// wire makes the registry and the event bus.
func (a *app) wire() (err error) {
	if a.events, err = registry(); err != nil {
		return err
	}
	a.bus, err = outbox.NewRecorder(a.events, outbox.RecorderConfig{Schema: a.schema})
	return err
}

func (a *app) migrate(ctx context.Context) error {
	if err := outbox.Migrate(ctx, a.db, outbox.MigrateConfig{Schema: a.schema}); err != nil {
		return err
	}
	if _, err := a.db.Exec(ctx, sqlTrading+";"+sqlNotifications+";"+sqlBacktests); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	return nil
}

// run opens the exchange, starts the processes of workers, lets the bots trade, and compares.
func run(ctx context.Context, cfg config, out io.Writer) (*report, error) {
	outside := simulator.New(cfg.seed, nil)
	address, closeServer, err := serve(ctx, outside)
	if err != nil {
		return nil, err
	}
	defer closeServer()
	cfg.schema, cfg.exchange = "trading_"+uuid.NewString()[:8], address
	a, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer a.db.Close()
	printHeader(out, cfg)
	defer show.DropSchema(a.db, a.schema, out)
	if err := a.migrate(ctx); err != nil {
		return nil, err
	}
	return a.run(ctx, cfg, outside)
}

// run trades. Ctrl-C ends the signals and the incidents; what was decided is still done.
func (a *app) run(ctx context.Context, cfg config, outside *simulator.Simulator) (*report, error) {
	s := &scene{
		app: a, cfg: cfg, outside: outside,
	}
	defer func() { _ = s.others.Stop() }() // after another error; otherwise there is nothing left to stop
	for n := range cfg.processes {
		if err := s.others.Start(workersName(n), cfg.workerArgs()...); err != nil {
			return nil, err
		}
	}
	g, trading := errgroup.WithContext(ctx)
	g.Go(func() error { return s.backtests(trading) })
	g.Go(func() error { return s.trade(trading) })
	g.Go(func() error { return s.killProcesses(trading) })
	g.Go(func() error { return s.tryKillSwitch(trading) })
	if err := g.Wait(); err != nil && ctx.Err() == nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx)
	var err error
	if s.finished, err = s.awaitAll(ctx); err != nil {
		return nil, err
	}
	if err := s.others.Stop(); err != nil {
		return nil, err
	}
	return s.report(ctx)
}

// serve serves on a free port of this machine.
func serve(ctx context.Context, handler http.Handler) (address string, closeServer func(), err error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("open the exchange: %w", err)
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }() // ends with the server
	return "http://" + listener.Addr().String(), func() { _ = server.Close() }, nil
}
