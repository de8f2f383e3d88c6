package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/twmb/franz-go/pkg/kgo"
)

const openRate = 1000 // transactions per second during an open one

// track is where laps are run.
type track struct {
	*bench
	schema string
	rec    *outbox.Recorder
	reader *laps.Reader
	floor  *kgo.Client
	next   int // number of the next event
}

func (b *bench) newTrack(ctx context.Context, name string) (t *track, err error) {
	t = &track{bench: b, next: 1}
	if t.schema, err = b.NewSchema(ctx, name); err != nil {
		return nil, err
	}
	if t.rec, err = b.Recorder(t.schema); err != nil {
		return nil, err
	}
	if t.floor, err = newProducer(b.cfg.Brokers); err != nil {
		return nil, err
	}
	if t.reader, err = b.newReader(ctx); err != nil {
		t.floor.Close()
		return nil, err
	}
	return t, nil
}

// onTrack is a scenario that needs a track of its own, which is warm.
func onTrack(name string, measure func(*track, context.Context) error) func(*bench, context.Context) error {
	return func(b *bench, ctx context.Context) error {
		t, err := b.newTrack(ctx, name)
		if err != nil {
			return err
		}
		defer t.close()
		if err := t.warmUp(ctx); err != nil {
			return err
		}
		return measure(t, ctx)
	}
}

func (t *track) close() {
	t.floor.Close()
	t.reader.Client.Close()
}

// newLap returns the next lap.
func (t *track) newLap(rate int, measured time.Duration) *laps.Lap {
	l := laps.New(t.next, rate, seconds(t.cfg.warm), measured)
	t.next += l.Total()
	return l
}

// run runs a lap and waits until its events have arrived.
func (t *track) run(ctx context.Context, l *laps.Lap, transact laps.Transaction) error {
	return laps.Run(ctx, l, t.cfg.workers, t.reader.Collect, transact)
}

// withRelay is the product.
func (t *track) withRelay(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	l := t.newLap(rate, measured)
	return l, t.relayed(ctx, l, outbox.RelayConfig{}, orders.New)
}

// relayed runs a lap of transactions that record, commit and wake. The relay
// runs in this process, and only during the lap.
func (t *track) relayed(ctx context.Context, l *laps.Lap, cfg outbox.RelayConfig, event func(n int) orders.Placed) error {
	cfg.Schema = t.schema
	relay, err := outbox.NewRelay(t.DB, []kgo.Opt{kgo.SeedBrokers(t.cfg.Brokers...)}, cfg)
	if err != nil {
		return err
	}
	running, stop := runRelay(ctx, relay)
	err = t.run(running, l, t.recording(t.DB, event, relay.Waker().Wake))
	return errors.Join(err, stop())
}

// recording is a transaction that records an event, and then wakes.
func (t *track) recording(db *pgxpool.Pool, event func(n int) orders.Placed, wake func()) laps.Transaction {
	sql := services.InSchema(sqlOrder, t.schema)
	return func(ctx context.Context, n int, committed func()) error {
		e := event(n)
		var batch pgx.Batch
		batch.Queue(sql, e.Customer)
		if err := t.rec.Queue(ctx, &batch, e); err != nil {
			return err
		}
		if err := transact(ctx, db, &batch); err != nil {
			return err
		}
		committed()
		wake()
		return nil
	}
}

// withoutRelay is the floor: the transaction without the event, and then the
// event's record straight to Kafka. It is what is quickest, and loses events.
func (t *track) withoutRelay(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
	sql := services.InSchema(sqlOrder, t.schema)
	var acks kgo.FirstErrPromise
	l := t.newLap(rate, measured)
	err := t.run(ctx, l, func(ctx context.Context, n int, committed func()) error {
		e := orders.New(n)
		record, err := t.recordOf(e, t.Topic)
		if err != nil {
			return err
		}
		var batch pgx.Batch
		batch.Queue(sql, e.Customer)
		if err := transact(ctx, t.DB, &batch); err != nil {
			return err
		}
		committed()
		t.floor.Produce(context.WithoutCancel(ctx), record, acks.Promise()) // the lap may end before its last acknowledgement
		return nil
	})
	return l, errors.Join(err, acks.Err())
}

const sqlOrder = `INSERT INTO {schema}.orders (customer) VALUES ($1)`

// transact sends a batch in a transaction of its own.
func transact(ctx context.Context, db *pgxpool.Pool, batch *pgx.Batch) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return tx.SendBatch(ctx, batch).Close() })
}

// recordOf returns the record that a relay would make of an event.
func (b *bench) recordOf(e orders.Placed, topic string) (*kgo.Record, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, err
	}
	payload, err := json.Marshal(e)
	if err != nil {
		return nil, err
	}
	r := row{
		occurredAt: e.At, eventID: []byte(id.String()), eventType: []byte(b.EventType()), source: []byte(orders.Source),
		aggregateType: []byte(orders.Aggregate), aggregateID: []byte(e.Order), payload: payload, contentType: []byte("application/json"),
	}
	var headers []kgo.RecordHeader
	record := r.record(topic, &headers)
	return &record, nil
}

