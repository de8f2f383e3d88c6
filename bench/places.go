package main

import (
	"context"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/tables"
)

const (
	placesMoves      = 200 // of each turn
	placesPartitions = 12
	placesLimit      = 1.03 // of a drain
)

// places compares moves of the cursor that say where the events of their batch are with moves that do not: time, WAL
// of an event with its share of the move, and what that makes of a drain.
func (b *bench) places(ctx context.Context) error {
	schema, err := b.NewSchema(ctx, "places")
	if err != nil {
		return err
	}
	leases := lease.NewStore(b.DB, schema, "default", time.Hour)
	l, err := leases.Acquire(ctx)
	if err != nil {
		return err
	}
	m := mover{bench: b, store: cursor.NewStore(b.DB, schema, "default"), lease: l}
	if m.at, err = m.store.Load(ctx, l); err != nil {
		return err
	}
	m.at.Window = m.at.Base
	var perEvent stats.Series // µs that a drain takes longer for places
	for _, batch := range []int{1, 10, 1000} {
		events := placesOf(batch)
		var with, without, walWith, walWithout, encode stats.Series
		for round := range b.cfg.runs + 1 {
			began := time.Now()
			for range placesMoves {
				encodePlaces(events)
			}
			encoding := micros(time.Since(began)) / placesMoves
			plain, plainWAL, err := m.moves(ctx, tables.SentRow{})
			if err != nil {
				return err
			}
			took, wal, err := m.moves(ctx, encodePlaces(events))
			if err != nil {
				return err
			}
			if round == 0 { // for warming up
				continue
			}
			with, without, encode = append(with, took+encoding), append(without, plain), append(encode, encoding)
			walWith, walWithout = append(walWith, wal), append(walWithout, plainWAL)
		}
		name := func(what string) string { return fmt.Sprintf("places/%s-%d", what, batch) }
		b.report.Add(report.Measured(name("encode"), "µs", encode), report.Measured(name("move-without"), "µs", without),
			report.Compared(name("move"), "µs", with, name("move-without"), without),
			report.Measured(name("wal-without"), "bytes/move", walWithout),
			report.Compared(name("wal"), "bytes/move", walWith, name("wal-without"), walWithout))
		perEvent = nil
		for i := range with {
			perEvent = append(perEvent, (with[i]-without[i])/float64(batch))
		}
	}
	return b.placesOfDrain(ctx, perEvent)
}

// placesOfDrain compares a drain with what it would take without the places, which cost so much of each event.
func (b *bench) placesOfDrain(ctx context.Context, perEvent stats.Series) error {
	s, err := b.stock(ctx, b.cfg.events)
	if err != nil {
		return err
	}
	runs, err := b.inTurns(ctx, []contestant{{"places/drain", s, job{Work: "relay"}}})
	if err != nil {
		return err
	}
	drain := each(runs["places/drain"], used.micros)
	var without stats.Series
	for _, took := range drain {
		without = append(without, took-perEvent.Median())
	}
	b.report.Add(report.Measured("places/drain-without", "µs/event", without),
		report.Compared("places/drain", "µs/event", drain, "places/drain-without", without).RatioAtMost(placesLimit))
	return nil
}

// mover moves a cursor.
type mover struct {
	*bench
	store *cursor.Store
	lease *lease.Lease
	at    cursor.Position
}

// moves moves the cursor some times, and returns the medians of the times, in microseconds, and of the bytes of WAL.
func (m *mover) moves(ctx context.Context, row tables.SentRow) (took, wal float64, err error) {
	var times, bytes stats.Series
	before, err := m.written(ctx)
	if err != nil {
		return 0, 0, err
	}
	for range placesMoves {
		m.at.Sent = row
		m.at.Last++
		m.at.Highest++
		start := time.Now()
		id, err := m.store.Move(ctx, m.lease, m.at, nil)
		if err != nil {
			return 0, 0, err
		}
		times = append(times, micros(time.Since(start)))
		m.at.CursorID, m.at.Epoch = id, m.lease.Epoch
		after, err := m.written(ctx)
		if err != nil {
			return 0, 0, err
		}
		bytes, before = append(bytes, after-before), after
	}
	return times.Median(), bytes.Median(), nil
}

// written returns how much WAL there is.
func (m *mover) written(ctx context.Context) (bytes float64, err error) {
	err = m.DB.QueryRow(ctx, `SELECT (pg_current_wal_insert_lsn() - '0/0')::float8`).Scan(&bytes)
	return bytes, err
}

// placesOf returns the events of a batch, as they are when many keys are in use.
func placesOf(batch int) (events []tables.Sent) {
	var next [placesPartitions]int64
	for i := range batch {
		p := i * 7919 % 104729 % placesPartitions
		events = append(events, tables.Sent{OutboxID: int64(50_000_000 + i), Topic: "order-events", Partition: int32(p), Offset: 4_000_000 + next[p]})
		next[p]++
	}
	return events
}

func encodePlaces(events []tables.Sent) tables.SentRow {
	var e tables.SentEncoder
	at := time.Now()
	for _, s := range events {
		e.Add(s, at)
	}
	return e.Row()
}

func micros(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
