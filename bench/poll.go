package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kgo"
)

// pollPatience bounds one round of polls.
const pollPatience = time.Minute

// poll compares polls that find nothing: over a million published rows, and in
// an empty schema.
func (b *bench) poll(ctx context.Context) error {
	retained, err := b.stock(ctx, b.cfg.backlog)
	if err != nil {
		return err
	}
	name := retained.relayName()
	if _, err := b.runChild(ctx, job{Work: "relay", Relay: name}, retained); err != nil {
		return err
	}
	empty, err := b.NewSchema(ctx, "poll")
	if err != nil {
		return err
	}
	over := []idler{{schema: empty, relay: name}, {schema: retained.schema, relay: name}}
	medians := make([]stats.Series, len(over))
	for round := range b.cfg.runs + 1 {
		for i := range over {
			times, err := over[i].idle(ctx, b.cfg, b.cfg.polls/b.cfg.runs)
			if err != nil {
				return err
			}
			if round == 0 { // for warming up
				continue
			}
			b.say("%d/%d poll of %s: %.0f µs", round, b.cfg.runs, over[i].schema, times.Median())
			medians[i] = append(medians[i], times.Median())
		}
	}
	b.report.Add(report.Measured("poll/empty", "µs", medians[0]),
		report.Compared("poll/retained", "µs", medians[1], "poll/empty", medians[0]).RatioAtMost(1.2))
	return nil
}

// idler is a relay that has nothing to do.
type idler struct{ schema, relay string }

// idle lets the relay poll n times, as fast as it goes, and returns how long
// PostgreSQL took for each poll, in microseconds.
func (i idler) idle(ctx context.Context, cfg config, n int) (stats.Series, error) {
	t := &tracer{want: n, enough: make(chan struct{}), times: map[string]stats.Series{}}
	db, err := tracedPool(ctx, cfg.Postgres, t)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	relay, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(cfg.Brokers...)},
		outbox.RelayConfig{Schema: i.schema, Name: i.relay, PollInterval: time.Millisecond})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, pollPatience, fmt.Errorf("fewer than %d polls in %v", n, pollPatience))
	defer cancel()
	running, stop := runRelay(ctx, relay)
	select {
	case <-t.enough:
	case <-running.Done():
	}
	if err := errors.Join(context.Cause(ctx), stop()); err != nil {
		return nil, err
	}
	return t.most(), nil
}

func tracedPool(ctx context.Context, url string, t pgx.QueryTracer) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	cfg.ConnConfig.Tracer = t
	return pgxpool.NewWithConfig(ctx, cfg)
}

// tracer times what a pool sends, statements and batches of them, until one has
// been seen often enough. That is the poll: an idle relay does hardly anything
// else.
type tracer struct {
	want   int
	enough chan struct{} // closed when that is so

	mu    sync.Mutex
	times map[string]stats.Series // by SQL, in microseconds
}

// sent is something on its way to PostgreSQL, kept in the context.
type sent struct {
	sql string
	at  time.Time
}

type sentKey struct{}

func (t *tracer) start(ctx context.Context, sql string) context.Context {
	return context.WithValue(ctx, sentKey{}, sent{sql, time.Now()})
}

func (t *tracer) end(ctx context.Context, err error) {
	s, ok := ctx.Value(sentKey{}).(sent)
	if !ok || err != nil {
		return
	}
	took := float64(time.Since(s.at).Nanoseconds()) / 1000
	t.mu.Lock()
	defer t.mu.Unlock()
	t.times[s.sql] = append(t.times[s.sql], took)
	if len(t.times[s.sql]) == t.want {
		t.want = -1 // nothing else is enough once more
		close(t.enough)
	}
}

// TraceQueryStart implements [pgx.QueryTracer].
func (t *tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	return t.start(ctx, q.SQL)
}

// TraceQueryEnd implements [pgx.QueryTracer].
func (t *tracer) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryEndData) {
	t.end(ctx, q.Err)
}

// TraceBatchStart implements [pgx.BatchTracer].
func (t *tracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, b pgx.TraceBatchStartData) context.Context {
	var sql strings.Builder
	for _, q := range b.Batch.QueuedQueries {
		sql.WriteString(q.SQL)
	}
	return t.start(ctx, sql.String())
}

// TraceBatchQuery implements [pgx.BatchTracer].
func (t *tracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements [pgx.BatchTracer].
func (t *tracer) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, b pgx.TraceBatchEndData) {
	t.end(ctx, b.Err)
}

// most returns the times of what was seen most.
func (t *tracer) most() (most stats.Series) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, s := range t.times {
		if len(s) > len(most) {
			most = s
		}
	}
	return most
}
