package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/schedule"
	"github.com/outboxgo/outbox/bench/internal/services"
	"golang.org/x/sync/errgroup"
)

// sqlBulk records events, which are never committed.
const sqlBulk = `
INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
SELECT gen_random_uuid(), 'bench.order.placed.v1', 'bench', 'Order', 'o-' || n % 10000, '{}', 'application/json', now()
  FROM generate_series(1, $1::int) AS n`

// openTransactions compares the relay beside transactions that stay open with the relay alone: one that has written
// elsewhere, one that has recorded many events, and those of an operator.
func (t *track) openTransactions(ctx context.Context) error {
	for _, open := range []struct {
		name, sql string
		arg       any
	}{
		{"written", sqlOrder, "customer"}, {"bulk", sqlBulk, t.cfg.bulk},
	} {
		sql := services.InSchema(open.sql, t.schema)
		err := t.race(ctx, race{
			name: "open-transactions/" + open.name, rate: openRate, measured: t.lapTime(), limit: 1.2,
			base: side{"without", t.withRelay},
			with: side{"beside", func(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
				return t.besideOpen(ctx, rate, measured, sql, open.arg)
			}},
		})
		if err != nil {
			return err
		}
	}
	return t.raceBesideOperator(ctx)
}

// besideOpen is withRelay while another transaction, which has executed a statement, stays open.
func (t *track) besideOpen(ctx context.Context, rate int, measured time.Duration, sql string, arg any) (l *laps.Lap, err error) {
	tx, err := t.DB.Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, tx.Rollback(context.WithoutCancel(ctx))) }()
	if _, err := tx.Exec(ctx, sql, arg); err != nil {
		return nil, err
	}
	return t.withRelay(ctx, rate, measured)
}

// raceBesideOperator compares laps while an operator has resolved an event that waits for a topic, and does not commit.
func (t *track) raceBesideOperator(ctx context.Context) error {
	name, topic, err := t.missingTopic(ctx)
	if err != nil {
		return err
	}
	waiting, err := t.newBadTrack(ctx, badCase{name: "operator_" + name, topics: []string{topic}, rate: badRate, parked: true})
	if err != nil {
		return err
	}
	defer waiting.close()
	if err := waiting.park(ctx); err != nil {
		return fmt.Errorf("park events: %w", err)
	}
	return t.race(ctx, race{
		name: "open-transactions/operator", rate: openRate, measured: seconds(t.cfg.beside), limit: 1.2,
		base: side{"without", t.withRelay}, with: side{"beside", waiting.besideOperator},
	})
}

// sqlResolve resolves an event without a commit. PostgreSQL ends such a transaction when it was idle for 10 s.
const (
	sqlResolve   = `SELECT {schema}.outbox_resolve_failed(ARRAY(SELECT id FROM {schema}.outbox_failed ORDER BY id LIMIT 1), 'bench', 'looked at')`
	operatorOpen = 8 * time.Second
)

// besideOperator is beside while an operator opens one transaction after the other.
func (t *badTrack) besideOperator(ctx context.Context, rate int, measured time.Duration) (l *laps.Lap, err error) {
	g, ctx := errgroup.WithContext(ctx)
	operating, stop := context.WithCancel(ctx)
	g.Go(func() error {
		for operating.Err() == nil {
			if err := t.operate(operating); err != nil && operating.Err() == nil {
				return fmt.Errorf("operator: %w", err)
			}
		}
		return nil
	})
	g.Go(func() error {
		defer stop()
		l, err = t.beside(ctx, rate, measured)
		return err
	})
	return l, g.Wait()
}

func (t *badTrack) operate(ctx context.Context) (err error) {
	tx, err := t.DB.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tx.Rollback(context.WithoutCancel(ctx))) }()
	if _, err := tx.Exec(ctx, services.InSchema(sqlResolve, t.schema)); err != nil {
		return err
	}
	return schedule.Sleep(ctx, operatorOpen)
}
