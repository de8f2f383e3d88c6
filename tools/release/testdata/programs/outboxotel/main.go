// This program makes the Kafka record of an event with the telemetry of a recorder.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxotel"
)

type orderPaid struct {
	OrderID string
	At      time.Time
}

func (e orderPaid) OccurredAt() time.Time { return e.At }
func (e orderPaid) id() string            { return e.OrderID }

func main() {
	tel := must(outboxotel.New(outboxotel.Config{}))
	events := must(outbox.NewRegistry("try", outbox.Event("acme.order.paid.v1", "Order", orderPaid.id)))
	rec := must(outbox.NewRecorder(events, tel.Recorder(outbox.RecorderConfig{})))
	record := must(rec.KafkaRecord(context.Background(), orderPaid{"order-1", time.Now()}))
	if record.Topic != "order-events" || string(record.Key) != "order-1" {
		fmt.Fprintln(os.Stderr, "another record than expected:", record)
		os.Exit(1)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
