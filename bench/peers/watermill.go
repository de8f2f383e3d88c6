package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/services"
)

const (
	watermillSettings = "PostgreSQL's default schema, `PollInterval` 1 ms, batches of 100; the forwarder publishes with watermill-kafka: acks of all replicas, " +
		"no linger, one message at a time."

	watermillTopic = "events" // of the forwarder, in PostgreSQL
	watermillPoll  = time.Millisecond
	watermillConns = 4
	watermillKey   = "key" // metadata of a message
	watermillWait  = 20 * time.Second
)

// watermillInstance is watermill-sql with a forwarder.
type watermillInstance struct {
	b      *bench
	schema string
	order  string // SQL
	tables sql.DefaultPostgreSQLSchema
	offset sql.DefaultPostgreSQLOffsetsAdapter
	log    watermill.LoggerAdapter
}

func openWatermill(ctx context.Context, b *bench) (instance, error) {
	schema, err := b.newSchemaWithOrders(ctx, b.newName("watermill"))
	if err != nil {
		return nil, err
	}
	table := func(prefix string) func(string) string {
		return func(topic string) string { return pgx.Identifier{schema, prefix + topic}.Sanitize() }
	}
	w := &watermillInstance{
		b: b, schema: schema, order: services.InSchema(sqlOrder, schema),
		tables: sql.DefaultPostgreSQLSchema{GenerateMessagesTableName: table("messages_")},
		offset: sql.DefaultPostgreSQLOffsetsAdapter{GenerateMessagesOffsetsTableName: table("offsets_")},
		log:    watermill.NewSlogLogger(slog.New(slog.DiscardHandler)),
	}
	subscriber, err := w.subscriber(sql.BeginnerFromPgx(b.DB))
	if err != nil {
		return nil, err
	}
	if err := subscriber.SubscribeInitialize(watermillTopic); err != nil {
		return nil, fmt.Errorf("create tables: %w", err)
	}
	return w, subscriber.Close()
}

func (w *watermillInstance) subscriber(db sql.Beginner) (*sql.Subscriber, error) {
	return sql.NewSubscriber(db, sql.SubscriberConfig{PollInterval: watermillPoll, SchemaAdapter: w.tables, OffsetsAdapter: w.offset}, w.log)
}

// publish records the messages of events in a transaction.
func (w *watermillInstance) publish(ctx context.Context, tx pgx.Tx, events ...orders.Placed) error {
	inner, err := sql.NewPublisher(sql.TxFromPgx(tx), sql.PublisherConfig{SchemaAdapter: w.tables}, w.log)
	if err != nil {
		return err
	}
	messages := make([]*message.Message, len(events))
	for i, e := range events {
		payload, err := payloadOf(e)
		if err != nil {
			return err
		}
		messages[i] = message.NewMessageWithContext(ctx, watermill.NewUUID(), payload)
		messages[i].Metadata.Set(watermillKey, e.Order)
	}
	return forwarder.NewPublisher(inner, forwarder.PublisherConfig{ForwarderTopic: watermillTopic}).Publish(w.b.Topic, messages...)
}

func (w *watermillInstance) write(ctx context.Context, e orders.Placed, committed func()) error {
	err := pgx.BeginFunc(ctx, w.b.DB, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, w.order, e.Customer); err != nil {
			return err
		}
		return w.publish(ctx, tx, e)
	})
	if err == nil {
		committed()
	}
	return err
}

func (w *watermillInstance) fill(ctx context.Context, events []orders.Placed) error {
	return pgx.BeginFunc(ctx, w.b.DB, func(tx pgx.Tx) error { return w.publish(ctx, tx, events...) })
}

// kafkaPublisher returns watermill-kafka's own.
func (w *watermillInstance) kafkaPublisher() (*kafka.Publisher, error) {
	cfg := kafka.DefaultSaramaSyncPublisherConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	publisher, err := kafka.NewPublisher(kafka.PublisherConfig{
		Brokers: w.b.cfg.Brokers, OverwriteSaramaConfig: cfg,
		Marshaler: kafka.NewWithPartitioningMarshaler(func(_ string, m *message.Message) (string, error) { return m.Metadata.Get(watermillKey), nil }),
	}, w.log)
	if err != nil {
		return nil, fmt.Errorf("make Kafka publisher: %w", err)
	}
	return publisher, nil
}

func (w *watermillInstance) relay(ctx context.Context) (stop func() error, err error) {
	db, err := services.NewPool(ctx, w.b.cfg.Postgres, watermillConns)
	if err != nil {
		return nil, err
	}
	publisher, err := w.kafkaPublisher()
	if err != nil {
		db.Close()
		return nil, err
	}
	release := func() error {
		err := publisher.Close()
		db.Close()
		return err
	}
	subscriber, err := w.subscriber(sql.BeginnerFromPgx(db))
	if err != nil {
		return nil, errors.Join(err, release())
	}
	f, err := forwarder.NewForwarder(subscriber, publisher, w.log, forwarder.Config{ForwarderTopic: watermillTopic, CloseTimeout: watermillWait})
	if err != nil {
		return nil, errors.Join(err, release())
	}
	end := runAside(ctx, f.Run)
	return func() error {
		err := f.Close() // the subscriber, too
		return errors.Join(err, end(), release())
	}, nil
}

func (w *watermillInstance) close(ctx context.Context) error { return w.b.DropSchema(ctx, w.schema) }
