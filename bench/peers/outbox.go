package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/command"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	outboxSettings = "The relay in the writers' process, `RelayConfig{}`. `Queue` on the transaction's batch, `Wake` after the commit. A pool of 8 connections."
	apartSettings  = "As outbox; the relay in a process of its own, a `Waker` in that of the writers."

	exactlySettings  = "As outbox; `RelayConfig.ExactlyOnce`."
	protobufSettings = "As outbox; the type has the codec of `outboxschema.ProtobufOf`, without a schema registry."

	relayConns = 8
)

// outboxInstance is our library, its relay in this process or in another one.
type outboxInstance struct {
	b      *bench
	schema string
	rec    *outbox.Recorder
	order  string // SQL
	way    outboxWay
	wake   func() // of the relay or the waker that runs
}

// outboxWay is a way to use our library.
type outboxWay struct {
	apart   bool         // the relay has a process of its own
	exactly bool         // each event is sent exactly once
	codec   outbox.Codec // of payloads
}

func (w outboxWay) open(ctx context.Context, b *bench) (instance, error) {
	o := &outboxInstance{b: b, way: w, wake: func() {}}
	var err error
	if o.schema, err = b.NewSchema(ctx, b.newName("outbox")); err != nil {
		return nil, err
	}
	o.order = services.InSchema(sqlOrder, o.schema)
	o.rec, err = b.RecorderOf(o.schema, w.codec)
	return o, err
}

func (o *outboxInstance) write(ctx context.Context, e orders.Placed, committed func()) error {
	var batch pgx.Batch
	batch.Queue(o.order, e.Customer)
	if err := o.rec.Queue(ctx, &batch, e); err != nil {
		return err
	}
	if err := o.b.transact(ctx, &batch); err != nil {
		return err
	}
	committed()
	o.wake()
	return nil
}

func (o *outboxInstance) fill(ctx context.Context, events []orders.Placed) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return pgx.BeginFunc(ctx, o.b.DB, func(tx pgx.Tx) error { return o.rec.Record(ctx, tx, all...) })
}

func (o *outboxInstance) relay(ctx context.Context) (stop func() error, err error) {
	if o.way.apart {
		return o.relayApart(ctx)
	}
	db, err := services.NewPool(ctx, o.b.cfg.Postgres, relayConns)
	if err != nil {
		return nil, err
	}
	cfg := outbox.RelayConfig{Schema: o.schema}
	if o.way.exactly {
		cfg.ExactlyOnce = o.b.TopicName("cursor")
		if !slices.Contains(o.b.Topics, cfg.ExactlyOnce) {
			o.b.Topics = append(o.b.Topics, cfg.ExactlyOnce)
		}
	}
	relay, err := newRelay(db, o.b.cfg.Brokers, cfg)
	if err != nil {
		db.Close()
		return nil, err
	}
	o.wake = relay.Waker().Wake
	end := runAside(ctx, relay.Run)
	return func() error {
		defer db.Close()
		return end()
	}, nil
}

func newRelay(db *pgxpool.Pool, brokers []string, cfg outbox.RelayConfig) (*outbox.Relay, error) {
	return outbox.NewRelay(db, []kgo.Opt{kgo.SeedBrokers(brokers...)}, cfg)
}

func (o *outboxInstance) close(ctx context.Context) error { return o.b.DropSchema(ctx, o.schema) }

// childArg is the hidden argument that makes this program a relay.
const childArg = "relay"

// childPatience is what a relay gets to end by itself before it is killed.
const childPatience = 20 * time.Second

// job says what a relay in a process of its own relays.
type job struct {
	Postgres string
	Brokers  []string
	Schema   string
}

// childMain relays what its standard input says, until that ends.
func childMain(ctx context.Context, stdin io.Reader, _, stderr io.Writer) int {
	return command.Serve(ctx, name, stdin, stderr, func(ctx context.Context, j job, _ <-chan struct{}) error { return relayUntil(ctx, j) })
}

func relayUntil(ctx context.Context, j job) error {
	db, err := services.NewPool(ctx, j.Postgres, relayConns)
	if err != nil {
		return err
	}
	defer db.Close()
	relay, err := newRelay(db, j.Brokers, outbox.RelayConfig{Schema: j.Schema})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

// relayApart starts this program again as a relay, and a waker in this process.
func (o *outboxInstance) relayApart(ctx context.Context) (stop func() error, err error) {
	waker, err := outbox.NewWaker(o.b.DB, outbox.WakerConfig{Schema: o.schema})
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, childArg)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = childPatience
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe() // stays open until the relay is to end
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	end := func() error {
		_ = stdin.Close() // Wait says how it ended
		return cmd.Wait()
	}
	if err := json.NewEncoder(stdin).Encode(job{Postgres: o.b.cfg.Postgres, Brokers: o.b.cfg.Brokers, Schema: o.schema}); err != nil {
		return nil, errors.Join(err, end())
	}
	o.wake = waker.Wake
	endWaker := runAside(ctx, waker.Run)
	return func() error { return errors.Join(endWaker(), end()) }, nil
}
