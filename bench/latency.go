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

// run runs one lap and waits until all of its events have arrived.
func (t *track) run(ctx context.Context, rate int, measured time.Duration, transact way) (*lap, error) {
	l := newLap(t.next, rate, seconds(t.cfg.warm), measured)
	t.next += l.total()
	ctx, cancel := context.WithTimeout(ctx, offset(l.total(), rate)+lapPatience)
	defer cancel()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return t.reader.collect(ctx, l) })
	g.Go(func() error {
		return pace(ctx, rate, l.total(), t.cfg.workers, func(ctx context.Context, n int) error {
			return transact(ctx, l.first+n, func() { l.commit(n) })
		})
	})
	return l, g.Wait()
}

// withRelay is the product: record, commit, wake. The relay runs in this
// process, and only during the lap.
func (t *track) withRelay(ctx context.Context, rate int, measured time.Duration) (l *lap, err error) {
	relay, err := outbox.NewRelay(t.db, []kgo.Opt{kgo.SeedBrokers(t.cfg.brokers...)}, outbox.RelayConfig{Schema: t.schema})
	if err != nil {
		return nil, err
	}
	sql := inSchema(sqlOrder, t.schema)
	running, stop := runRelay(ctx, relay)
	l, err = t.run(running, rate, measured, func(ctx context.Context, n int, committed func()) error {
		e := newEvent(n)
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
	return l, errors.Join(err, stop())
}

// withoutRelay is the floor: the transaction without the event, and then the
// event's record straight to Kafka. It is what is quickest, and loses events.
func (t *track) withoutRelay(ctx context.Context, rate int, measured time.Duration) (*lap, error) {
	sql := inSchema(sqlOrder, t.schema)
	var acks kgo.FirstErrPromise
	l, err := t.run(ctx, rate, measured, func(ctx context.Context, n int, committed func()) error {
		e := newEvent(n)
		record, err := t.recordOf(e)
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
func (t *track) recordOf(e orderPlaced) (*kgo.Record, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, err
	}
	payload, err := json.Marshal(e)
	if err != nil {
		return nil, err
	}
	r := row{
		occurredAt: e.At, eventID: []byte(id.String()), eventType: []byte(t.eventType()), source: []byte(source),
		aggregateType: []byte(aggregate), aggregateID: []byte(e.Order), payload: payload, contentType: []byte("application/json"),
	}
	var headers []kgo.RecordHeader
	record := r.record(t.topic, &headers)
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
		name := "latency/" + strconv.Itoa(rate)
		base, with, err := t.race(ctx, name, rate, "floor", t.withoutRelay, "relay", t.withRelay)
		if err != nil {
			return err
		}
		b.reportRace(name, rate, base, with, "floor", "relay", 2)
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
	base, with, err := t.race(ctx, "open", openRate, "without", t.withRelay, "beside", t.besideOpen)
	if err != nil {
		return err
	}
	b.reportRace("open", openRate, base, with, "without", "beside", 1.2)
	return nil
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

// runner runs a lap in one way.
type runner func(ctx context.Context, rate int, measured time.Duration) (*lap, error)

// race runs two kinds of laps in turns.
func (t *track) race(ctx context.Context, name string, rate int, nameA string, a runner, nameB string, b runner) (lapsA, lapsB []*lap, err error) {
	for turn := range t.cfg.runs {
		la, err := a(ctx, rate, t.lapTime())
		if err != nil {
			return nil, nil, fmt.Errorf("%s, %s: %w", name, nameA, err)
		}
		lb, err := b(ctx, rate, t.lapTime())
		if err != nil {
			return nil, nil, fmt.Errorf("%s, %s: %w", name, nameB, err)
		}
		lapsA, lapsB = append(lapsA, la), append(lapsB, lb)
		t.say("%d/%d %s: %s p50 %.2f p99 %.2f ms, %s p50 %.2f p99 %.2f ms", turn+1, t.cfg.runs, name,
			nameA, la.latencies().median(), la.latencies().percentile(99), nameB, lb.latencies().median(), lb.latencies().percentile(99))
	}
	return lapsA, lapsB, nil
}

// reportRace reports percentiles and their ratios, unless the schedule was
// not kept in half of the turns: then what was measured is another rate's.
func (b *bench) reportRace(name string, rate int, base, with []*lap, baseName, withName string, limit float64) {
	for _, side := range []struct {
		name string
		laps []*lap
	}{{baseName, base}, {withName, with}} {
		achieved := eachLap(side.laps, (*lap).achieved)
		r := measured(fmt.Sprintf("%s/%s-rate", name, side.name), "tx/s", achieved)
		if half := achieved.median(); half < enoughOfRate*float64(rate) {
			why := fmt.Sprintf("%s achieved %.0f of %d transactions/s", side.name, half, rate)
			b.say("%s FAILED: %s", name, why)
			b.report.add(failed(name, why))
			return
		}
		b.report.add(r)
	}
	for _, p := range []float64{50, 99} {
		of := func(l *lap) float64 { return l.latencies().percentile(p) }
		against := fmt.Sprintf("%s/%s-p%g", name, baseName, p)
		b.report.add(measured(against, "ms", eachLap(base, of)),
			compared(fmt.Sprintf("%s/%s-p%g", name, withName, p), "ms", eachLap(with, of), against, eachLap(base, of)).ratioAtMost(limit))
	}
}

// eachLap reads one quantity from all laps.
func eachLap(laps []*lap, quantity func(*lap) float64) series {
	values := make(series, len(laps))
	for i, l := range laps {
		values[i] = quantity(l)
	}
	return values
}
