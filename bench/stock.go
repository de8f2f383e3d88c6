package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
	"golang.org/x/sync/errgroup"
)

const minEvents = 10_000 // that still make a rate

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
	s, err := b.newStock(ctx, fmt.Sprintf("stock%d", n))
	if err != nil {
		return nil, err
	}
	if err := b.fill(ctx, s, n, smallEvents); err != nil {
		return nil, err
	}
	if b.stocks == nil {
		b.stocks = map[int]*stock{}
	}
	b.stocks[n] = s
	return s, nil
}

// newStock returns an empty one.
func (b *bench) newStock(ctx context.Context, name string) (*stock, error) {
	schema, err := b.NewSchema(ctx, name)
	return &stock{schema: schema}, err
}

// fill records events until the stock has n, and tells how long that took.
func (b *bench) fill(ctx context.Context, s *stock, n int, k kind) error {
	start, more := time.Now(), n-s.events
	if err := b.load(ctx, s.schema, s.events, more, k); err != nil {
		return err
	}
	s.events = n
	b.say("recorded %d events in %.1f s", more, time.Since(start).Seconds())
	return nil
}

// kind says what events are recorded, and how.
type kind struct {
	event   func(n int) outbox.DomainEvent
	perTx   int // events in a transaction
	writers int // at the same time
}

var smallEvents = kind{event: func(n int) outbox.DomainEvent { return orders.New(n) }, perTx: 5000, writers: 1}

// load records n events from number first on, and leaves nothing to autovacuum
// and checkpoints.
func (b *bench) load(ctx context.Context, schema string, first, n int, k kind) error {
	rec, err := b.Recorder(schema)
	if err != nil {
		return err
	}
	g, recording := errgroup.WithContext(ctx)
	g.SetLimit(k.writers)
	for done := 0; done < n && recording.Err() == nil; done += k.perTx {
		g.Go(func() error {
			events := make([]outbox.DomainEvent, min(k.perTx, n-done))
			for i := range events {
				events[i] = k.event(first + done + i)
			}
			return recordEvents(recording, b, rec, events)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, sql := range []string{`VACUUM (ANALYZE) {schema}.outbox`, `CHECKPOINT`} {
		if _, err := b.DB.Exec(ctx, services.InSchema(sql, schema)); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

func recordEvents(ctx context.Context, b *bench, rec *outbox.Recorder, events []outbox.DomainEvent) error {
	return pgx.BeginFunc(ctx, b.DB, func(tx pgx.Tx) error { return rec.Record(ctx, tx, events...) })
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
	if err := b.DB.QueryRow(ctx, services.InSchema(sqlSizes, s.schema)).Scan(&payload, &metadata); err != nil {
		return fmt.Errorf("measure events: %w", err)
	}
	b.report.Note("events: %d, %d keys, payload %.0f bytes + metadata %.0f bytes", s.events, orders.Keys, payload, metadata)
	return nil
}
