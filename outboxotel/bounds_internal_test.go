package outboxotel

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// seriesOf returns the number of series of each counter.
func seriesOf(t *testing.T, reader sdk.Reader) map[string]int {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &all))
	series := map[string]int{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if sum, ok := m.Data.(metricdata.Sum[int64]); ok {
				series[m.Name] = len(sum.DataPoints)
			}
		}
	}
	return series
}

// A writer chooses thousands of topics and types. The series of a process, and what it keeps about them, are bounded.
func TestSeriesAreBounded(t *testing.T) {
	t.Parallel()
	reader := sdk.NewManualReader()
	tel, err := New(Config{MeterProvider: sdk.NewMeterProvider(sdk.WithReader(reader), sdk.WithCardinalityLimit(0))})
	require.NoError(t, err)
	hooks := tel.Relay(outbox.RelayConfig{}).Hooks
	consumer, worker := tel.Consumer("group", outbox.ConsumerConfig{}).Hooks, tel.Worker("group", outbox.WorkerConfig{}).Hooks
	sender := &relay{Telemetry: tel, name: relayKey.String("default")}
	const texts = 3_000
	for i := range texts {
		topic, eventType := fmt.Sprint("topic", i), fmt.Sprint("type", i)
		failed := outbox.FailedEvent{Topic: topic, Type: eventType, Class: "policy_violation"}
		hooks.Rejected(failed)
		hooks.Dead(failed)
		tel.sent.Add(t.Context(), 1, sender.about(topicKey{topic, "unknown_topic", false}).count...)
		m := outbox.Metadata{Type: eventType, Kafka: &outbox.KafkaMetadata{Topic: topic}}
		for _, hooks := range []outbox.ConsumerHooks{consumer, worker} {
			hooks.Handled(m, "ACT", 0)
			hooks.Failed(m, "ACT", errors.New("failed"), true)
			hooks.DeadLettered(m, "", topic, errors.New("failed"))
		}
	}
	require.Equal(t, map[string]int{
		"outbox.relay.rejected": 101, "outbox.relay.dead": 101, "messaging.client.sent.messages": 101,
		"outbox.consumer.processed": 2 * 1_001, "outbox.consumer.failed": 1_001,
		"outbox.worker.processed": 3 * 1_001, "outbox.worker.failed": 1_001,
	}, seriesOf(t, reader))
	require.Equal(t, 101, lengthOf(&sender.options))
	for _, h := range tel.handlers {
		require.LessOrEqual(t, lengthOf(&h.counts), 3*1_001)
	}
}

// What processes say of themselves is bounded, although their rows hold any text.
func TestSaidIsBounded(t *testing.T) {
	t.Parallel()
	const texts = 3_000
	w := newMembersSaid(tables.GroupReader{})
	var members []tables.Member
	for i := range texts {
		text, at := strings.Repeat(fmt.Sprint("text", i, "\n"), 100), time.Unix(int64(i), 0)
		members = append(members, tables.Member{Group: fmt.Sprint("group", i), Live: true, State: outage.State{
			Breakers: []outage.Breaker{{Action: text, State: text}},
			Outages:  []outage.Outage{{What: text, Class: text, Since: at}, {What: text, Class: text, Since: at.Add(time.Second)}},
		}})
	}
	said := w.count(members)
	const others = texts - 1_000
	require.Len(t, said.members, 1_001)
	require.Equal(t, map[string]int64{"not_working": others}, said.members[short.Other])
	require.Len(t, said.breakers, 1_001)
	require.Equal(t, map[string]int64{"open": others}, said.breakers[groupAction{short.Other, short.Other}])
	require.Len(t, said.outages.since, 1_001)
	require.Equal(t, time.Unix(1_000, 0), said.outages.since[outageKind{staleOwner{group: short.Other}, short.Other, short.Other}])
	for k := range said.outages.since {
		require.LessOrEqual(t, len(k.what+k.class), 2*maxText)
		require.NotContains(t, k.what+k.class, "\n")
	}
}

// Kinds of what waits are bounded too, and those that are not named are added up. A kind that is gone is 0 for an hour.
func TestWaitingKindsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const streams = 3_000
		w := &workersWatch{seen: newSeen[deliveryKind](), waited: newSeen[waitingKind]()}
		var waiting []outbox.EventCount
		var counts []outboxops.DeliveryCount
		for i := range streams {
			stream, at := fmt.Sprint("stream", i), time.Now().Add(-time.Duration(i)*time.Second)
			waiting = append(waiting, outbox.EventCount{Group: "group", Topic: stream, Action: "ACT", Status: "dead", Events: 2, Oldest: at})
			counts = append(counts, outboxops.DeliveryCount{Group: "group", Stream: stream, Action: "ACT", Status: outboxops.DeliveryDead, Deliveries: 2})
		}
		const others = streams - 1_000
		waits, states := w.waits(waiting), w.states(counts)
		require.Len(t, waits, 1_001)
		require.Equal(t, outbox.EventCount{Events: 2 * others, Oldest: waiting[streams-1].Oldest}, waits[waitingKind{"group", short.Other, "ACT", "dead"}])
		require.Len(t, states, 1_001)
		require.Equal(t, deliveryState{dead: 2 * others}, states[deliveryKind{"group", short.Other, "ACT"}])

		time.Sleep(time.Hour)
		waits, states = w.waits(waiting[:1]), w.states(counts[:1])
		require.Len(t, waits, 1_000)
		require.Equal(t, outbox.EventCount{}, waits[waitingKind{"group", "stream1", "ACT", "dead"}])
		require.Len(t, states, 1_000)
		time.Sleep(time.Second)
		require.Len(t, w.waits(nil), 1)
		require.Len(t, w.states(nil), 1)
	})
}

func lengthOf[K comparable, V any](c *cache[K, V]) (n int) {
	for range c.all() {
		n++
	}
	return n
}
