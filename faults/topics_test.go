package faults_test

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

type orderCreated struct{ ID string }

func (orderCreated) OccurredAt() time.Time { return time.Time{} }
func (e orderCreated) OrderID() string     { return e.ID }

type paymentPaid struct{ ID string }

func (paymentPaid) OccurredAt() time.Time { return time.Time{} }
func (e paymentPaid) PaymentID() string   { return e.ID }

// shop returns the registry of a service with order-events and payment-events.
func shop(t *testing.T) *outbox.Registry {
	t.Helper()
	events, err := outbox.NewRegistry("shop",
		outbox.Event("shop.order.created.v1", "Order", orderCreated.OrderID),
		outbox.Event("shop.payment.paid.v1", "Payment", paymentPaid.PaymentID))
	require.NoError(t, err)
	return events
}

// fakeKafka returns a cluster of one broker and options for it.
func fakeKafka(t *testing.T, opts ...kfake.Opt) (*kfake.Cluster, []kgo.Opt) {
	t.Helper()
	kafka, err := kfake.NewCluster(append(opts, kfake.NumBrokers(1))...)
	require.NoError(t, err)
	t.Cleanup(kafka.Close)
	return kafka, []kgo.Opt{kgo.SeedBrokers(kafka.ListenAddrs()...), kgo.MetadataMinAge(50 * time.Millisecond)}
}

var oneReplica = outboxtopics.Config{ReplicationFactor: 1}

// A topic that was missing a moment ago is there when we make it: that is no error,
// and it is compared like one that was there before.
func TestTopicMadeMeanwhile(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	kafka, opts := fakeKafka(t, kfake.SeedTopics(7, "order-events"))
	hidden := kafka.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: "order-events", Err: kerr.UnknownTopicOrPartition})
	rejected := kafka.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.CreateTopics}, Topic: "order-events", Observe: true})
	states, err := outboxtopics.Ensure(t.Context(), opts, shop(t), oneReplica)
	require.NoError(t, err)
	require.Equal(t, 1, hidden.Hits())
	require.Equal(t, 1, rejected.Hits(), "it was to be made")
	require.Len(t, states, 4)
	require.Equal(t, "order-events", states[0].Topic)
	require.False(t, states[0].Created)
	require.Contains(t, states[0].Differences, outboxtopics.Difference{Setting: "partitions", Want: "3", Have: "7"})
	for _, s := range states[1:] {
		require.Equal(t, outboxtopics.State{Topic: s.Topic, Created: true}, s)
	}
}

// A broker that has not heard of a new topic is asked again.
func TestTopicNotKnownYet(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	kafka, opts := fakeKafka(t)
	late := kafka.Fault(
		kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: "payment-events", Err: kerr.UnknownTopicOrPartition, Count: 4},
		kfake.Fault{Keys: []kmsg.Key{kmsg.DescribeConfigs}, Resource: "order-events", Err: kerr.UnknownTopicOrPartition, Count: 3},
	)
	states, err := outboxtopics.Ensure(t.Context(), opts, shop(t), oneReplica)
	require.NoError(t, err)
	require.Equal(t, 7, late.Hits())
	require.Len(t, states, 4)
	for _, s := range states {
		require.True(t, s.Created, s.Topic)
	}
}

// What one lacks the right to is named, and what one may is done.
func TestTopicsWithoutRights(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for name, tt := range map[string]struct {
		fault kfake.Fault
		want  string
		there bool // the topic, though it was not described
	}{
		"to create":   {kfake.Fault{Keys: []kmsg.Key{kmsg.CreateTopics}, Topic: "order-events"}, "create topic order-events: TOPIC_AUTHORIZATION_FAILED", false},
		"to describe": {kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: "order-events"}, "describe topic order-events: TOPIC_AUTHORIZATION_FAILED", false},
		"to describe its configuration": {kfake.Fault{Keys: []kmsg.Key{kmsg.DescribeConfigs}, Resource: "order-events"},
			"describe configuration of topic order-events: TOPIC_AUTHORIZATION_FAILED", true},
	} {
		t.Run(name, func(t *testing.T) {
			kafka, opts := fakeKafka(t)
			tt.fault.Err, tt.fault.Count = kerr.TopicAuthorizationFailed, -1
			kafka.Fault(tt.fault)
			states, err := outboxtopics.Ensure(t.Context(), opts, shop(t), oneReplica)
			require.ErrorIs(t, err, kerr.TopicAuthorizationFailed)
			require.ErrorContains(t, err, tt.want)
			require.NotContains(t, err.Error(), "\n", "it is about nothing else")
			require.Equal(t, []outboxtopics.State{{Topic: "payment-events", Created: true}, {Topic: "payment-events.dlq", Created: true}}, states)
			require.Equal(t, tt.there, kafka.TopicInfo("order-events") != nil)
			require.Nil(t, kafka.TopicInfo("order-events.dlq"))
		})
	}
}
