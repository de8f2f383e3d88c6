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
	"github.com/outboxgo/outbox"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"
)

const (
	lapPatience  = 30 * time.Second // for events that do not arrive
	openRate     = 1000             // transactions per second beside an open one
	enoughOfRate = 0.95             // a schedule that was kept
)

// track is where laps are run.
type track struct {
	*bench
	schema string
	rec    *outbox.Recorder
	reader *reader
	floor  *kgo.Client
	next   int // number of the next event
}

func (b *bench) newTrack(ctx context.Context, name string) (t *track, err error) {
	t = &track{bench: b, next: 1}
	if t.schema, err = b.newSchema(ctx, name); err != nil {
		return nil, err
	}
	if t.rec, err = b.recorder(t.schema); err != nil {
		return nil, err
	}
	if t.floor, err = newProducer(b.cfg.brokers); err != nil {
		return nil, err
	}
	if t.reader, err = b.newReader(ctx); err != nil {
		t.floor.Close()
		return nil, err
	}
	return t, nil
}

func (t *track) close() {
	t.floor.Close()
	t.reader.client.Close()
}

// way is how a transaction's event gets to Kafka. It returns when the
// transaction has committed, and says so to committed at once.
type way func(ctx context.Context, n int, committed func()) error

// newLap returns the next lap.
func (t *track) newLap(rate int, measured time.Duration) *lap {
	l := newLap(t.next, rate, seconds(t.cfg.warm), measured)
	t.next += l.total()
	return l
}

// run runs a lap and waits until its events have arrived.
func (t *track) run(ctx context.Context, l *lap, transact way) error {
	return t.runLap(ctx, l, t.reader.collect, transact)
}

// runLap runs a lap and waits until its events have arrived, which collect finds out.
func (b *bench) runLap(ctx context.Context, l *lap, collect func(context.Context, *lap) error, transact way) error {
	ctx, cancel := context.WithTimeout(ctx, offset(l.total(), l.rate)+lapPatience)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	l.start = time.Now()
	g.Go(func() error { return collect(ctx, l) })
	g.Go(func() error {
		return pace(ctx, l.rate, l.total(), b.cfg.workers, func(ctx context.Context, n int) error {
			l.begin(n)
			return transact(ctx, l.first+n, func() { l.commit(n) })
		})
	})
	return g.Wait()
}

// withRelay is the product.
func (t *track) withRelay(ctx context.Context, rate int, measured time.Duration) (*lap, error) {
	l := t.newLap(rate, measured)
	return l, t.relayed(ctx, l, outbox.RelayConfig{}, newEvent)
}

// relayed runs a lap of transactions that record, commit and wake. The relay
// runs in this process, and only during the lap.
func (t *track) relayed(ctx context.Context, l *lap, cfg outbox.RelayConfig, event func(n int) orderPlaced) error {
	cfg.Schema = t.schema
	relay, err := outbox.NewRelay(t.db, []kgo.Opt{kgo.SeedBrokers(t.cfg.brokers...)}, cfg)
	if err != nil {
		return err
	}
	sql := inSchema(sqlOrder, t.schema)
	running, stop := runRelay(ctx, relay)
	err = t.run(running, l, func(ctx context.Context, n int, committed func()) error {
		e := event(n)
		var batch pgx.Batch
		batch.Queue(sql, e.Customer)
		if err := t.rec.Queue(ctx, &batch, e); err != nil {
			return err
		}
		if err := t.transact(ctx, &batch); err != nil {
			return err
		}
		committed()
		relay.Wake()
		return nil
	})
	return errors.Join(err, stop())
}

