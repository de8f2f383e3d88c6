package main

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// The group needs no database, hence no event_handled.
func TestPageIsDeleted(t *testing.T) {
	t.Parallel()
	a := &app{id: "test", source: "commerce-api", tally: newTally()}
	a.withRedis(t)
	var err error
	a.events, err = registry(a.source)
	require.NoError(t, err)
	c, err := outbox.NewConsumer(nil, nil, a.events, a.group("cache-invalidation"), a.pages.handlers()...)
	require.NoError(t, err)
	for _, product := range []int64{3, 4} {
		require.NoError(t, a.pages.put(t.Context(), product, "<h1>Product</h1>"))
	}
	r := a.newRecord(t, stockDepleted, StockDepletedEventV1{ProductID: 3, happened: noon})
	for range 2 { // a repeat deletes what is not there
		require.NoError(t, c.Deliver(t.Context(), r))
		a.requireCached(t, 3, false)
		a.requireCached(t, 4, true)
	}
}

func (a *app) requireCached(t *testing.T, product int64, want bool) {
	t.Helper()
	got, err := a.pages.has(t.Context(), product)
	require.NoError(t, err)
	require.Equal(t, want, got, "page of product %d", product)
}

// Redis being away is not the fault of an event, however long it lasts.
func TestRedisAway(t *testing.T) {
	t.Parallel()
	a := newApp(t)
	server := a.withRedis(t)
	require.NoError(t, a.pages.put(t.Context(), 3, "<h1>Product</h1>"))
	server.SetError("LOADING Redis is loading the dataset in memory")

	var failed atomic.Int64
	cfg := a.group("cache-invalidation")
	cfg.RetryWait = time.Millisecond
	cfg.Hooks.Failed = func(outbox.Metadata, string, error) { failed.Add(1) }
	c, err := outbox.NewConsumer(nil, a.kafka, a.events, cfg, a.pages.handlers()...)
	require.NoError(t, err)
	require.NoError(t, makeTopics(t.Context(), a.kafka, a.events))
	a.relayAnd(t, c)
	a.record(t, StockDepletedEventV1{ProductID: 3, happened: noon})

	require.Eventually(t, func() bool { return failed.Load() > 5 }, testenv.Patience, time.Millisecond)
	server.SetError("")
	require.Eventually(t, func() bool { return !server.Exists(a.pages.key(3)) }, testenv.Patience, 5*time.Millisecond)
	require.Zero(t, a.tally.look().deadLetters)
}
