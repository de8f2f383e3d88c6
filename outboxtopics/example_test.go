package outboxtopics_test

import (
	"context"
	"fmt"
	"log"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtopics"
)

// ShipmentSent goes to the topic shipment-events, by its type.
type ShipmentSent struct {
	ID string
	At time.Time
}

func (e ShipmentSent) OccurredAt() time.Time { return e.At }
func (e ShipmentSent) shipment() string      { return e.ID }

var (
	db     *pgxpool.Pool
	kafka  []kgo.Opt
	events *outbox.Registry
)

// A service makes its topics beside its relay, and so starts without Kafka, too.
func ExampleRun() {
	ctx := context.Background() // that a signal cancels
	relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{})
	if err != nil {
		log.Fatal(err)
	}
	go func() {
		if err := outboxtopics.Run(ctx, kafka, events, outboxtopics.Config{}); err != nil {
			log.Fatal(err)
		}
	}()
	if err := relay.Run(ctx); err != nil {
		log.Fatal(err)
	}
}

// A topic whose consumers need the last event of each key is compacted.
func ExampleConfig_compacted() {
	cfg := outboxtopics.Config{Compacted: func(topic string) bool { return topic == "profile-events" }}
	cfg.ReplicationFactor = -1 // the cluster's default
	states, err := outboxtopics.Ensure(context.Background(), kafka, events, cfg)
	if err != nil {
		log.Fatal(err)
	}
	log.Println(states)
}

// In a deployment step: create what is missing, and log what differs.
func ExampleEnsure() {
	ctx := context.Background()
	states, err := outboxtopics.Ensure(ctx, kafka, events, outboxtopics.Config{
		Partitions:        6,
		ReplicationFactor: -1, // the cluster's default
	})
	if err != nil {
		log.Fatal(err)
	}
	for _, s := range states {
		for _, d := range s.Differences {
			log.Printf("topic %s: %v", s.Topic, d)
		}
	}
}

// Describe tells what topics there are.
func ExampleDescribe() {
	infos, err := outboxtopics.Describe(context.Background(), kafka)
	if err != nil {
		log.Fatal(err)
	}
	for _, info := range infos {
		log.Printf("%+v", info)
	}
}

// A difference reads as a phrase.
func ExampleDifference() {
	fmt.Println(outboxtopics.Difference{Setting: "retention.ms", Want: "604800000", Have: "86400000"})
	// Output: retention.ms is 86400000, want 604800000
}

func TestExamples(t *testing.T) {
	// Not parallel: it sets the variables that the examples share.
	kafka = []kgo.Opt{kgo.SeedBrokers(testenv.Brokers(t)...)}
	domain := strings.ReplaceAll(uuid.NewString(), "-", "")
	var err error
	events, err = outbox.NewRegistry("warehouse", outbox.Event("acme."+domain+".sent.v1", "Shipment", ShipmentSent.shipment))
	require.NoError(t, err)
	ExampleEnsure()
	ExampleConfig_compacted()
	ExampleDescribe()
	infos, err := outboxtopics.Describe(t.Context(), kafka, domain+"-events")
	require.NoError(t, err)
	require.Len(t, infos, 1)
}