// lapTime is how long one turn measures.
func (b *bench) lapTime() time.Duration { return seconds(b.cfg.seconds / float64(b.cfg.runs)) }

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// latency compares the relay with the floor at each rate.
func (t *track) latency(ctx context.Context) error {
	for _, rate := range t.cfg.rates {
		err := t.race(ctx, race{
			name: "latency/" + strconv.Itoa(rate), rate: rate, measured: t.lapTime(), limit: 2,
			base: side{"floor", t.withoutRelay}, with: side{"relay", t.withRelay},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// warmUp runs laps that do not count: small requests and long polls take other
// ways through the broker than full batches.
func (t *track) warmUp(ctx context.Context) error {
	t.say("warm-up of small requests")
	period := t.lapTime()
	if !t.warmSmall {
		period = max(period, seconds(t.cfg.warmUp)) // before, single records take four times as much of the processors
	}
	if _, err := t.withoutRelay(ctx, openRate, period); err != nil {
		return err
	}
	_, err := t.withRelay(ctx, openRate, period)
	t.warmSmall = err == nil
	return err
}

// race is two kinds of laps that are run in turns.
type race struct {
	name       string
	rate       int
	measured   time.Duration
	limit      float64 // that the ratios at p50 and p99 should keep to; 0: none
	tail       float64 // that at p99, if it is another one; 0: it is not
	most       float64 // milliseconds that p50 of the second side should keep to; 0: none
	further    float64 // a percentile to report without a limit; 0: none
	base, with side
}

// side is one kind of laps of a race.
type side struct {
	name string
	run  func(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error)
}

// race runs a race and reports it.
func (b *bench) race(ctx context.Context, r race) error {
	var base, with []*laps.Lap
	for round := range b.cfg.runs {
		for _, of := range []struct {
			side
			laps *[]*laps.Lap
		}{{r.base, &base}, {r.with, &with}} {
			var l *laps.Lap
			if err := b.rounds.Run(func() (err error) { l, err = of.run(ctx, r.rate, r.measured); return err }); err != nil {
				return fmt.Errorf("%s, %s: %w", r.name, of.name, err)
			}
			*of.laps = append(*of.laps, l)
			b.say("%d/%d %s: %s p50 %.2f p99 %.2f ms", round+1, b.cfg.runs, r.name, of.name, l.Latencies().Median(), l.Latencies().Percentile(99))
		}
	}
	b.reportRace(r, base, with)
	return nil
}

// reportRace reports percentiles and their ratios, unless the schedule was
// not kept in half of the turns: then what was measured is another rate's.
func (b *bench) reportRace(r race, base, with []*laps.Lap) {
	for _, side := range []struct {
		name string
		laps []*laps.Lap
	}{{r.base.name, base}, {r.with.name, with}} {
		achieved := eachLap(side.laps, (*laps.Lap).Achieved)
		if half := achieved.Median(); half < laps.EnoughOfRate*float64(r.rate) {
			why := fmt.Sprintf("%s achieved %.0f of %d transactions/s", side.name, half, r.rate)
			b.say("%s FAILED: %s", r.name, why)
			b.report.Add(report.Failed(r.name, why))
			return
		}
		b.report.Add(report.Measured(fmt.Sprintf("%s/%s-rate", r.name, side.name), "tx/s", achieved))
	}
	for _, p := range []float64{50, 99} {
		of, against := r.percentile(p, base, with)
		if r.limit > 0 {
			of = of.RatioAtMost(r.limitAt(p))
		}
		if r.most > 0 && p == 50 {
			of = of.ValueAtMost(r.most)
		}
		b.report.Add(against, of)
	}
	if r.further > 0 {
		of, against := r.percentile(r.further, base, with)
		b.report.Add(against, of)
	}
	r.reportProcessors(b.report, base, with)
}

// reportProcessors reports what a transaction takes of the processors, with all that follows from it.
func (r race) reportProcessors(to *report.Report, base, with []*laps.Lap) {
	for _, of := range []struct {
		name string
		take func(*laps.Lap) float64
	}{{"cpu", (*laps.Lap).MachineCPU}, {"process-cpu", (*laps.Lap).ProcessCPU}} {
		against := report.Measured(fmt.Sprintf("%s/%s-%s", r.name, r.base.name, of.name), "µs/tx", eachLap(base, of.take))
		to.Add(against, report.Compared(fmt.Sprintf("%s/%s-%s", r.name, r.with.name, of.name), "µs/tx", eachLap(with, of.take), against.Scenario, eachLap(base, of.take)))
	}
}

// limitAt returns what a ratio should keep to.
func (r race) limitAt(p float64) float64 {
	if p > 50 && r.tail > 0 {
		return r.tail
	}
	return r.limit
}

// percentile compares a percentile of the latencies of all laps.
func (r race) percentile(p float64, base, with []*laps.Lap) (of, against report.Result) {
	in := func(l *laps.Lap) float64 { return l.Latencies().Percentile(p) }
	against = report.Measured(fmt.Sprintf("%s/%s-p%g", r.name, r.base.name, p), "ms", eachLap(base, in))
	of = report.Compared(fmt.Sprintf("%s/%s-p%g", r.name, r.with.name, p), "ms", eachLap(with, in), against.Scenario, eachLap(base, in))
	return of, against
}

// eachLap reads one quantity from all laps.
func eachLap(laps []*laps.Lap, quantity func(*laps.Lap) float64) stats.Series {
	values := make(stats.Series, len(laps))
	for i, l := range laps {
		values[i] = quantity(l)
	}
	return values
}
