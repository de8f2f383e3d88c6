package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/orders/orderspb"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kgo"
)

// ours is the name of the peer that all others are compared with.
const ours = "outbox"

// peer is a library that publishes events.
type peer struct {
	name, what string
	settings   string  // those that are not its defaults, for the document
	share      int     // of -events: a backlog has one of so many
	drain      float64 // what our rate of draining should be, as a multiple of this peer's; 0: no target
	open       func(ctx context.Context, b *bench) (instance, error)
}

// peers are those that can be measured.
var peers = []peer{
	{name: ours, what: "outbox, its relay in the writers' process", settings: outboxSettings, share: 1, open: outboxWay{codec: outbox.JSON()}.open},
	{name: "outbox-apart", what: "outbox, its relay in a process of its own", settings: apartSettings, share: 1, open: outboxWay{codec: outbox.JSON(), apart: true}.open},
	{name: "outbox-exactly", what: "outbox, each event sent exactly once", settings: exactlySettings, share: 1, open: outboxWay{codec: outbox.JSON(), exactly: true}.open},
	{name: "outbox-protobuf", what: "outbox, events as Protobuf messages", settings: protobufSettings, share: 1, open: outboxWay{codec: orderspb.Format().Codec()}.open},
	{name: "debezium", what: "Debezium with its outbox event router in Kafka Connect", settings: debeziumSettings, share: 1, drain: 3, open: openDebezium},
	{name: "river", what: "River, a worker of which produces", settings: riverSettings, share: 2, drain: 1, open: openRiver},
	{name: "watermill", what: "watermill-sql with Watermill's forwarder", settings: watermillSettings, share: 40, drain: 1, open: openWatermill},
}

func peerNames() (names []string) {
	for _, p := range peers {
		names = append(names, p.name)
	}
	return names
}

// instance is a peer with tables of its own.
type instance interface {
	// write places an order and records its event in a transaction. It says to committed at
	// once that the transaction has committed.
	write(ctx context.Context, e orders.Placed, committed func()) error

	// fill records events in one transaction, as quickly as the peer can.
	fill(ctx context.Context, events []orders.Placed) error

	// relay starts what publishes events. Stop ends it, and returns why it ended before.
	relay(ctx context.Context) (stop func() error, err error)

	// close removes all that the instance has made, when nothing is relayed any more. Tables
	// that are left would keep autovacuum busy while others are measured.
	close(ctx context.Context) error
}

// newName returns a name that no other instance has: of its schema, and of what else it makes.
func (b *bench) newName(peer string) string {
	b.instances++
	return fmt.Sprintf("%s_%d", peer, b.instances)
}

const (
	ddlOrders = `CREATE TABLE {schema}.orders (id bigserial PRIMARY KEY, customer text NOT NULL, placed_at timestamptz NOT NULL DEFAULT now())`
	sqlOrder  = `INSERT INTO {schema}.orders (customer) VALUES ($1)`
)

// newSchemaWithOrders makes a schema with the table of the writers' business.
func (b *bench) newSchemaWithOrders(ctx context.Context, name string) (schema string, err error) {
	if schema, err = b.NewEmptySchema(ctx, name); err != nil {
		return "", err
	}
	if _, err := b.DB.Exec(ctx, services.InSchema(ddlOrders, schema)); err != nil {
		return "", fmt.Errorf("create orders: %w", err)
	}
	return schema, nil
}

// payloadOf returns the bytes that all peers publish.
func payloadOf(e orders.Placed) ([]byte, error) { return json.Marshal(e) }

// transact sends a batch in a transaction of its own.
func (b *bench) transact(ctx context.Context, batch *pgx.Batch) error {
	return pgx.BeginFunc(ctx, b.DB, func(tx pgx.Tx) error { return tx.SendBatch(ctx, batch).Close() })
}

// newProducer makes a client with the options that our relay gives its own.
func newProducer(brokers []string) (*kgo.Client, error) {
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.RequiredAcks(kgo.AllISRAcks()), kgo.ProducerLinger(0))
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	return client, nil
}

// runAside runs something until stop is called, which returns what run returned.
func runAside(ctx context.Context, run func(context.Context) error) (stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	return func() error {
		cancel()
		return <-done
	}
}

// lap runs a lap of an instance that relays. It returns errBehind if events have not
// arrived [laps.Patience] after the last commit was due.
func (b *bench) lap(ctx context.Context, i instance, rate int, warm, measured time.Duration) (*laps.Lap, error) {
	l := laps.New(b.next, rate, warm, measured)
	b.next += l.Total()
	err := laps.Run(ctx, l, b.cfg.workers, b.reader.Collect, func(ctx context.Context, n int, committed func()) error {
		return i.write(ctx, orders.New(n), committed)
	})
	if err != nil && ctx.Err() == nil && errors.Is(err, context.DeadlineExceeded) {
		return nil, errBehind
	}
	return l, err
}

// errBehind says that a peer does not keep up.
var errBehind = errors.New("fell behind")

// started starts to relay, and waits until an event arrives: what a peer does first, such
// as to join, to look for work or to read old WAL, is over then.
func (b *bench) started(ctx context.Context, i instance) (stop func() error, err error) {
	if stop, err = i.relay(ctx); err != nil {
		return nil, err
	}
	for range readyTries {
		if _, err = b.lap(ctx, i, 1, 0, time.Second); !errors.Is(err, errBehind) {
			break
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("wait for the first event: %w", err), stop())
	}
	return stop, nil
}

// readyTries is how often an event may be late before the schedule begins.
const readyTries = 4
