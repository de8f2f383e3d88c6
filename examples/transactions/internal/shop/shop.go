// Package shop is what the examples of this module have in common: an event, the tables, and a
// relay and a consumer. What differs from one database library to another is a [Store].
package shop

import (
	"context"
	"database/sql"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxsql"
)

// OrderPlaced says that a customer has placed an order.
type OrderPlaced struct {
	OrderID  string    `json:"orderId"`
	Product  string    `json:"product"`
	Quantity int       `json:"quantity"`
	At       time.Time `json:"at"`
}

// OccurredAt is when the customer did.
func (e OrderPlaced) OccurredAt() time.Time { return e.At }

func (e OrderPlaced) order() string { return e.OrderID }

// Store keeps orders and shipments, by one database library.
type Store interface {
	// Place stores an order and its event: both, or neither.
	Place(ctx context.Context, order OrderPlaced) error
	// Ship stores a shipment of an order that was placed, in the transaction of a handler.
	Ship(ctx context.Context, tx *sql.Tx, order OrderPlaced, m outbox.Metadata) error
	// Close closes what belongs to the library.
	Close() error
}

// Config says where the shop is.
type Config struct {
	DatabaseURL string
	Kafka       []kgo.Opt
	Topic       string // of its events
	Recording   outbox.RecorderConfig
}

// Shop has the parts that are the same with every library.
type Shop struct {
	Config
	Pool     *pgxpool.Pool
	Events   *outbox.Registry
	Recorder *outbox.Recorder
	Relay    *outbox.Relay
}

//go:embed tables.sql
var tables string

// New makes the tables and the parts of a shop. The caller closes it.
func New(ctx context.Context, cfg Config) (*Shop, error) {
	pool, err := pgxpool.New(ctx, cfg.DatabaseURL)
	if err != nil {
		return nil, err
	}
	s := &Shop{Config: cfg, Pool: pool}
	if err := s.setUp(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *Shop) setUp(ctx context.Context) (err error) {
	if err := outbox.Migrate(ctx, s.Pool, outbox.MigrateConfig{}); err != nil {
		return err
	}
	if _, err := s.Pool.Exec(ctx, tables); err != nil {
		return fmt.Errorf("make tables: %w", err)
	}
	s.Events, err = outbox.NewRegistry("shop", outbox.Event("acme.order.placed.v1", "Order", OrderPlaced.order).Topic(s.Topic))
	if err != nil {
		return err
	}
	if s.Recorder, err = outbox.NewRecorder(s.Events, s.Recording); err != nil {
		return err
	}
	s.Relay, err = outbox.NewRelay(s.Pool, s.Kafka, outbox.RelayConfig{})
	return err
}

// Close closes the pool.
func (s *Shop) Close() { s.Pool.Close() }

// Ship is [Store.Ship].
type Ship func(ctx context.Context, tx *sql.Tx, order OrderPlaced, m outbox.Metadata) error

// Consumer returns the consumer that ships what was ordered.
func (s *Shop) Consumer(cfg outbox.HandlerConfig, ship Ship) (*outbox.Consumer, error) {
	cfg.From = outbox.FromStart
	return outbox.NewConsumer(s.Pool, s.Kafka, s.Events, s.Topic+"-shipping", outbox.ConsumerConfig{HandlerConfig: cfg},
		outboxsql.Handle("ORDER_SHIPPED", ship))
}
