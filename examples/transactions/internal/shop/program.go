package shop

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/outboxgo/outbox"
)

// Main is the main function of an example. It gets the addresses of PostgreSQL and Kafka from
// DATABASE_URL and KAFKA_BROKERS, and the name of the topic, which is created, from TOPIC.
func Main(open func(*Shop) (Store, error)) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	brokers := strings.Split(os.Getenv("KAFKA_BROKERS"), ",")
	err := Run(ctx, os.Stdout, Config{
		DatabaseURL: os.Getenv("DATABASE_URL"),
		Kafka:       []kgo.Opt{kgo.SeedBrokers(brokers...), kgo.AllowAutoTopicCreation()},
		Topic:       cmp.Or(os.Getenv("TOPIC"), "order-events"),
	}, open)
	stop()
	if err != nil && !errors.Is(err, context.Canceled) { // a signal is no error
		log.Fatal(err)
	}
}

// Run places an order, and returns once it is shipped.
func Run(ctx context.Context, out io.Writer, cfg Config, open func(*Shop) (Store, error)) error {
	s, err := New(ctx, cfg)
	if err != nil {
		return err
	}
	defer s.Close()
	store, err := open(s)
	if err != nil {
		return err
	}
	order := OrderPlaced{OrderID: "order-" + uuid.NewString(), Product: "tea", Quantity: 2, At: time.Now()}
	return errors.Join(s.deliver(ctx, out, store, order), store.Close())
}

// deliver runs the relay and the consumer until an order is shipped.
func (s *Shop) deliver(ctx context.Context, out io.Writer, store Store, order OrderPlaced) error {
	ctx, stop := context.WithCancel(ctx) // ends both Runs once they have finished what is in flight
	defer stop()
	consumer, err := s.Consumer(outbox.HandlerConfig{}, func(ctx context.Context, tx *sql.Tx, e OrderPlaced, m outbox.Metadata) error {
		err := store.Ship(ctx, tx, e, m)
		if err == nil && e.OrderID == order.OrderID {
			stop()
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := store.Place(ctx, order); err != nil {
		return err
	}
	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return s.Relay.Run(ctx) })
	running.Go(func() error { return consumer.Run(ctx) })
	if err := running.Wait(); err != nil {
		return err
	}
	var shipped int
	if err := s.Pool.QueryRow(context.WithoutCancel(ctx), `SELECT count(*) FROM shipments WHERE order_id = $1`, order.OrderID).Scan(&shipped); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "placed: %s, shipments: %d\n", order.OrderID, shipped)
	return err
}
