// This program makes the Kafka record of an event in Avro.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxschema"
)

type orderPaid struct {
	OrderID string    `avro:"order_id"`
	At      time.Time `avro:"at,timestamp-micros"`
}

func (e orderPaid) OccurredAt() time.Time { return e.At }
func (e orderPaid) id() string            { return e.OrderID }

func main() {
	codec := outboxschema.Avro[orderPaid]().Codec()
	events := must(outbox.NewRegistry("try", outbox.Event("acme.order.paid.v1", "Order", orderPaid.id).Codec(codec)))
	rec := must(outbox.NewRecorder(events, outbox.RecorderConfig{}))
	record := must(rec.KafkaRecord(context.Background(), orderPaid{"order-1", time.Now()}))
	if record.Topic != "order-events" || len(record.Value) < len("order-1") {
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
