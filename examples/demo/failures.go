package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

// failureShow has an event, a handler and Kafka fail, one after the other, and prints what operators
// see of it. The event and the handler's delivery stay as they are, for the page and the command line.
type failureShow struct {
	db     *pgxpool.Pool
	shop   *shop
	kafka  *kadm.Client
	cable  *cable
	relay  *outbox.Relay
	worker *outbox.Worker
	out    *console

	failures  *outboxops.Failures
	inspector *outboxops.Inspector
}

// mailGroup is the group of workers whose handler fails.
const mailGroup = "mail"

// newFailureShow makes a worker, and a relay that stops waiting for Kafka within seconds, so that
// the show is short. The reader's client sets limits of topics.
func newFailureShow(db *pgxpool.Pool, brokers []string, c *cable, events *outbox.Registry, s *shop, r *reader, out *console) (*failureShow, error) {
	quiet := slog.New(slog.DiscardHandler) // what they would log is printed here
	relay, err := outbox.NewRelay(db, c.opts(brokers), outbox.RelayConfig{
		Schema: s.runID, DeliveryTimeout: time.Second, Lease: 5 * time.Second,
		Breaker: outbox.BreakerConfig{Window: 1, OpenFor: time.Second}, Logger: quiet,
	})
	if err != nil {
		return nil, err
	}
	worker, err := outbox.NewWorker(db, events, mailGroup, outbox.WorkerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.runID, Logger: quiet}, PollInterval: 100 * time.Millisecond,
	}, outbox.Handle("CONFIRM_ORDER", confirmOrder))
	if err != nil {
		return nil, err
	}
	f := &failureShow{db: db, shop: s, kafka: kadm.NewClient(r.client), cable: c, relay: relay, worker: worker, out: out}
	var errs [2]error
	f.failures, errs[0] = outboxops.NewFailures(db, outboxops.FailuresConfig{Schema: s.runID})
	f.inspector, errs[1] = outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: s.runID})
	return f, errors.Join(errs[:]...)
}

// A customer without an address.
const nobody = 0

// confirmOrder would send a mail to the customer.
func confirmOrder(_ context.Context, _ pgx.Tx, e OrderCreatedEventV1, _ outbox.Metadata) error {
	if e.UserID == nobody {
		return outbox.Permanent(errors.New("the customer has no address")) // no other attempt would help
	}
	return nil
}

// run shows all of it. Relay and worker must run.
func (f *failureShow) run(ctx context.Context) error {
	f.out.title("What goes wrong, and where it shows")
	for _, show := range []func(context.Context) error{f.health, f.failedEvent, f.deadDelivery, f.outage} {
		if err := show(ctx); err != nil {
			return err
		}
	}
	return nil
}

// health waits until relay and worker are at work.
func (f *failureShow) health(ctx context.Context) error {
	const sqlPosition = `SELECT EXISTS (SELECT FROM outbox_cursor WHERE relay = 'worker:' || $1)` // a new group begins here
	err := until(ctx, "the relay and the worker to be ready", func() (ready bool, err error) {
		err = f.db.QueryRow(ctx, sqlPosition, mailGroup).Scan(&ready)
		relay := f.relay.Health()
		return ready && relay.Leading && relay.Works && f.worker.Health().Works, err
	})
	f.out.row("health", "%s", healthOf(f.relay))
	return err
}

func healthOf(r *outbox.Relay) string {
	h := r.Health()
	if h.Works {
		return "the relay is live and works"
	}
	return "the relay is live and does not work: " + strings.Join(h.Reasons, "; ")
}

