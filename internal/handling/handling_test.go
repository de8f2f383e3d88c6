package handling_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/handling"
)

// A lag grows if it has never become shorter for five minutes, and is a backlog.
func TestTrend(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name  string
		at    func(minutes float64) float64
		grows bool
	}{
		{"nothing", func(float64) float64 { return 0 }, false},
		{"steady", func(float64) float64 { return 5_000 }, false},
		{"growing", func(m float64) float64 { return 1_000 * m }, true},
		{"growing, but short", func(m float64) float64 { return m }, false},
		{"growing, then shorter", func(m float64) float64 { return 10_000*m - 1_000*m*m }, false},
		{"shrinking", func(m float64) float64 { return 100_000 - 1_000*m }, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			var trend handling.Trend
			for i := range 21 {
				_, _, growing := trend.Growing()
				require.False(t, growing && i < 11, "%s: too early to say", tt.name)
				time.Sleep(handling.SampleInterval)
				trend.Add(int64(tt.at(float64(i) / 2)))
			}
			_, _, growing := trend.Growing()
			require.Equal(t, tt.grows, growing, tt.name)
		})
	}
}

// What the lag was says nothing of the present: while Kafka does not answer, no trend is reported, and what was known
// before is not compared with the first answer after it.
func TestTrendEndsWithoutAnswers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var trend handling.Trend
		lag := int64(0)
		add := func(times int) {
			for range times {
				time.Sleep(handling.SampleInterval + 3*time.Second) // Kafka is slow
				lag += 1_000
				trend.Add(lag)
			}
		}
		add(11)
		before, now, growing := trend.Growing()
		require.Equal(t, []any{int64(1_000), int64(11_000), true}, []any{before, now, growing})
		time.Sleep(2 * handling.SampleInterval)
		_, _, growing = trend.Growing()
		require.True(t, growing, "one answer is missing")
		time.Sleep(10 * time.Minute)
		_, _, growing = trend.Growing()
		require.False(t, growing)
		add(2)
		_, _, growing = trend.Growing()
		require.False(t, growing)
		add(10)
		_, _, growing = trend.Growing()
		require.True(t, growing)
	})
}

// Slots are waited for, and a wait ends with its context.
func TestSlots(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := handling.NewSlots(2)
		require.True(t, s.Take(t.Context()))
		require.True(t, s.Take(t.Context()))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.False(t, s.Take(ctx))
		go func() {
			time.Sleep(time.Second)
			s.Release()
		}()
		require.True(t, s.Take(t.Context()))
	})
}

// A log line says where the event of a call came from, in the words of what brought it.
func TestCallAttrs(t *testing.T) {
	t.Parallel()
	record := handling.Place{Topic: "t", Partition: 3, Offset: 7}
	require.Equal(t, "t/3 at offset 7", record.String())
	require.Equal(t, []any{"topic", "t", "partition", int32(3), "offset", int64(7)}, record.Attrs())
	delivery := handling.Place{Stream: "s", DeliveryID: 9}
	require.Equal(t, "delivery 9 of s", delivery.String())
	attrs := handling.Call{Action: "A", Type: "e", ID: "1", AggregateType: "Order", AggregateID: "42", Place: delivery, Events: 2, Began: time.Now()}.Attrs()
	require.Equal(t, []any{"stream", "s", "delivery_id", int64(9), "type", "e", "event_id", "1", "aggregate_type", "Order", "aggregate_id", "42", "action", "A", "running_for"}, attrs[:15])
	require.Equal(t, []any{"events", 2}, attrs[16:])
}
