// This test reads an event's record from the Kafka that outboxtest starts in the
// process.
package try

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/twmb/franz-go/pkg/kgo"
)

type orderPaid struct {
	OrderID string
	At      time.Time
}

func (e orderPaid) OccurredAt() time.Time { return e.At }
func (e orderPaid) id() string            { return e.OrderID }

func TestRecord(t *testing.T) {
	events, err := outbox.NewRegistry("try", outbox.Event("acme.order.paid.v1", "Order", orderPaid.id))
	if err != nil {
		t.Fatal(err)
	}
	kafka := outboxtest.Kafka(t, "order-events")
	client, err := kgo.NewClient(kafka...)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	record := outboxtest.NewRecord(t.Context(), t, events, orderPaid{"order-1", time.Now()})
	if err := client.ProduceSync(t.Context(), record).FirstErr(); err != nil {
		t.Fatal(err)
	}
	read := outboxtest.Records(t.Context(), t, kafka, "order-events", 1)
	if string(read[0].Key) != "order-1" {
		t.Fatalf("another record than expected: %v", read[0])
	}
}
