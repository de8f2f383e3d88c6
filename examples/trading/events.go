package main

import (
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
)

// The streams. They are topics: in Kafka they have the same names.
const (
	tradeCommand    = "everbit.trade.command"
	tradeEvent      = "everbit.trade.event"
	backtestCommand = "everbit.backtest.command"
	backtestEvent   = "everbit.backtest.event"
	systemEvent     = "everbit.system.event"
)

// CreateOrderAttempt commands that an order be placed.
type CreateOrderAttempt struct {
	OrderIntent
	happened
}

// OrderAccepted says that the exchange has an order.
type OrderAccepted struct {
	OrderIntent
	Identifier string `json:"identifier"`
	OrderID    string `json:"orderId"` // the exchange's
	happened
}

// OrderOverdue says that the outcome of an attempt has not been known for a while. It is recorded with the attempt,
// as an event that is due later, and cancelled with the outcome.
type OrderOverdue struct {
	OrderIntent
	Identifier string `json:"identifier"`
	happened
}

// RunBacktest commands that a strategy be tried on the past.
type RunBacktest struct {
	BacktestID uuid.UUID `json:"backtestId"`
	Scope
	Bars int `json:"bars"`
	happened
}

// BacktestCompleted says what would have become of 100.
type BacktestCompleted struct {
	BacktestID uuid.UUID `json:"backtestId"`
	Scope
	Result int64 `json:"result"`
	happened
}

// KillSwitchChanged says whether trading is stopped.
type KillSwitchChanged struct {
	On       bool   `json:"on"`
	Operator string `json:"operator"`
	Reason   string `json:"reason"`
	happened
}

// happened is what all events have.
type happened struct {
	At time.Time `json:"occurredAt"`
}

// OccurredAt makes every struct that embeds it an outbox.DomainEvent.
func (h happened) OccurredAt() time.Time { return h.At }

func now() happened { return happened{time.Now()} }

func (i OrderIntent) aggregateID() string             { return i.ID.String() }
func (e CreateOrderAttempt) aggregateID() string      { return e.OrderIntent.aggregateID() }
func (e OrderAccepted) aggregateID() string           { return e.OrderIntent.aggregateID() }
func (e OrderOverdue) aggregateID() string            { return e.OrderIntent.aggregateID() }
func (e RunBacktest) aggregateID() string             { return e.BacktestID.String() }
func (e BacktestCompleted) aggregateID() string       { return e.BacktestID.String() }
func (KillSwitchChanged) aggregateID() string         { return "kill-switch" }
func (e CreateOrderAttempt) strategyInMarket() string { return e.StrategyKey + "/" + e.Market }
func (e OrderAccepted) owner() string                 { return e.OwnerID }
func (e OrderOverdue) owner() string                  { return e.OwnerID }

// registry says how events travel. The version is part of the type. What a strategy orders in
// a market is placed in the order of its signals, and an owner's messages come in order.
func registry() (*outbox.Registry, error) {
	return outbox.NewRegistry("everbit",
		outbox.Event("CreateOrderAttempt.v1", "OrderIntent", CreateOrderAttempt.aggregateID).Topic(tradeCommand).Key(CreateOrderAttempt.strategyInMarket),
		outbox.Event("OrderAccepted.v1", "OrderIntent", OrderAccepted.aggregateID).Topic(tradeEvent).Key(OrderAccepted.owner),
		outbox.Event("OrderOverdue.v1", "OrderIntent", OrderOverdue.aggregateID).Topic(tradeEvent).Key(OrderOverdue.owner),
		outbox.Event("RunBacktest.v1", "Backtest", RunBacktest.aggregateID).Topic(backtestCommand),
		outbox.Event("BacktestCompleted.v1", "Backtest", BacktestCompleted.aggregateID).Topic(backtestEvent),
		outbox.Event("KillSwitchChanged.v1", "System", KillSwitchChanged.aggregateID).Topic(systemEvent),
	)
}
