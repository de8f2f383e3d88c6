package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/riverqueue/river"
)

// busEvent returns event n for one of so many keys.
func busEvent(n, keys int) orders.Placed {
	e := orders.New(n)
	e.Order = fmt.Sprintf("order-%05d", e.Total%keys)
	return e
}

// recordEvents is [busWay.record] for workers.
func (s *bus) recordEvents(ctx context.Context, tx pgx.Tx, events []orders.Placed) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return s.rec.Record(ctx, tx, all...)
}

// insertJobs is [busWay.record] for River.
func (s *bus) insertJobs(ctx context.Context, tx pgx.Tx, events []orders.Placed) error {
	jobs := make([]river.InsertManyParams, len(events))
	for i, e := range events {
		jobs[i].Args = riverJob(e)
	}
	_, err := s.inserter.InsertManyTx(ctx, tx, jobs)
	return err
}

// ddlEffects makes the table of effects anew.
const ddlEffects = `
DROP TABLE IF EXISTS {schema}.effects;
CREATE TABLE {schema}.effects (id bigserial PRIMARY KEY, key text NOT NULL, n bigint NOT NULL);`

// sqlEffect is the effect of a handler.
const sqlEffect = `INSERT INTO {schema}.effects (key, n) VALUES ($1, $2)`

// lap records a way's share of n events, has them handled by a process of their own
// and checks what came of it.
func (s *bus) lap(ctx context.Context, w busWay, n, keys int) (u used, err error) {
	h, err := s.fill(ctx, w, n/w.share, keys)
	if err != nil {
		return u, err
	}
	return s.handle(ctx, w, h)
}

// fill records n events in many transactions, one after the other, so that their numbers
// are their order. It leaves nothing to autovacuum and checkpoints.
func (s *bus) fill(ctx context.Context, w busWay, n, keys int) (h handled, err error) {
	h = handled{first: s.next, n: n}
	s.next += n
	err = s.newEffects(ctx, w.schema)
	for done := 0; done < n && err == nil; done += busPerTx {
		events := make([]orders.Placed, min(busPerTx, n-done))
		for i := range events {
			events[i] = busEvent(h.first+done+i, keys)
		}
		err = pgx.BeginFunc(ctx, s.DB, func(tx pgx.Tx) error { return w.record(ctx, tx, events) })
	}
	if err == nil {
		err = s.tidy(ctx, w.schema)
	}
	if err != nil {
		return h, fmt.Errorf("%s: record: %w", w.name, err)
	}
	return h, nil
}

// handle has a process of its own handle events, and checks what came of them.
func (s *bus) handle(ctx context.Context, w busWay, h handled) (u used, err error) {
	j := w.job
	j.Schema, j.Events, j.EventType = w.schema, h.n, s.EventType()
	if err := spawn(ctx, s.connect(j), s.stderr, &u, nil); err != nil {
		return u, fmt.Errorf("%s: %w", w.name, err)
	}
	if err := s.checkLap(ctx, w, h); err != nil {
		return u, fmt.Errorf("%s: %w", w.name, err)
	}
	return u, nil
}

func (s *bus) newEffects(ctx context.Context, schema string) error {
	// Several statements, which only the simple protocol takes.
	if _, err := s.DB.Exec(ctx, services.InSchema(ddlEffects, schema), pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("create effects: %w", err)
	}
	return nil
}

// sqlTables lists the tables of a schema.
const sqlTables = `
SELECT c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = $1 AND c.relkind = 'r'
 ORDER BY c.relname`

// tidy vacuums all tables of a schema.
func (s *bus) tidy(ctx context.Context, schema string) error {
	rows, err := s.DB.Query(ctx, sqlTables, schema)
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	for _, table := range tables {
		if _, err := s.DB.Exec(ctx, "VACUUM (ANALYZE) "+pgx.Identifier{schema, table}.Sanitize()); err != nil {
			return fmt.Errorf("vacuum %s: %w", table, err)
		}
	}
	if _, err := s.DB.Exec(ctx, "CHECKPOINT"); err != nil {
		return fmt.Errorf("CHECKPOINT: %w", err)
	}
	return nil
}

// checkLap finds out whether each event was handled once, and where that is promised
// those of a key in their order.
func (s *bus) checkLap(ctx context.Context, w busWay, h handled) error {
	if err := s.checkEffects(ctx, w.schema, h); err != nil {
		return err
	}
	if err := s.checkOrder(ctx, w); err != nil {
		return err
	}
	return w.check(ctx, h)
}

// sqlEffects counts effects, and the events that have had one.
const sqlEffects = `SELECT count(*), count(DISTINCT n), coalesce(min(n), 0), coalesce(max(n), 0) FROM {schema}.effects`

func (s *bus) checkEffects(ctx context.Context, schema string, h handled) error {
	var effects, events, least, most int
	if err := s.DB.QueryRow(ctx, services.InSchema(sqlEffects, schema)).Scan(&effects, &events, &least, &most); err != nil {
		return fmt.Errorf("count effects: %w", err)
	}
	if effects != h.n || events != h.n || least != h.first || most != h.last() {
		return fmt.Errorf("events %d to %d had %d effects: of %d events from %d to %d", h.first, h.last(), effects, events, least, most)
	}
	return nil
}

// sqlLate counts the effects that came after that of a later event of their key.
const sqlLate = `
SELECT count(*) FILTER (WHERE late)
  FROM (SELECT n < max(n) OVER (PARTITION BY key ORDER BY id) AS late FROM {schema}.effects) AS e`

// checkOrder looks at how the events of each key were handled after they were recorded
// one by one.
func (s *bus) checkOrder(ctx context.Context, w busWay) error {
	var late int
	if err := s.DB.QueryRow(ctx, services.InSchema(sqlLate, w.schema)).Scan(&late); err != nil {
		return fmt.Errorf("look at the order of effects: %w", err)
	}
	if late > 0 && w.ordered {
		return fmt.Errorf("%d events were handled after later ones of their keys", late)
	}
	return nil
}

// sqlJobs counts jobs, and those that took one attempt.
const sqlJobs = `
SELECT count(*), count(*) FILTER (WHERE state = 'completed' AND attempt = 1)
  FROM {schema}.river_job
 WHERE (args ->> 'n')::bigint BETWEEN $1 AND $2`

// checkJobs is [busWay.check] for River.
func (s *bus) checkJobs(ctx context.Context, h handled) error {
	return s.checkRows(ctx, services.InSchema(sqlJobs, s.river.schema), h)
}

// sqlDeliveries counts deliveries, and those that took one attempt.
const sqlDeliveries = `
SELECT count(*), count(*) FILTER (WHERE status = 'DONE' AND attempt_count = 1)
  FROM {schema}.event_delivery
 WHERE (payload ->> 'n')::bigint BETWEEN $1 AND $2`

// checkDeliveries is [busWay.check] for workers.
func (s *bus) checkDeliveries(ctx context.Context, h handled) error {
	return s.checkRows(ctx, services.InSchema(sqlDeliveries, s.workers.schema), h)
}

// checkRows finds out whether a queue has a row for each event, and was done with it at the first
// attempt.
func (s *bus) checkRows(ctx context.Context, sql string, h handled) error {
	var rows, done int
	if err := s.DB.QueryRow(ctx, sql, h.first, h.last()).Scan(&rows, &done); err != nil {
		return fmt.Errorf("count rows of the queue: %w", err)
	}
	if rows != h.n || done != h.n {
		return fmt.Errorf("for %d events there are %d rows, of which %d were done at the first attempt", h.n, rows, done)
	}
	return nil
}
