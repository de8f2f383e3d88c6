package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/bench/internal/stats"
)

const (
	walRate  = 400         // transactions per second, which every peer keeps
	walShare = 4           // of the events: as many transactions after a checkpoint are not measured, because they write pages in full
	walQuiet = time.Second // after the last arrival, for what a relay writes late
)

// wal measures how much WAL a transaction with an event writes, and its relay. The
// transaction without an event is the floor.
func (b *bench) wal(ctx context.Context) (err error) {
	all, closeAll, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeAll()) }()
	floor, err := b.newFloor(ctx)
	if err != nil {
		return err
	}
	none, bytes, why := stats.Series{}, map[string]stats.Series{}, map[string]string{}
	for round := range b.cfg.runs {
		per, err := b.walOf(ctx, floor)
		if err != nil {
			return err
		}
		none = append(none, per)
		for _, r := range all {
			if why[r.name] != "" {
				continue
			}
			per, err := b.walOf(ctx, r)
			if errors.Is(err, errBehind) {
				why[r.name] = fmt.Sprintf("fell behind %d transactions/s", walRate)
				continue
			}
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
			bytes[r.name] = append(bytes[r.name], per-none[round])
			b.say("%d/%d wal/%s: %s bytes/event", round+1, b.cfg.runs, r.name, report.Number(per-none[round]))
		}
	}
	b.report.Add(report.Measured("wal/without", "bytes/tx", none))
	for _, r := range all {
		if why[r.name] != "" {
			b.report.Add(report.Failed("wal/"+r.name, why[r.name]))
			continue
		}
		b.report.Add(report.Measured("wal/"+r.name, "bytes/event", bytes[r.name]))
	}
	for _, r := range all {
		if isOurs(r.name) || why[r.name] != "" || why[ours] != "" {
			continue
		}
		b.report.Add(report.Compared("wal/"+ours, "bytes/event", bytes[ours], "wal/"+r.name, bytes[r.name]))
	}
	return nil
}

// walOf returns the bytes of WAL that a transaction of an instance takes, with all that
// follows from it.
func (b *bench) walOf(ctx context.Context, i instance) (perTx float64, err error) {
	stop := func() error { return nil }
	if _, silent := i.(*floor); !silent {
		if stop, err = b.started(ctx, i); err != nil {
			return 0, err
		}
	}
	defer func() { err = errors.Join(err, stop()) }()
	if _, err := b.DB.Exec(ctx, `CHECKPOINT`); err != nil {
		return 0, fmt.Errorf("checkpoint: %w", err)
	}
	if err := b.transactions(ctx, i, b.cfg.walEvents/walShare); err != nil {
		return 0, err
	}
	before, err := b.walPosition(ctx)
	if err != nil {
		return 0, err
	}
	if err := b.transactions(ctx, i, b.cfg.walEvents); err != nil {
		return 0, err
	}
	after, err := b.walPosition(ctx)
	return float64(after-before) / float64(b.cfg.walEvents), err
}

// transactions runs n transactions, waits until their events have arrived, and a while more.
func (b *bench) transactions(ctx context.Context, i instance, n int) error {
	if f, silent := i.(*floor); silent {
		return schedule.Pace(ctx, walRate, n, b.cfg.workers, func(ctx context.Context, _ int) error {
			return f.write(ctx, orders.New(0), func() {})
		})
	}
	if _, err := b.lap(ctx, i, walRate, 0, time.Duration(n)*time.Second/walRate); err != nil {
		return err
	}
	return schedule.Sleep(ctx, walQuiet)
}

// walPosition returns how many bytes of WAL have been written since the cluster was made.
func (b *bench) walPosition(ctx context.Context) (bytes int64, err error) {
	err = b.DB.QueryRow(ctx, `SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint`).Scan(&bytes)
	if err != nil {
		return 0, fmt.Errorf("read the position in the WAL: %w", err)
	}
	return bytes, nil
}

// floor is a transaction without an event.
type floor struct {
	b     *bench
	order string // SQL
}

func (b *bench) newFloor(ctx context.Context) (*floor, error) {
	schema, err := b.newSchemaWithOrders(ctx, b.newName("floor"))
	return &floor{b: b, order: services.InSchema(sqlOrder, schema)}, err
}

func (f *floor) write(ctx context.Context, e orders.Placed, committed func()) error {
	var batch pgx.Batch
	batch.Queue(f.order, e.Customer)
	if err := f.b.transact(ctx, &batch); err != nil {
		return err
	}
	committed()
	return nil
}

func (f *floor) fill(context.Context, []orders.Placed) error { return nil }

func (f *floor) relay(context.Context) (stop func() error, err error) {
	return func() error { return nil }, nil
}

func (f *floor) close(context.Context) error { return nil }
