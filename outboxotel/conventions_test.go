package outboxotel_test

import (
	"context"
	"encoding/hex"
	"errors"
	"slices"
	"testing"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdk "go.opentelemetry.io/otel/sdk/trace"
)

// conventional are the metrics of the semantic conventions for messaging 1.44.0, with all attributes that a series has.
// Attributes that begin with outbox, and test, are ours.
var conventional = []struct {
	name, unit string
	histogram  bool
	attributes []string
}{
	{"messaging.client.sent.messages", "{message}", false, []string{"error.type", "messaging.destination.name", "messaging.operation.name", "messaging.system",
		"outbox.relay.name", "outbox.retry", "test"}},
	{"messaging.client.operation.duration", "s", true, []string{"error.type", "messaging.operation.name", "messaging.operation.type", "messaging.system",
		"outbox.relay.name", "outbox.retry", "test"}},
	{"messaging.client.consumed.messages", "{message}", false, []string{"cloudevents.event_type", "error.type", "messaging.consumer.group.name",
		"messaging.destination.name", "messaging.operation.name", "messaging.system", "outbox.action", "test"}},
	{"messaging.process.duration", "s", true, []string{"cloudevents.event_type", "error.type", "messaging.consumer.group.name",
		"messaging.destination.name", "messaging.operation.name", "messaging.system", "outbox.action", "test"}},
}

// Names, types, units, bounds and attributes of conventional metrics. Only what has failed has error.type.
func TestConventionalMetrics(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.commit(t.Context(), t, tooLarge("large"))
	s.commit(t.Context(), t, orders("good", "bad")...)
	var m metrics
	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}}}
	testenv.Run(t, s.consumer(t, cfg, outbox.HandleNoTx("MAIL", failBad)).Run)
	stop := s.relay(t, outbox.RelayConfig{BatchSize: 1})
	eventually(t, func() bool { m = s.collect(t); return m.value("messaging.process.duration") == 2 }, "not handled")
	stop()
	m = s.collect(t)
	bounds := []float64{0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10}
	for _, want := range conventional {
		require.Contains(t, m, want.name)
		require.Equal(t, want.unit, m[want.name].Unit, want.name)
		sets, errored := []attribute.Set{}, 0
		if want.histogram {
			for _, p := range m[want.name].Data.(metricdata.Histogram[float64]).DataPoints {
				require.Equal(t, bounds, p.Bounds, want.name)
				sets = append(sets, p.Attributes)
			}
		} else {
			data := m[want.name].Data.(metricdata.Sum[int64])
			require.True(t, data.IsMonotonic, want.name)
			for _, p := range data.DataPoints {
				sets = append(sets, p.Attributes)
			}
		}
		for _, set := range sets {
			var names []string
			for _, a := range set.ToSlice() {
				names = append(names, string(a.Key))
			}
			if slices.Contains(names, "error.type") {
				errored++
			} else {
				names = append(names, "error.type")
			}
			require.ElementsMatch(t, want.attributes, names, want.name)
		}
		require.Equal(t, []int{2, 1}, []int{len(sets), errored}, "%s: %v", want.name, sets)
	}
}

func failBad(_ context.Context, e placed, _ outbox.Metadata) error {
	if e.ID == "bad" {
		return errors.New("no")
	}
	return nil
}

// Exemplars of histograms, and of counters of what failed, lead to the spans of sampled traces.
func TestExemplars(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.AlwaysSample())
	s.commit(t.Context(), t, orders("bad")...)
	s.relay(t, outbox.RelayConfig{})
	cfg := outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}}
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: cfg}, outbox.HandleNoTx("MAIL", failBad)).Run)
	s.worker(t, outbox.WorkerConfig{HandlerConfig: cfg}, outbox.HandleNoTx("MAIL", failBad))
	var m metrics
	eventually(t, func() bool {
		m = s.collect(t)
		return m.value("outbox.worker.processed") == 1 && m.value("outbox.consumer.processed") == 1 && m.value("outbox.relay.publish.latency") == 1
	}, "not handled")
	record, sent, processed := s.one(t, "record"), s.one(t, "send "+s.orders), s.named("process "+s.orders)
	require.Len(t, processed, 2)
	of := func(spans ...string) []string { return spans }
	id := record.SpanContext.SpanID().String()
	for name, want := range map[string][]string{
		"outbox.recorder.events":              of(id),
		"outbox.relay.publish.latency":        of(id),
		"outbox.relay.batch.size":             of(sent.SpanContext.SpanID().String()),
		"messaging.client.operation.duration": of(sent.SpanContext.SpanID().String()),
		"messaging.process.duration":          of(processed[0].SpanContext.SpanID().String(), processed[1].SpanContext.SpanID().String()),
		"messaging.client.consumed.messages":  of(processed[0].SpanContext.SpanID().String(), processed[1].SpanContext.SpanID().String()),
		"outbox.consumer.failed":              of(id),
		"outbox.consumer.processed":           of(id),
		"outbox.worker.failed":                of(id),
		"outbox.worker.processed":             of(id),
	} {
		traces, spans := exemplars(m[name])
		require.ElementsMatch(t, want, spans, name)
		for _, trace := range traces {
			require.Equal(t, record.SpanContext.TraceID().String(), trace, name)
		}
	}
}

// Without sampled traces there are no exemplars.
func TestNoExemplars(t *testing.T) {
	t.Parallel()
	s := newScene(t, sdk.NeverSample())
	s.commit(t.Context(), t, orders("bad")...)
	s.relay(t, outbox.RelayConfig{})
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}}}, outbox.HandleNoTx("MAIL", failBad)).Run)
	var m metrics
	eventually(t, func() bool { m = s.collect(t); return m.value("outbox.consumer.processed") == 1 }, "not handled")
	for name, one := range m {
		traces, _ := exemplars(one)
		require.Empty(t, traces, name)
	}
}

// exemplars returns the ids of traces and spans of the exemplars of a metric.
func exemplars(m metricdata.Metrics) (traces, spans []string) {
	add := func(trace, span []byte) {
		traces, spans = append(traces, hex.EncodeToString(trace)), append(spans, hex.EncodeToString(span))
	}
	switch data := m.Data.(type) {
	case metricdata.Sum[int64]:
		for _, p := range data.DataPoints {
			for _, e := range p.Exemplars {
				add(e.TraceID, e.SpanID)
			}
		}
	case metricdata.Histogram[int64]:
		for _, p := range data.DataPoints {
			for _, e := range p.Exemplars {
				add(e.TraceID, e.SpanID)
			}
		}
	case metricdata.Histogram[float64]:
		for _, p := range data.DataPoints {
			for _, e := range p.Exemplars {
				add(e.TraceID, e.SpanID)
			}
		}
	}
	return traces, spans
}
