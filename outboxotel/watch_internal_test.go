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

// gauges returns the values of the gauges whose only attribute is what is watched, by
// name.
func gauges(t *testing.T, reader sdk.Reader) map[string]int64 {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &all), "a failed query does not fail the collection")
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

// handled collects the errors that otel.Handle gets.
type handled struct{ errs []error }

func (h *handled) Handle(err error) { h.errs = append(h.errs, err) }

// setErrorHandler sets the handler of the process until the test ends.
func setErrorHandler(t *testing.T, h otel.ErrorHandler) {
	before := otel.GetErrorHandler()
	otel.SetErrorHandler(h)
	t.Cleanup(func() { otel.SetErrorHandler(before) })
}

// The database is queried once in an interval, also if that fails. An error is reported
// once, and the metrics of the failed query are missing.
func TestWatchSparingly(t *testing.T) {
	// Not parallel: it sets the error handler of the process.
	var reported handled
	setErrorHandler(t, &reported)
	synctest.Test(t, func(t *testing.T) {
		reader := sdk.NewManualReader()
		tel, err := New(Config{MeterProvider: sdk.NewMeterProvider(sdk.WithReader(reader)), Interval: 10 * time.Second})
		require.NoError(t, err)
		queries, failure := 0, error(nil)
		tel.watch(attribute.NewSet(), func(ctx context.Context) (observation, error) {
			queries++
			n := int64(queries)
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
		require.Equal(t, 2, queries)
		require.Len(t, reported.errs, 1)
		require.ErrorIs(t, reported.errs[0], failure)
		time.Sleep(10 * time.Second)
		failure = nil
		require.Equal(t, map[string]int64{"outbox.relay.pending": 3, "outbox.watch.up": 1}, gauges(t, reader))
		require.NoError(t, tel.Close())
		require.Empty(t, gauges(t, reader))
	})
}

// Queries run at the same time, and one that takes too long adds Timeout.
func TestWatchIsBounded(t *testing.T) {
	// Not parallel: it sets the error handler of the process.
	var reported handled
	setErrorHandler(t, &reported)
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
