package faults

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

// viewsVar makes this test's program the service of TestViews: it holds a viewsSpec as JSON.
const viewsVar = "OUTBOX_FAULTS_VIEWS"

// viewsSpec says how the service reaches the servers, and where it tells what.
type viewsSpec struct {
	Postgres string
	Broker   string
	Topic    string
	Address  string // a file for the address at which it serves its health
	Gone     string // a file that exists while what notifyAction needs is missing
	Log      string // a file
}

// The service has a consumer and a worker. The worker has two actions, one of which needs something.
const (
	viewsReaders  = "readers"
	viewsWorkers  = "workers"
	countAction   = "COUNTED"
	notifyAction  = "NOTIFIED"
	viewsSession  = 6 * time.Second
	viewsPoll     = 200 * time.Millisecond // PollInterval of relays and of the worker
	viewsLease    = 6 * time.Second        // of relays and of the worker
	viewsHandling = 5 * time.Second        // HandlerTimeout
)

// The login of the processes at Kafka.
const (
	viewsUser     = "views"
	viewsPassword = "views-password"
)

// viewNoted is the event of TestViews.
type viewNoted struct {
	Key string
	Of  string // which topic
	At  time.Time
}

func (e viewNoted) key() string           { return e.Key }
func (e viewNoted) OccurredAt() time.Time { return e.At }

// viewOther is an event of a topic that can fail, and viewPart one of a topic of which a partition can fail.
type (
	viewOther struct{ viewNoted }
	viewPart  struct{ viewNoted }
)

// viewsEvents returns the registry of recorders and of the service.
func viewsEvents(topic string) (*outbox.Registry, error) {
	return outbox.NewRegistry("views",
		outbox.Event("views.thing.noted.v1", "Thing", viewNoted.key).Topic(topic),
		outbox.Event("views.other.noted.v1", "Other", func(e viewOther) string { return e.Key }).Topic(topic+"-rights"),
		outbox.Event("views.part.noted.v1", "Part", func(e viewPart) string { return e.Key }).Topic(topic+"-parts"))
}

// runViewsService is the whole life of the service.
func runViewsService(value string) error {
	var s viewsSpec
	return runAsChild(viewsVar, value, &s, &s.Postgres, s.run)
}

func (s *viewsSpec) run(ctx context.Context, db *pgxpool.Pool) error {
	file, err := os.Create(s.Log)
	if err != nil {
		return err
	}
	defer file.Close()
	slog.SetDefault(slog.New(slog.NewTextHandler(file, nil)))
	events, err := viewsEvents(s.Topic)
	if err != nil {
		return err
	}
	cfg := outbox.HandlerConfig{From: outbox.FromStart, HandlerTimeout: viewsHandling, Retry: outbox.RetryPolicy{MaxRetries: 3, RetryWait: 200 * time.Millisecond, MaxRetryWait: time.Second}}
	login := scram.Auth{User: viewsUser, Pass: viewsPassword}
	opts := []kgo.Opt{kgo.SeedBrokers(s.Broker), kgo.SASL(login.AsSha256Mechanism()), kgo.SessionTimeout(viewsSession), kgo.HeartbeatInterval(heartbeat)}
	consumer, err := outbox.NewConsumer(db, opts, events, viewsReaders, outbox.ConsumerConfig{HandlerConfig: cfg, MaxPollInterval: 30 * time.Second},
		outbox.Handle(countAction, func(context.Context, pgx.Tx, viewNoted, outbox.Metadata) error { return nil }))
	if err != nil {
		return err
	}
	worker, err := outbox.NewWorker(db, events, viewsWorkers, outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: viewsPoll, Lease: viewsLease},
		outbox.Handle(countAction, func(context.Context, pgx.Tx, viewNoted, outbox.Metadata) error { return nil }),
		outbox.Handle(notifyAction, s.notify))
	if err != nil {
		return err
	}
	server, err := s.serve(ctx, outboxhttp.Consumer(consumer), outboxhttp.Worker(worker))
	if err != nil {
		return err
	}
	defer server.Close()
	ended := make(chan error, 2)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	for _, run := range []func(context.Context) error{consumer.Run, worker.Run} {
		go func() {
			ended <- run(ctx)
			stop()
		}()
	}
	return errors.Join(<-ended, <-ended)
}

// notify fails while what it needs is missing.
func (s *viewsSpec) notify(context.Context, pgx.Tx, viewNoted, outbox.Metadata) error {
	if _, err := os.Stat(s.Gone); err == nil {
		return outbox.Unavailable(errGone)
	}
	return nil
}

// serve serves the health of the parts, and writes down at which address.
func (s *viewsSpec) serve(ctx context.Context, parts ...outboxhttp.Part) (*http.Server, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET "+pathReady, outboxhttp.Ready(parts...))
	mux.Handle("GET "+pathHealth, outboxhttp.Health(parts...))
	server := &http.Server{Handler: mux, ReadHeaderTimeout: viewsHandling}
	go func() { _ = server.Serve(listener) }() // until it is closed
	written := s.Address + strconv.Itoa(os.Getpid())
	if err := os.WriteFile(written, []byte(listener.Addr().String()), 0o600); err != nil {
		return nil, err
	}
	return server, os.Rename(written, filepath.Clean(s.Address))
}
