package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

func TestAheadYieldsAllAndEndsWhenNobodyListens(t *testing.T) {
	endless := func(yield func(int, error) bool) {
		for n := 0; yield(n, nil); n++ {
		}
	}
	var got []int
	for n := range ahead(endless) {
		if got = append(got, n); n == 3 {
			break
		}
	}
	require.Equal(t, []int{0, 1, 2, 3}, got)
	ended := func(yield func(int, error) bool) { _ = yield(1, nil) && yield(2, nil) }
	got = nil
	for n := range ahead(ended) {
		got = append(got, n)
	}
	require.Equal(t, []int{1, 2}, got)
}

func TestTracerFindsThePoll(t *testing.T) {
	tr := &tracer{want: 2, enough: make(chan struct{}), times: map[string]stats.Series{}}
	seen := func(sql string, err error) { tr.end(tr.start(context.Background(), sql), err) }
	seen("poll", nil)
	seen("renew", nil)
	seen("poll", errors.New("a poll that failed says nothing"))
	select {
	case <-tr.enough:
		t.Fatal("one poll is not enough")
	default:
	}
	seen("poll", nil)
	<-tr.enough
	seen("poll", nil)
	require.Len(t, tr.most(), 3)
}

func TestAckedClosesOnceWithTheLastRecord(t *testing.T) {
	a := &acked{"topic", newCountdown(5)}
	for range 2 {
		a.OnProduceBatchWritten(kgo.BrokerMetadata{}, "topic", 0, kgo.ProduceBatchMetrics{NumRecords: 2})
	}
	select {
	case <-a.all:
		t.Fatal("one is missing")
	default:
	}
	for range 2 { // the second is a repeat
		a.OnProduceBatchWritten(kgo.BrokerMetadata{}, "topic", 0, kgo.ProduceBatchMetrics{NumRecords: 3})
	}
	<-a.all
}

func TestUsedPerEvent(t *testing.T) {
	u := used{Events: 1000, Elapsed: 20 * time.Millisecond, CPU: 5 * time.Millisecond, Allocs: 3000, Bytes: 100}
	require.Equal(t, 50_000.0, u.rate())
	require.Equal(t, 20.0, u.micros())
	require.Equal(t, 5.0, u.cpu())
	require.Equal(t, 3.0, u.allocs())
	require.Equal(t, 0.1, u.bytes())
}
