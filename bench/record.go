package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

// recordBench runs transactions that record, one after the other on one connection.
type recordBench struct {
	*bench
	conn   *pgx.Conn
	schema string
	rec    *outbox.Recorder
	events []outbox.DomainEvent
}

const manyEvents = 10_000

// record compares transactions that record events with the same ones that do
// not, and with a bare COPY of the same rows.
func (b *bench) record(ctx context.Context) error {
	conn, err := b.DB.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	d := &recordBench{bench: b, conn: conn.Conn(), events: orders.NewMany(0, manyEvents)}
	if d.schema, err = b.NewSchema(ctx, "record"); err != nil {
		return err
	}
	if d.rec, err = b.Recorder(d.schema); err != nil {
		return err
	}
	if err := d.queue(ctx); err != nil {
		return err
	}
	for _, events := range []int{1, 100} {
		if err := d.several(ctx, events); err != nil {
			return err
		}
	}
	return d.many(ctx)
}

// queue adds an event to the batch of a transaction of three statements.
func (d *recordBench) queue(ctx context.Context) error {
	medians, err := d.interleaved(ctx, d.cfg.records, d.purchase(false), d.purchase(true))
	if err != nil {
		return err
	}
	d.report.Add(report.Measured("record/three-statements", "µs/tx", medians[0]),
		report.Compared("record/three-and-queue", "µs/tx", medians[1], "record/three-statements", medians[0]).RatioAtMost(1.15))
	return nil
}

// several adds a Record of some events to a transaction of one statement.
func (d *recordBench) several(ctx context.Context, events int) error {
	medians, err := d.interleaved(ctx, d.cfg.records/events*min(events, 20), d.order(nothing), d.order(d.recordN(events)))
	if err != nil {
		return err
	}
	name := fmt.Sprintf("record/%d", events)
	d.report.Add(report.Measured(name+"-none", "µs/tx", medians[0]),
		report.Compared(name, "µs/tx", medians[1], name+"-none", medians[0]))
	return nil
}

// many compares a Record of 10,000 events with COPY.
func (d *recordBench) many(ctx context.Context) error {
	copied, err := d.NewSchema(ctx, "copy")
	if err != nil {
		return err
	}
	rows, err := d.copyRows()
	if err != nil {
		return err
	}
	const n = manyEvents
	medians, err := d.interleaved(ctx, d.cfg.records/100, d.order(nothing), d.order(copyInto(copied, rows)), d.order(d.recordN(n)))
	if err != nil {
		return err
	}
	name := fmt.Sprintf("record/%d", n)
	d.report.Add(report.Measured(name+"-none", "µs/tx", medians[0]), report.Measured(name+"-copy", "µs/tx", medians[1]),
		report.Compared(name, "µs/tx", medians[2], name+"-none", medians[0]),
		report.Compared(name, "µs/tx", medians[2], name+"-copy", medians[1]).RatioAtMost(1.5))
	return nil
}

// recording records the events of a transaction; transaction is all of it.
type (
	recording   func(ctx context.Context, tx pgx.Tx) error
	transaction func(ctx context.Context) error
)

func nothing(context.Context, pgx.Tx) error { return nil }

func (d *recordBench) recordN(n int) recording {
	return func(ctx context.Context, tx pgx.Tx) error { return d.rec.Record(ctx, tx, d.events[:n]...) }
}

// order returns a transaction of one statement and a recording.
func (d *recordBench) order(more recording) transaction {
	sql := services.InSchema(sqlOrder, d.schema)
	return func(ctx context.Context) error {
		return pgx.BeginFunc(ctx, d.conn, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, sql, "somebody"); err != nil {
				return err
			}
			return more(ctx, tx)
		})
	}
}

const (
	sqlItem  = `INSERT INTO {schema}.items (customer, sku) VALUES ($1, $2)`
	sqlStock = `UPDATE {schema}.stock SET sold = sold + 1 WHERE sku = $1`
)

// purchase is a transaction of three statements in one batch, with an event or
// without.
func (d *recordBench) purchase(event bool) transaction {
	order, item, stock := services.InSchema(sqlOrder, d.schema), services.InSchema(sqlItem, d.schema), services.InSchema(sqlStock, d.schema)
	n := 0
	return func(ctx context.Context) error {
		e := d.events[n%manyEvents].(orders.Placed)
		n++
		return pgx.BeginFunc(ctx, d.conn, func(tx pgx.Tx) error {
			var batch pgx.Batch
			batch.Queue(order, e.Customer)
			batch.Queue(item, e.Customer, e.Note)
			batch.Queue(stock, n%10_000)
			if event {
				if err := d.rec.Queue(ctx, &batch, e); err != nil {
					return err
				}
			}
			return tx.SendBatch(ctx, &batch).Close()
		})
	}
}

var copyColumns = []string{
	"event_id", "event_type", "source", "aggregate_type", "aggregate_id", "payload", "content_type", "occurred_at",
}

// copyRows are the rows that Record writes, encoded beforehand.
func (d *recordBench) copyRows() ([][]any, error) {
	rows := make([][]any, len(d.events))
	for i, event := range d.events {
		e := event.(orders.Placed)
		payload, err := json.Marshal(e)
		if err != nil {
			return nil, err
		}
		id, err := uuid.NewV7()
		if err != nil {
			return nil, err
		}
		rows[i] = []any{[16]byte(id), d.EventType(), orders.Source, orders.Aggregate, e.Order, string(payload), "application/json", e.At}
	}
	return rows, nil
}

// copyInto copies rows into another outbox, with the same columns, defaults and
// indexes.
func copyInto(schema string, rows [][]any) recording {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.CopyFrom(ctx, pgx.Identifier{schema, "outbox"}, copyColumns, pgx.CopyFromRows(rows))
		return err
	}
}

// interleaved runs transactions one after the other, n times all in all, after some
// that do not count. It returns the medians of each round, in microseconds.
func (b *bench) interleaved(ctx context.Context, n int, all ...transaction) ([]stats.Series, error) {
	const warm = 3
	medians := make([]stats.Series, len(all))
	perTurn := max(1, n/b.cfg.runs)
	for round := range b.cfg.runs {
		times := make([]stats.Series, len(all))
		for i := range warm + perTurn {
			for k, do := range all {
				start := time.Now()
				if err := do(ctx); err != nil {
					return nil, err
				}
				if i >= warm {
					times[k] = append(times[k], float64(time.Since(start).Nanoseconds())/1000)
				}
			}
		}
		for k := range all {
			medians[k] = append(medians[k], times[k].Median())
		}
		b.say("%d/%d transactions, µs: %.0f", round+1, b.cfg.runs, last(medians))
	}
	return medians, nil
}

func last(all []stats.Series) []float64 {
	values := make([]float64, len(all))
	for i, s := range all {
		values[i] = s[len(s)-1]
	}
	return values
}
