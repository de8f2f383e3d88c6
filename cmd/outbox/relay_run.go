package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
)

// Times of a stop. Together they are below 5 s.
const (
	relayStops  = 4 * time.Second        // a relay needs less than one, unless PostgreSQL or Kafka has gone silent
	serverStops = 500 * time.Millisecond // for requests under way
	poolCloses  = 400 * time.Millisecond // for connections that are not silent
)

// relayConns is the least size of the pool: a relay uses eight, and the metrics and the page a few.
const relayConns = 12

// run runs the process. It starts and continues during an outage of PostgreSQL or Kafka.
func (r *relayProcess) run(ctx context.Context, e *env) error {
	if e.json {
		r.log = logJSON
	}
	if err := r.check(); err != nil {
		return err
	}
	kafka, err := e.kafkaAccess()
	if err != nil {
		return err
	}
	db, err := e.relayPool(ctx)
	if err != nil {
		return err
	}
	err = r.relayEvents(ctx, e, db, append(kafka, kgo.ClientID("outbox-relay")))
	if !errors.Is(err, errHangs) {
		closePool(db)
	}
	return err
}

// closePool closes a pool, which waits for connections that hang: not for long, because the process ends.
func closePool(db *pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		db.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(poolCloses):
	}
}

// relayEvents runs the relay and, alongside it, the server, until ctx ends.
func (r *relayProcess) relayEvents(ctx context.Context, e *env, db *pgxpool.Pool, kafka []kgo.Opt) error {
	log := r.logger(e)
	cfg, err := r.config(e, log)
	if err != nil {
		return err
	}
	metrics := newRelayMetrics(r.relay)
	cfg.Hooks = metrics.hooks()
	relay, err := outbox.NewRelay(db, kafka, cfg)
	if err != nil {
		return err
	}
	if r.end != "" {
		return relay.EndExactlyOnce(ctx, r.end == endKafka)
	}
	if err := metrics.watch(relay, db, cfg); err != nil {
		return err
	}
	handler, err := r.handler(e, db, relay, kafka, metrics, log)
	if err != nil {
		return err
	}
	server, err := r.serve(ctx, handler, log)
	if err != nil {
		return err
	}
	defer server.stop()
	log.Info("outbox: relay process starts", "relay", metrics.relay, "database", e.databaseName(), "schema", e.schemaName(),
		"brokers", e.brokers(), "listen", server.address())
	return untilStopped(ctx, relay, log)
}

// errHangs ends a process whose relay does not stop. The next process sends the events in flight
// again.
var errHangs = errors.New("the relay does not stop; what it was sending is sent again by the next one")

// untilStopped runs the relay until ctx ends, and returns why it ended by itself.
func untilStopped(ctx context.Context, relay *outbox.Relay, log *slog.Logger) error {
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	log.Info("outbox: relay process stops")
	select {
	case err := <-ended:
		return err
	case <-time.After(relayStops):
		return errHangs
	}
}

// relayPool returns a pool that connects when it is needed.
func (e *env) relayPool(ctx context.Context) (*pgxpool.Pool, error) {
	if !e.namesDatabase() {
		return nil, usagef("which database? --database URL, or $DATABASE_URL")
	}
	cfg, err := e.parseDatabase("outbox-relay")
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = max(cfg.MaxConns, relayConns)
	db, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", e.databaseName(), err)
	}
	return db, nil
}

// logger returns the logger of the process, which masks passwords.
func (r *relayProcess) logger(e *env) *slog.Logger { return newLogger(e, r.log, r.level) }

// newLogger returns a logger that masks passwords.
func newLogger(e *env, format string, level slog.Level) *slog.Logger {
	options := &slog.HandlerOptions{Level: level}
	if format == logJSON {
		return slog.New(slog.NewJSONHandler(masked{e}, options))
	}
	return slog.New(slog.NewTextHandler(masked{e}, options))
}

// masked writes lines to stderr without passwords.
type masked struct{ e *env }

// Write implements [io.Writer].
func (m masked) Write(line []byte) (int, error) {
	const least = 8 // log lines must not contain passwords, and this is the second check
	_, err := io.WriteString(m.e.stderr, m.e.maskFrom(string(line), least))
	return len(line), err
}

// listenAt returns a listener, or nil for none.
func (r *relayProcess) listenAt(ctx context.Context) (net.Listener, error) {
	if r.listen == listenOff {
		return nil, nil
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", r.listen)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.called("listen"), r.listen, err)
	}
	return l, nil
}
