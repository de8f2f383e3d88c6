package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kgo"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"golang.org/x/sync/errgroup"
)

type config struct {
	show.Services
	listen string
	rate   int              // orders in a second that the service places by itself
	spans  sdk.SpanExporter // nil: spans go nowhere
	log    *slog.Logger

	topic    string             // empty: a new one
	interval time.Duration      // between looks into the database
	stale    time.Duration      // when an event waits for too long; 0: the default
	relay    outbox.RelayConfig // what a test wants otherwise
}

const maxRate = 1000

// service takes orders, publishes them and counts sales, all in one process.
type service struct {
	cfg      config
	id       string // of this run: its schema and its group
	log      *slog.Logger
	tel      *telemetry
	db       *pgxpool.Pool
	kafka    []kgo.Opt
	events   *outbox.Registry
	rec      *outbox.Recorder
	relay    *outbox.Relay
	sales    *outbox.Consumer
	mails    *outbox.Worker
	listener net.Listener
}

// serve runs a service until ctx is cancelled.
func serve(ctx context.Context, cfg config, stdout io.Writer) error {
	s, err := open(ctx, cfg)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "orders:  POST http://%[1]s/orders\nmetrics: http://%[1]s/metrics\n", s.listener.Addr())
	return errors.Join(s.run(ctx), s.close())
}

// open makes a service and its tables.
func open(ctx context.Context, cfg config) (s *service, err error) {
	s = &service{cfg: cfg, id: "observability_" + uuid.NewString()[:8], log: cfg.log, kafka: []kgo.Opt{kgo.SeedBrokers(cfg.Brokers...)}}
	if s.cfg.topic == "" {
		s.cfg.topic = s.id + "-events"
	}
	if s.db, err = show.Connect(ctx, cfg.Postgres, "", 20); err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{s.makeTables, s.wire, s.listen} {
		if err := step(ctx); err != nil {
			return nil, errors.Join(err, s.close())
		}
	}
	return s, nil
}

// wire is the part to copy: telemetry adds itself to what configures the recorder, the
// relay, the consumer and the worker, and watches the database and the consumer.
func (s *service) wire(context.Context) (err error) {
	if s.tel, err = newTelemetry(s.cfg); err != nil {
		return err
	}
	if s.events, err = registry(s.cfg.topic); err != nil {
		return err
	}
	s.rec, err = outbox.NewRecorder(s.events, s.tel.Recorder(outbox.RecorderConfig{Schema: s.id, Headers: outboxhttp.TraceHeaders}))
	if err != nil {
		return err
	}
	relay := s.cfg.relay
	relay.Schema, relay.Logger = s.id, s.log
	if s.relay, err = outbox.NewRelay(s.db, s.kafka, s.tel.Relay(relay)); err != nil {
		return err
	}
	s.sales, err = outbox.NewConsumer(s.db, s.kafka, s.events,
		"sales-"+s.id, s.tel.Consumer("sales-"+s.id, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.id, Logger: s.log, From: outbox.FromStart}}),
		outbox.Handle("SALE_COUNTED", s.countSale))
	if err != nil {
		return err
	}
	s.mails, err = outbox.NewWorker(s.db, s.events,
		"mails-"+s.id, s.tel.Worker("mails-"+s.id, outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.id, Logger: s.log, From: outbox.FromStart}}),
		outbox.HandleNoTx("MAIL_SENT", s.sendMail))
	if err != nil {
		return err
	}
	return errors.Join(s.tel.WatchDatabase(s.db, s.id), s.tel.WatchConsumers(s.sales))
}

// handler has the trace id outside, so that the lines of all that is inside have it.
func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	orders := outboxhttp.Trace(outboxhttp.TraceConfig{}, s.tel.traced(http.HandlerFunc(s.placeOrder)))
	mux.Handle("POST /orders", orders)
	mux.Handle("GET /metrics", s.tel.scraped)
	return mux
}

const maxOrder = 1 << 20

func (s *service) placeOrder(w http.ResponseWriter, r *http.Request) {
	var o orderPlaced
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxOrder)).Decode(&o); err != nil || o.ID == "" {
		http.Error(w, "an order has an id, and cents", http.StatusBadRequest)
		return
	}
	o.At = time.Now()
	if err := s.place(r.Context(), o); err != nil {
		s.log.ErrorContext(r.Context(), "order not placed", "order", o.ID, "error", err)
		http.Error(w, "the order was not placed", http.StatusInternalServerError)
		return
	}
	w.WriteHeader(http.StatusCreated)
}

// run runs all parts until ctx is cancelled, HTTP first to end.
func (s *service) run(ctx context.Context) error {
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: time.Minute,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
	}
	behind, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	g, failed := errgroup.WithContext(behind)
	g.Go(func() error { return s.makeTopics(failed) })
	g.Go(func() error { return s.relay.Run(failed) })
	g.Go(func() error { return s.sales.Run(failed) })
	g.Go(func() error { return s.mails.Run(failed) })
	g.Go(func() error {
		if err := server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		defer stop() // relay and consumer finish what is in flight
		s.shopAt(ctx, failed)
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return server.Shutdown(end)
	})
	return g.Wait()
}

// shopAt places orders as customers would, until ctx or failed ends.
func (s *service) shopAt(ctx, failed context.Context) {
	if s.cfg.rate == 0 {
		select {
		case <-ctx.Done():
		case <-failed.Done():
		}
		return
	}
	ticks := time.NewTicker(time.Second / time.Duration(s.cfg.rate))
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-failed.Done():
			return
		case <-ticks.C:
			if err := s.buy(ctx); err != nil && ctx.Err() == nil {
				s.log.Warn("customer goes away", "error", err)
			}
		}
	}
}

// buy places an order, by HTTP. One of a hundred costs nothing, see countSale.
func (s *service) buy(ctx context.Context) error {
	body, err := json.Marshal(orderPlaced{ID: uuid.NewString(), Cents: rand.Int64N(100) * 100})
	if err != nil {
		return err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.listener.Addr().String()+"/orders", bytes.NewReader(body))
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

func (s *service) makeTables(ctx context.Context) error {
	if err := outbox.Migrate(ctx, s.db, outbox.MigrateConfig{Schema: s.id}); err != nil {
		return err
	}
	if _, err := s.db.Exec(ctx, s.sql(sqlTables)); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	return nil
}

// makeTopics makes the topics once Kafka is there.
func (s *service) makeTopics(ctx context.Context) error {
	return outboxtopics.Run(ctx, s.kafka, s.events, outboxtopics.Config{ReplicationFactor: -1, Logger: s.log}) // the broker's
}

func (s *service) listen(ctx context.Context) (err error) {
	s.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", s.cfg.listen)
	return err
}

// sql puts a statement into the schema of this run. A search_path would do without
// PgBouncer only.
func (s *service) sql(text string) string {
	return strings.ReplaceAll(text, "{schema}", pgx.Identifier{s.id}.Sanitize())
}

// close sends what is left of the traces, drops the tables of this run and closes the
// rest.
func (s *service) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	defer s.db.Close()
	var errs []error
	if s.tel != nil {
		errs = append(errs, s.tel.shutdown(ctx))
	}
	if s.listener != nil {
		if err := s.listener.Close(); !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
	}
	if _, err := s.db.Exec(ctx, "DROP SCHEMA IF EXISTS "+pgx.Identifier{s.id}.Sanitize()+" CASCADE"); err != nil {
		errs = append(errs, fmt.Errorf("drop schema %s: %w", s.id, err))
	}
	return errors.Join(errs...)
}
