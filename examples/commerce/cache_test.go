package main

import (
	"log/slog"
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
	a := &app{id: "test", source: "commerce-api", log: slog.New(slog.DiscardHandler)}
	a.withRedis(t)
	var err error
	a.events, err = registry(a.source)
	require.NoError(t, err)
	c, err := outbox.NewConsumer(nil, nil, a.events, a.group(cacheGroup), a.config(), a.pages.handlers()...)
	require.NoError(t, err)
	for _, product := range []int64{3, 4} {
		require.NoError(t, a.pages.put(t.Context(), product, pageOf(product, 1)))
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
	page, err := a.pages.get(t.Context(), product)
	require.NoError(t, err)
	require.Equal(t, want, page != "", "page of product %d", product)
}

// Redis being away is not the fault of an event, however long it lasts.
func TestRedisAway(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("-short: needs Redis")
	}
	a := newApp(t)
	program := needRedis(t)
	address, err := freeAddress(t.Context())
	require.NoError(t, err)
	stop, err := runRedis(t.Context(), program, address)
	require.NoError(t, err)
	client, err := connectRedis(t.Context(), "redis://"+address)
	require.NoError(t, err)
	defer client.Close()
	a.pages = pages{client, "test"}
	stop()

	var failed, handled, deadLettered atomic.Int64
	cfg := a.config()
	cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = time.Millisecond, 10*time.Millisecond
	cfg.Hooks.Failed = func(outbox.Metadata, string, error, bool) { failed.Add(1) }
	cfg.Hooks.Handled = func(outbox.Metadata, string, time.Duration) { handled.Add(1) }
	cfg.Hooks.DeadLettered = func(outbox.Metadata, string, string, error) { deadLettered.Add(1) }
	c, err := outbox.NewConsumer(nil, a.kafka, a.events, a.group(cacheGroup), cfg, a.pages.handlers()...)
	require.NoError(t, err)
	ensureTopics(t, a.kafka, a.events)
	a.relayAnd(t, c)
	a.record(t, StockDepletedEventV1{ProductID: 3, happened: noon})

	require.Eventually(t, func() bool { return failed.Load() > 1 }, testenv.Patience, time.Millisecond)
	require.Zero(t, handled.Load())
	stop, err = runRedis(t.Context(), program, address)
	require.NoError(t, err)
	t.Cleanup(stop)
	require.Eventually(t, func() bool { return handled.Load() == 1 }, testenv.Patience, 5*time.Millisecond)
	require.Zero(t, deadLettered.Load())
}
