package main

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kgo"
)

// tail traces every event at the highest rate. It reports the stretches of time for the slowest of
// a hundred events, and for all.
func (t *track) tail(ctx context.Context) error {
	rate := slices.Max(t.cfg.rates)
	all := stretches{}
	for range t.cfg.runs {
		var one stretches
		if err := t.rounds.Run(func() (err error) { one, err = t.traced(ctx, rate); return err }); err != nil {
			return err
		}
		for name, values := range one {
			all[name] = append(all[name], values...)
		}
	}
	for _, of := range stretchNames {
		t.report.Add(report.Measured("tail/"+strconv.Itoa(rate)+"/"+of, "ms", all[of]))
	}
	return nil
}

// stretches are the parts of the time from commit to arrival, in milliseconds, by their names: the
// median of all events, and the median of the slowest of a hundred.
type stretches map[string]stats.Series

// The stretches in the order of the report.
var stretchNames = []string{
	"all-commit", "all-until-look", "all-look", "all-kafka", "all-latency",
	"slow-commit", "slow-until-look", "slow-look", "slow-kafka", "slow-latency",
	"longest-commit", "longest-look", "longest-acknowledgement",
}

// traced runs a lap whose relay is traced.
func (t *track) traced(ctx context.Context, rate int) (stretches, error) {
	l := t.newLap(rate, t.lapTime())
	tr := &tailTracer{first: l.First, events: make([]tracedEvent, l.Total())}
	db, err := tracedPool(ctx, t.cfg.Postgres, tr)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	relay, err := outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(t.cfg.Brokers...), kgo.WithHooks(tr)}, outbox.RelayConfig{Schema: t.schema})
	if err != nil {
		return nil, err
	}
	running, stop := runRelay(ctx, relay)
	err = t.run(running, l, t.recording(t.DB, orders.New, relay.Waker().Wake))
	if err := errors.Join(err, stop()); err != nil {
		return nil, err
	}
	s := tr.stretches(l)
	t.say("tail/%d: p50 %.2f p99 %.2f ms; the slowest wait %.2f for a look that takes %.2f, and %.2f for Kafka", rate, l.Latencies().Median(),
		l.Latencies().Percentile(99), s["slow-until-look"].Median(), s["slow-look"].Median(), s["slow-kafka"].Median())
	return s, nil
}

// tailTracer notes when the relay's polls begin, and when the events that they return are sent and
// acknowledged. Polls come one after the other; other statements of the relay are rare.
type tailTracer struct {
	first int // number of the first event

	mu      sync.Mutex
	look    time.Time // when the last one began that has ended
	longest time.Duration
	events  []tracedEvent
}

// tracedEvent is when something happened to an event.
type tracedEvent struct{ look, handed, acknowledged time.Time }

type lookKey struct{}

// TraceQueryStart implements [pgx.QueryTracer].
func (*tailTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

// TraceQueryEnd implements [pgx.QueryTracer].
func (*tailTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements [pgx.BatchTracer].
func (*tailTracer) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return context.WithValue(ctx, lookKey{}, time.Now())
}

// TraceBatchQuery implements [pgx.BatchTracer].
func (*tailTracer) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements [pgx.BatchTracer].
func (t *tailTracer) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	began, _ := ctx.Value(lookKey{}).(time.Time)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.look, t.longest = began, max(t.longest, time.Since(began))
}

// OnProduceRecordBuffered implements [kgo.HookProduceRecordBuffered].
func (t *tailTracer) OnProduceRecordBuffered(r *kgo.Record) {
	t.note(r, func(e *tracedEvent) { e.look, e.handed = t.look, time.Now() })
}

// OnProduceRecordUnbuffered implements [kgo.HookProduceRecordUnbuffered].
func (t *tailTracer) OnProduceRecordUnbuffered(r *kgo.Record, _ error) {
	t.note(r, func(e *tracedEvent) { e.acknowledged = time.Now() })
}

func (t *tailTracer) note(r *kgo.Record, what func(*tracedEvent)) {
	number, err := orders.Number(r.Value)
	n := number - t.first
	if err != nil || n < 0 || n >= len(t.events) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	what(&t.events[n])
}

// stretches sums up a lap.
func (t *tailTracer) stretches(l *laps.Lap) stretches {
	t.mu.Lock()
	defer t.mu.Unlock()
	ms := func(d time.Duration) float64 { return max(0, d.Seconds()*1000) }
	slow := l.Latencies().Percentile(99)
	commits := l.Transactions()
	all := stretches{}
	acknowledged := 0.0
	for n := l.Warm; n < l.Total(); n++ {
		e := t.events[n]
		latency := ms(l.Arrived[n] - l.Committed[n])
		look, handed := e.look.Sub(l.Start), e.handed.Sub(l.Start)
		acknowledged = max(acknowledged, ms(e.acknowledged.Sub(e.handed)))
		for _, of := range []string{"all", "slow"} {
			if of == "slow" && latency < slow {
				continue
			}
			for what, took := range map[string]float64{
				"commit": commits[n-l.Warm], "until-look": ms(look - l.Committed[n]), "look": ms(handed - max(look, l.Committed[n])),
				"kafka": ms(l.Arrived[n] - handed), "latency": latency,
			} {
				all[of+"-"+what] = append(all[of+"-"+what], took)
			}
		}
	}
	sums := stretches{
		"longest-commit": {l.Longest()}, "longest-look": {ms(t.longest)}, "longest-acknowledgement": {acknowledged},
	}
	for name, values := range all {
		sums[name] = stats.Series{values.Median()}
	}
	return sums
}
