package main

import (
	"context"
	"hash/fnv"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlBacktests makes the table of the backtests.
const sqlBacktests = `
CREATE TABLE backtest (
    id           uuid PRIMARY KEY,
    strategy_key text NOT NULL,
    starts       int  NOT NULL DEFAULT 0,
    result       bigint
)`

// backtests is the group backtest: jobs that take long. Meanwhile the worker renews the lease of
// the event, so that no other worker begins with it, and no transaction is open.
type backtests struct {
	db   *pgxpool.Pool
	bus  EventBus
	wake func()
	bar  time.Duration // how long one of them takes
}

func (b backtests) handlers() []outbox.Handler {
	return []outbox.Handler{outbox.HandleNoTx("BACKTEST_RUN", b.run)}
}

const sqlBacktest = `INSERT INTO backtest (id, strategy_key) VALUES ($1, $2)`

// order commands a backtest.
func (b backtests) order(ctx context.Context, scope Scope, bars int) error {
	id := uuid.New()
	return pgx.BeginFunc(ctx, b.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sqlBacktest, id, scope.StrategyKey); err != nil {
			return err
		}
		return b.bus.Record(ctx, tx, RunBacktest{id, scope, bars, now()})
	})
}

const (
	sqlBacktestStarted = `UPDATE backtest SET starts = starts + 1 WHERE id = $1 AND result IS NULL`
	sqlBacktestDone    = `UPDATE backtest SET result = $2 WHERE id = $1 AND result IS NULL`
)

// run runs a backtest and commits its result with the event about it, once.
func (b backtests) run(ctx context.Context, c RunBacktest, _ outbox.Metadata) error {
	started, err := b.db.Exec(ctx, sqlBacktestStarted, c.BacktestID)
	if err != nil || started.RowsAffected() == 0 {
		return err // if it is done, the command has come again
	}
	result, err := b.simulate(ctx, c)
	if err != nil {
		return err
	}
	defer b.wake()
	return pgx.BeginFunc(ctx, b.db, func(tx pgx.Tx) error {
		done, err := tx.Exec(ctx, sqlBacktestDone, c.BacktestID, result)
		if err != nil || done.RowsAffected() == 0 {
			return err
		}
		return b.bus.Record(ctx, tx, BacktestCompleted{c.BacktestID, c.Scope, result, now()})
	})
}

// simulate trades on the past, one bar after the other, and looks whether it shall end.
func (b backtests) simulate(ctx context.Context, c RunBacktest) (int64, error) {
	money := int64(100)
	prices := fnv.New32a()
	for range c.Bars {
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-time.After(b.bar):
		}
		_, _ = prices.Write(c.BacktestID[:]) // a hash takes everything
		money += int64(prices.Sum32()%3) - 1
	}
	return money, nil
}
