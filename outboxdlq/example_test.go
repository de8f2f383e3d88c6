package outboxdlq_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"testing"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxops"
)

var (
	kafka []kgo.Opt
	dlq   string
)

// Read returns the dead letters of a topic up to its end.
func ExampleRead() {
	for d, err := range outboxdlq.Read(context.Background(), kafka, dlq, nil) {
		if err != nil {
			log.Fatal(err)
		}
		log.Println(d.OriginalTopic, d.Group, d.Action, d.Class, d.Error)
	}
}

// Replay sends back events whose cause of failure is fixed now.
func ExampleReplay() {
	report, err := outboxdlq.Replay(context.Background(), kafka, outboxdlq.ReplayConfig{
		Topic:  dlq,
		Choose: func(d outboxdlq.DeadLetter) bool { return d.Action == "SALES_COUNT_INCREASED" && d.Class == "timeout" },
		DryRun: true, // first see what would be sent
	})
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("%+v", report)
}

// Edit sends a dead letter back with another value. Look at a dry run first.
func ExampleEdit() {
	before, after, err := outboxdlq.Edit(context.Background(), kafka, outboxdlq.ReplayConfig{Topic: dlq, DryRun: true}, 0, 1200, []byte(`{"amount": 2}`))
	if errors.Is(err, outboxops.ErrNotFound) {
		log.Println("Kafka does not keep it any more")
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	log.Printf("%s instead of %s", after.Record.Value, before.Record.Value)
}

// Decode reads the headers of a dead letter.
func ExampleDecode() {
	d, err := outboxdlq.Decode(&kgo.Record{Topic: "order-events.dlq", Value: []byte(`{}`), Headers: []kgo.RecordHeader{
		{Key: outbox.DeadLetterOriginalTopic, Value: []byte("order-events")},
		{Key: outbox.DeadLetterOriginalPartition, Value: []byte("2")},
		{Key: outbox.DeadLetterOriginalOffset, Value: []byte("41")},
		{Key: outbox.DeadLetterOriginalTimestamp, Value: []byte("2026-05-01T09:00:00.000Z")},
		{Key: outbox.DeadLetterGroup, Value: []byte("invoices")},
		{Key: outbox.DeadLetterAction, Value: []byte("ORDER_INVOICED")},
		{Key: outbox.DeadLetterError, Value: []byte("no such order")},
		{Key: outbox.DeadLetterClass, Value: []byte("permanent")},
		{Key: outbox.DeadLetterAttempts, Value: []byte("1")},
		{Key: outbox.DeadLetterFailedAt, Value: []byte("2026-05-01T09:00:01.000Z")},
	}})
	if err != nil {
		panic(err)
	}
	fmt.Println(d.OriginalTopic, d.OriginalPartition, d.OriginalOffset, d.Group, d.Action, d.Error)
	// Output: order-events 2 41 invoices ORDER_INVOICED no such order
}

func TestExamples(t *testing.T) {
	// Not parallel: it sets the variables that the examples share.
	kafka, dlq = []kgo.Opt{kgo.SeedBrokers(testenv.Brokers(t)...)}, "examples-"+uuid.NewString()+".dlq"
	testenv.CreateTopic(t, testenv.Brokers(t), dlq, 1)
	ExampleRead()
	ExampleReplay()
	ExampleEdit()
}
