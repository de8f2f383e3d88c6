package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/lib/pq"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/outboxsql"
)

// recordSQLBench runs transactions that do nothing but record. Each takes a connection
// from its pool, as one of a service does.
type recordSQLBench struct {
	*bench
	rec    *outbox.Recorder
	events []outbox.DomainEvent
	std    *sql.DB // of the pool that pgx uses, too
	pq     *sql.DB
}

// recordSQLSizes are numbers of events of a transaction, with the most that one of database/sql
// may take over one of pgx. Through database/sql all of them are one JSON document; through
// pgx one event is a row, ten are arrays, and a thousand are copied.
var recordSQLSizes = []struct {
	events int
	most   float64
}{{1, 1.3}, {10, 1.3}, {1000, 2}}

// recordSQL compares transactions of database/sql that record events with those of pgx.
func (b *bench) recordSQL(ctx context.Context) (err error) {
	schema, err := b.NewSchema(ctx, "record_sql")
	if err != nil {
		return err
	}
	connector, err := pq.NewConnector(b.cfg.Postgres)
	if err != nil {
		return fmt.Errorf("lib/pq: %w", err)
	}
	d := &recordSQLBench{bench: b, std: stdlib.OpenDBFromPool(b.DB), pq: sql.OpenDB(connector)}
	defer func() { err = errors.Join(err, d.std.Close(), d.pq.Close()) }()
	d.events = orders.NewMany(0, recordSQLSizes[len(recordSQLSizes)-1].events)
	if d.rec, err = b.Recorder(schema); err != nil {
		return err
	}
	for _, size := range recordSQLSizes {
		if err := d.compare(ctx, size.events, size.most); err != nil {
			return err
		}
	}
	return nil
}

// compare records some events in each transaction.
func (d *recordSQLBench) compare(ctx context.Context, events int, most float64) error {
	n := max(d.cfg.runs, d.cfg.records/max(1, events/100))
	medians, err := d.interleaved(ctx, n, d.native(events), d.through(d.std, events), d.through(d.pq, events))
	if err != nil {
		return err
	}
	name := fmt.Sprintf("record-sql/%d", events)
	d.report.Add(report.Measured(name+"-pgx", "µs/tx", medians[0]),
		report.Compared(name, "µs/tx", medians[1], name+"-pgx", medians[0]).RatioAtMost(most),
		report.Compared(name+"-pq", "µs/tx", medians[2], name+"-pgx", medians[0]))
	return nil
}

// native returns a transaction of pgx.
func (d *recordSQLBench) native(events int) transaction {
	return func(ctx context.Context) error {
		return pgx.BeginFunc(ctx, d.DB, func(tx pgx.Tx) error { return d.rec.Record(ctx, tx, d.events[:events]...) })
	}
}

// through returns a transaction of database/sql.
func (d *recordSQLBench) through(db *sql.DB, events int) transaction {
	return func(ctx context.Context) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return fmt.Errorf("begin: %w", err)
		}
		if err := outboxsql.Record(ctx, tx, d.rec, d.events[:events]...); err != nil {
			return errors.Join(err, tx.Rollback())
		}
		return tx.Commit()
	}
}