// withoutRelay is the floor: the transaction without the event, and then the
// event's record straight to Kafka. It is what is quickest, and loses events.
func (t *track) withoutRelay(ctx context.Context, rate int, measured time.Duration) (*lap, error) {
	sql := inSchema(sqlOrder, t.schema)
	var acks kgo.FirstErrPromise
	l := t.newLap(rate, measured)
	err := t.run(ctx, l, func(ctx context.Context, n int, committed func()) error {
		e := newEvent(n)
		record, err := t.recordOf(e, t.topic)
		if err != nil {
			return err
		}
		var batch pgx.Batch
		batch.Queue(sql, e.Customer)
		if err := t.transact(ctx, &batch); err != nil {
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
func (t *track) transact(ctx context.Context, batch *pgx.Batch) error {
	return pgx.BeginFunc(ctx, t.db, func(tx pgx.Tx) error { return tx.SendBatch(ctx, batch).Close() })
}

// recordOf returns the record that a relay would make of an event.
func (s *services) recordOf(e orderPlaced, topic string) (*kgo.Record, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, err
	}
	payload, err := json.Marshal(e)
	if err != nil {
		return nil, err
	}
	r := row{
		occurredAt: e.At, eventID: []byte(id.String()), eventType: []byte(s.eventType()), source: []byte(source),
		aggregateType: []byte(aggregate), aggregateID: []byte(e.Order), payload: payload, contentType: []byte("application/json"),
	}
	var headers []kgo.RecordHeader
	record := r.record(topic, &headers)
	return &record, nil
}

// lapTime is how long one turn measures.
func (b *bench) lapTime() time.Duration { return seconds(b.cfg.seconds / float64(b.cfg.runs)) }

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// latency compares the relay with the floor at each rate.
func (b *bench) latency(ctx context.Context) error {
	t, err := b.newTrack(ctx, "latency")
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.warmUp(ctx); err != nil {
		return err
	}
	for _, rate := range b.cfg.rates {
		err := b.race(ctx, race{
			name: "latency/" + strconv.Itoa(rate), rate: rate, measured: b.lapTime(), limit: 2,
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
	if _, err := t.withoutRelay(ctx, openRate, t.lapTime()); err != nil {
		return err
	}
	_, err := t.withRelay(ctx, openRate, t.lapTime())
	return err
}

// open compares the relay beside an open transaction with the relay alone.
func (b *bench) open(ctx context.Context) error {
	t, err := b.newTrack(ctx, "open")
	if err != nil {
		return err
	}
	defer t.close()
	if err := t.warmUp(ctx); err != nil {
		return err
	}
	return b.race(ctx, race{
		name: "open", rate: openRate, measured: b.lapTime(), limit: 1.2,
		base: side{"without", t.withRelay}, with: side{"beside", t.besideOpen},
	})
}

// besideOpen is withRelay while another transaction that has written stays open.
func (t *track) besideOpen(ctx context.Context, rate int, measured time.Duration) (l *lap, err error) {
	tx, err := t.db.Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, tx.Rollback(context.WithoutCancel(ctx))) }()
	if _, err := tx.Exec(ctx, inSchema(sqlOrder, t.schema), "nobody"); err != nil {
		return nil, err
	}
	return t.withRelay(ctx, rate, measured)
}

// race is two kinds of laps that are run in turns.
type race struct {
	name       string
	rate       int
	measured   time.Duration
	limit      float64 // that the ratios at p50 and p99 should keep to; 0: none
	further    float64 // a percentile to report without a limit; 0: none
	base, with side
}

// side is one kind of laps of a race.
type side struct {
	name string
	run  func(ctx context.Context, rate int, measured time.Duration) (*lap, error)
}

// race runs a race and reports it.
func (b *bench) race(ctx context.Context, r race) error {
	var base, with []*lap
	for round := range b.cfg.runs {
		for _, of := range []struct {
			side
			laps *[]*lap
		}{{r.base, &base}, {r.with, &with}} {
			l, err := of.run(ctx, r.rate, r.measured)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", r.name, of.name, err)
			}
			*of.laps = append(*of.laps, l)
			b.say("%d/%d %s: %s p50 %.2f p99 %.2f ms", round+1, b.cfg.runs, r.name, of.name, l.latencies().median(), l.latencies().percentile(99))
		}
	}
	b.reportRace(r, base, with)
	return nil
}

// reportRace reports percentiles and their ratios, unless the schedule was
// not kept in half of the turns: then what was measured is another rate's.
func (b *bench) reportRace(r race, base, with []*lap) {
	for _, side := range []struct {
		name string
		laps []*lap
	}{{r.base.name, base}, {r.with.name, with}} {
		achieved := eachLap(side.laps, (*lap).achieved)
		if half := achieved.median(); half < enoughOfRate*float64(r.rate) {
			why := fmt.Sprintf("%s achieved %.0f of %d transactions/s", side.name, half, r.rate)
			b.say("%s FAILED: %s", r.name, why)
			b.report.add(failed(r.name, why))
			return
		}
		b.report.add(measured(fmt.Sprintf("%s/%s-rate", r.name, side.name), "tx/s", achieved))
	}
	for _, p := range []float64{50, 99} {
		of, against := r.percentile(p, base, with)
		if r.limit > 0 {
			of = of.ratioAtMost(r.limit)
		}
		b.report.add(against, of)
	}
	if r.further > 0 {
		of, against := r.percentile(r.further, base, with)
		b.report.add(against, of)
	}
}

// percentile compares a percentile of the latencies of all laps.
func (r race) percentile(p float64, base, with []*lap) (of, against result) {
	in := func(l *lap) float64 { return l.latencies().percentile(p) }
	against = measured(fmt.Sprintf("%s/%s-p%g", r.name, r.base.name, p), "ms", eachLap(base, in))
	of = compared(fmt.Sprintf("%s/%s-p%g", r.name, r.with.name, p), "ms", eachLap(with, in), against.Scenario, eachLap(base, in))
	return of, against
}

// eachLap reads one quantity from all laps.
func eachLap(laps []*lap, quantity func(*lap) float64) series {
	values := make(series, len(laps))
	for i, l := range laps {
		values[i] = quantity(l)
	}
	return values
}
