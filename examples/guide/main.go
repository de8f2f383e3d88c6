// The guide is the service of docs/guide.md: it takes orders by HTTP, publishes them
// and adds up the sales.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })  // a second signal, a second later, ends the process at once
	if err := run(ctx); err != nil && !errors.Is(err, context.Canceled) { // by a signal while it starts
		slog.Error("shop failed", "error", err)
		os.Exit(1)
	}
	slog.Info("stopped")
}

func run(ctx context.Context) error {
	kafka := []kgo.Opt{kgo.SeedBrokers(strings.Split(os.Getenv("KAFKA_BROKERS"), ",")...)}
	db, err := connect(ctx)
	if err != nil {
		return err
	}
	defer db.Close() // last: the relay and the consumer need it until they have returned
	events, err := registry()
	if err != nil {
		return err
	}
	if err := setUp(ctx, db); err != nil {
		return err
	}
	recorder, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	sales, err := newSales(db, kafka, events)
	if err != nil {
		return err
	}
	topics := func(ctx context.Context) error { // while Kafka is unavailable, orders are taken all the same
		return outboxtopics.Run(ctx, kafka, events, outboxtopics.Config{ReplicationFactor: -1}) // the cluster's default
	}
	s := &shop{db: db, recorder: recorder, relay: relay, sales: sales}
	return serve(ctx, s.routes(), topics, relay.Run, sales.Run)
}

func connect(ctx context.Context) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 30 // the relay uses up to 8, the consumer of 3 partitions up to 13, requests the rest
	return pgxpool.NewWithConfig(ctx, cfg)
}

// setUp makes the tables that are missing. It may run at every start, in many processes at once.
func setUp(ctx context.Context, db *pgxpool.Pool) error {
	if err := outbox.Migrate(ctx, db, outbox.MigrateConfig{}); err != nil {
		return err
	}
	if _, err := db.Exec(ctx, tables); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	return nil
}

// serve runs the server and the parts behind it until ctx is cancelled or one of them
// fails. Then the server ends first, and the parts end after its last request.
func serve(ctx context.Context, handler http.Handler, parts ...func(context.Context) error) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", cmp.Or(os.Getenv("LISTEN"), "127.0.0.1:8080"))
	if err != nil {
		return err
	}
	slog.Info("listening", "address", listener.Addr().String())
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: time.Minute,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
	}

	behind, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, failed := errgroup.WithContext(behind)
	for _, run := range parts {
		group.Go(func() error { return run(failed) })
	}
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		select {
		case <-ctx.Done():
		case <-failed.Done():
		}
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		err := server.Shutdown(grace) // first: no new requests, those that run finish
		stop()                        // second: relay and consumer finish what is in flight
		return err
	})
	return group.Wait() // third: the caller closes the pool
}
