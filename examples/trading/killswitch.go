package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// system is the group system, which has the kill switch: it pauses the stream of commands for
// the group order-executor, in all processes and over restarts, as
//
//	outbox consumer pause --group order-executor --topic everbit.trade.command --reason "kill switch"
//
// does. Commands wait meanwhile; what has been sent is reconciled afterwards. A process that
// shall stop on its own account, in which the clock is wrong for example, calls Worker.Pause.
type system struct{ groups *outboxops.Consumers }

func (s system) handlers() []outbox.Handler {
	return []outbox.Handler{outbox.HandleNoTx("TRADING_STOPPED_OR_RESUMED", s.killSwitchChanged)}
}

func (s system) killSwitchChanged(ctx context.Context, e KillSwitchChanged, _ outbox.Metadata) error {
	change := s.groups.Resume
	if e.On {
		change = s.groups.Pause
	}
	err := change(ctx, orderExecutor, tradeCommand, outboxops.AuditInfo{Operator: e.Operator, Reason: e.Reason})
	if errors.Is(err, outboxops.ErrStatus) {
		return nil // it is so already
	}
	return err
}

// killSwitch records that the switch is changed.
func killSwitch(ctx context.Context, db *pgxpool.Pool, bus EventBus, on bool, reason string) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		return bus.Record(ctx, tx, KillSwitchChanged{On: on, Operator: "risk", Reason: reason, happened: now()})
	})
}
