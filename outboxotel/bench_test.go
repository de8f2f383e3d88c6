package outboxotel_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxotel"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/sdk/metric"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
)

// BenchmarkSent measures what the hooks cost the relay per event of a batch of 5,000:
// without a traceparent, with unsampled ones, with those of 100 Records, and with one for
// each event. The case without headers and tracer is the cost of metrics alone.
func BenchmarkSent(b *testing.B) {
	const events = 5000
	sampled := sdk.NewTracerProvider(sdk.WithBatcher(nothing{}))
	for _, bm := range []struct {
		name    string
		tracers trace.TracerProvider
		records int // 0: events have no traceparent
		flags   string
	}{
		{"metrics", noop.NewTracerProvider(), 0, ""},
		{"metrics of traced events", noop.NewTracerProvider(), events, "01"},
		{"no traceparent", sampled, 0, ""},
		{"unsampled", sampled, events, "00"},
		{"sampled, 100 Records", sampled, 100, "01"},
		{"sampled, one by one", sampled, events, "01"},
	} {
		b.Run(bm.name, func(b *testing.B) {
			tel, err := outboxotel.New(outboxotel.Config{
				MeterProvider: metric.NewMeterProvider(metric.WithReader(metric.NewManualReader())), TracerProvider: bm.tracers,
			})
			require.NoError(b, err)
			ours := tel.Relay(outbox.RelayConfig{}).Hooks.Sent
			withBatch(b, events, bm.records, bm.flags, func(batch outbox.SentBatch) {
				b.ReportAllocs()
				for b.Loop() {
					ours(batch)
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*events), "ns/event")
			})
		})
	}
}

// withBatch calls f with a batch that a relay has sent, while the batch is valid.
func withBatch(b *testing.B, events, records int, flags string, f func(outbox.SentBatch)) {
	s := newScene(b, sdk.NeverSample())
	rec, err := outbox.NewRecorder(s.events, outbox.RecorderConfig{Schema: s.schema})
	require.NoError(b, err)
	each := events / max(records, 1)
	require.NoError(b, pgx.BeginFunc(b.Context(), s.db, func(tx pgx.Tx) error {
		for r := range max(records, 1) {
			ctx := b.Context()
			if records > 0 {
				ctx = outbox.WithTraceParent(ctx, fmt.Sprintf("00-%032x-%016x-%s", r+1, r+1, flags))
			}
			batch := make([]outbox.DomainEvent, each)
			for i := range batch {
				batch[i] = placed{ID: fmt.Sprint(r, i), At: time.Now()}
			}
			if err := rec.Record(ctx, tx, batch...); err != nil {
				return err
			}
		}
		return nil
	}))
	done := make(chan struct{})
	relay, err := outbox.NewRelay(s.db, testenv.KafkaOpts(s.brokers), outbox.RelayConfig{Schema: s.schema, Logger: quiet, Lease: time.Hour,
		Hooks: outbox.RelayHooks{Sent: func(batch outbox.SentBatch) {
			require.Equal(b, events, batch.Events)
			f(batch)
			close(done)
		}}})
	require.NoError(b, err)
	stop := testenv.Run(b, relay.Run)
	<-done
	stop()
}
