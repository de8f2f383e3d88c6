package outboxotel

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// gauges are the values of all gauges without attributes but what is watched, by name.
func gauges(t *testing.T, reader sdk.Reader) map[string]int64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &all), "a failed look spoils no collection")
	values := map[string]int64{}
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			if g, ok := m.Data.(metricdata.Gauge[int64]); ok {
				for _, p := range g.DataPoints {
					values[m.Name] = p.Value
				}
			}
		}
	}
	return values
}

// handled collects what goes to otel.Handle.
type handled struct{ errs []error }

func (h *handled) Handle(err error) { h.errs = append(h.errs, err) }

// The database is asked once in an interval, also when that fails; a failure is told
// once, and what it did not learn is missing.
func TestWatchSparingly(t *testing.T) {
	var told handled
	otel.SetErrorHandler(&told)
	synctest.Test(t, func(t *testing.T) {
		reader := sdk.NewManualReader()
		tel, err := New(Config{MeterProvider: sdk.NewMeterProvider(sdk.WithReader(reader)), Interval: 10 * time.Second})
		require.NoError(t, err)
		looks, failure := 0, error(nil)
		tel.watch(attribute.NewSet(), func(ctx context.Context) (observation, error) {
			looks++
			n := int64(looks)
			return func(o metric.Observer) { o.ObserveInt64(tel.pending, n) }, failure
		})
		for range 5 {
			require.Equal(t, map[string]int64{"outbox.relay.pending": 1, "outbox.watch.up": 1}, gauges(t, reader))
		}
		time.Sleep(10 * time.Second)
		failure = errors.New("no database")
		for range 5 {
			require.Equal(t, map[string]int64{"outbox.watch.up": 0}, gauges(t, reader))
		}
		require.Equal(t, 2, looks)
		require.Len(t, told.errs, 1)
		require.ErrorIs(t, told.errs[0], failure)
		time.Sleep(10 * time.Second)
		failure = nil
		require.Equal(t, map[string]int64{"outbox.relay.pending": 3, "outbox.watch.up": 1}, gauges(t, reader))
		require.NoError(t, tel.Close())
		require.Empty(t, gauges(t, reader))
	})
}

// A look that takes too long costs Timeout, with all others beside it.
func TestWatchIsBounded(t *testing.T) {
	var told handled
	otel.SetErrorHandler(&told)
	synctest.Test(t, func(t *testing.T) {
		reader := sdk.NewManualReader()
		tel, err := New(Config{MeterProvider: sdk.NewMeterProvider(sdk.WithReader(reader)), Timeout: 2 * time.Second})
		require.NoError(t, err)
		var slow atomic.Int64
		for range 3 {
			tel.watch(attribute.NewSet(), func(ctx context.Context) (observation, error) {
				slow.Add(1)
				<-ctx.Done()
				return nil, ctx.Err()
			})
		}
		began := time.Now()
		require.Equal(t, map[string]int64{"outbox.watch.up": 0}, gauges(t, reader))
		require.Equal(t, 2*time.Second, time.Since(began))
		require.EqualValues(t, 3, slow.Load())
	})
}
