package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

const (
	loadPerTx = 5000
	minEvents = 10_000 // that still make a rate
)

// stock is a schema full of recorded events.
type stock struct {
	schema string
	events int
	relays int // names that have been given away
}

// relayName returns one that no relay has had: it starts before the first event.
func (s *stock) relayName() string {
	s.relays++
	return fmt.Sprintf("bench-%d", s.relays)
}

// stock returns n recorded events. It records them once.
func (b *bench) stock(ctx context.Context, n int) (*stock, error) {
	if s := b.stocks[n]; s != nil {
		return s, nil
	}
	schema, err := b.newSchema(ctx, fmt.Sprintf("stock%d", n))
	if err != nil {
		return nil, err
	}
	start := time.Now()
	if err := b.load(ctx, schema, 0, n); err != nil {
		return nil, err
	}
	b.say("recorded %d events in %.1f s", n, time.Since(start).Seconds())
	if b.stocks == nil {
		b.stocks = map[int]*stock{}
	}
	b.stocks[n] = &stock{schema: schema, events: n}
	return b.stocks[n], nil
}

// load records n events from number first on, and leaves nothing to autovacuum
// and checkpoints.
func (b *bench) load(ctx context.Context, schema string, first, n int) error {
	rec, err := b.recorder(schema)
	if err != nil {
		return err
	}
	for done := 0; done < n; done += loadPerTx {
		if err := recordEvents(ctx, b, rec, newEvents(first+done, min(loadPerTx, n-done))); err != nil {
			return err
		}
	}
	for _, sql := range []string{`VACUUM (ANALYZE) {schema}.outbox`, `CHECKPOINT`} {
		if _, err := b.db.Exec(ctx, inSchema(sql, schema)); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

func recordEvents(ctx context.Context, b *bench, rec *outbox.Recorder, events []outbox.DomainEvent) error {
	return pgx.BeginFunc(ctx, b.db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, events...) })
}

// sqlSizes tells what an event is, in bytes of its texts.
const sqlSizes = `
SELECT avg(octet_length(payload::text))::float8,
       avg(octet_length(event_type) + octet_length(source) + octet_length(aggregate_type) + octet_length(aggregate_id) +
           octet_length(content_type) + pg_column_size(event_id) + pg_column_size(occurred_at))::float8
  FROM {schema}.outbox`

// noteSizes tells in the report what the events are.
func (b *bench) noteSizes(ctx context.Context, s *stock) error {
	var payload, metadata float64
	if err := b.db.QueryRow(ctx, inSchema(sqlSizes, s.schema)).Scan(&payload, &metadata); err != nil {
		return fmt.Errorf("measure events: %w", err)
	}
	b.report.note("events: %d, %d keys, payload %.0f bytes + metadata %.0f bytes", s.events, keys, payload, metadata)
	return nil
}