// failedEvent records an event that is larger than its topic takes.
func (f *failureShow) failedEvent(ctx context.Context) error {
	limit := kadm.AlterConfig{Name: "max.message.bytes", Value: kadm.StringPtr("1000")}
	altered, err := f.kafka.AlterTopicConfigs(ctx, []kadm.AlterConfig{limit}, descriptions)
	if err != nil {
		return fmt.Errorf("set the limit of %s: %w", descriptions, err)
	}
	for _, topic := range altered {
		if topic.Err != nil {
			return fmt.Errorf("set the limit of %s: %w", topic.Name, topic.Err)
		}
	}
	text := make([]byte, 4000)
	for i := range text {
		text[i] = byte('a' + rand.IntN(26)) // which does not compress well
	}
	described := ProductDescribedEventV1{ProductID: 1, Text: string(text), happened: happened{time.Now()}}
	err = f.relay.Waker().InTx(ctx, func(tx pgx.Tx) error { return f.shop.rec.Record(ctx, tx, described) })
	if err != nil {
		return err
	}
	var failed []outboxops.Failure
	err = until(ctx, "the event to fail", func() (_ bool, err error) {
		failed, err = f.failures.List(ctx, outboxops.FailureFilter{Kind: outboxops.KindEvent}, outboxops.FailurePage{Limit: 1})
		return len(failed) > 0, err
	})
	if err != nil {
		return err
	}
	f.out.row("failed event", "%s: %s, a description of 4,000 letters; %s takes 1,000 bytes", failed[0].ID, failed[0].Class, descriptions)
	f.out.row("", "the relay tries it again; `outbox failures show %s` says why it fails", failed[0].ID)
	return nil
}

// deadDelivery places an order that the worker's handler cannot handle.
func (f *failureShow) deadDelivery(ctx context.Context) error {
	if err := f.shop.order(ctx, order{user: nobody, product: 1, amount: 1_00}); err != nil {
		return err
	}
	f.worker.Waker().Wake()
	var dead []outboxops.Failure
	err := until(ctx, "the delivery to be dead", func() (_ bool, err error) {
		dead, err = f.failures.List(ctx, outboxops.FailureFilter{Kind: outboxops.KindDelivery, Statuses: []string{outbox.StatusDead}}, outboxops.FailurePage{Limit: 1})
		return len(dead) > 0, err
	})
	if err != nil {
		return err
	}
	f.out.row("dead delivery", "%s: %s of group %s; %v", dead[0].ID, dead[0].Action, dead[0].Group, dead[0].Err)
	f.out.row("", "it waits for an operator: `outbox failures retry %s --reason …`", dead[0].ID)
	return nil
}

// outage cuts the relay off from Kafka, and places an order meanwhile.
func (f *failureShow) outage(ctx context.Context) error {
	f.cable.cut()
	defer f.cable.mend()
	began := time.Now()
	if err := f.shop.order(ctx, order{user: 1, product: 1, amount: 1_00}); err != nil {
		return err
	}
	f.relay.Waker().Wake()
	if err := until(ctx, "the outage to be seen", func() (bool, error) { return !f.relay.Health().Works, nil }); err != nil {
		return err
	}
	f.out.row("outage", "Kafka is cut off; after %.1f s %s", time.Since(began).Seconds(), healthOf(f.relay))
	f.cable.mend()
	began = time.Now()
	err := until(ctx, "the relay to send again", func() (bool, error) {
		relays, err := f.inspector.Relays(ctx)
		return err == nil && len(relays) == 1 && relays[0].Pending == 0 && f.relay.Health().Works, err
	})
	f.out.row("", "Kafka is back; after %.1f s the order that was placed meanwhile is sent, and %s", time.Since(began).Seconds(), healthOf(f.relay))
	return err
}

// showPatience is how long a part of the show may take.
const showPatience = 30 * time.Second

// until waits until a condition holds.
func until(ctx context.Context, what string, holds func() (bool, error)) error {
	for deadline := time.Now().Add(showPatience); ; {
		done, err := holds()
		switch {
		case err != nil || done:
			return err
		case time.Now().After(deadline):
			return fmt.Errorf("waited for %v for %s", showPatience, what)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// cable connects the relay with Kafka until it is cut. It is safe for concurrent use.
type cable struct {
	mu    sync.Mutex
	isCut bool
	conns []net.Conn
}

// opts returns the options of a client whose connections go through the cable.
func (c *cable) opts(brokers []string) []kgo.Opt {
	return []kgo.Opt{kgo.SeedBrokers(brokers...), kgo.Dialer(c.dial)}
}

var errCut = errors.New("the cable is cut")

func (c *cable) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isCut {
		_ = conn.Close() // nothing was sent
		return nil, errCut
	}
	c.conns = append(c.conns, conn)
	return conn, nil
}

// cut ends all connections, and lets no others through.
func (c *cable) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = true
	for _, conn := range c.conns {
		_ = conn.Close() // it may be closed already
	}
	c.conns = nil
}

func (c *cable) mend() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = false
}
