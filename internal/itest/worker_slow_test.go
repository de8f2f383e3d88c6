package itest

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// While a handler without a transaction takes long, what came with its event does not wait for it: what was
// handled before is written down, and what comes behind it is handled by others.
func TestWorkerSlowHandlerHoldsUpNothing(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var mu sync.Mutex
	calls := map[string]int{}
	count := func(prefix string) (n int) {
		mu.Lock()
		defer mu.Unlock()
		for account, times := range calls {
			if strings.HasPrefix(account, prefix) {
				n += times
			}
		}
		return n
	}
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	handler := outbox.HandleNoTx("SEEN", func(ctx context.Context, s step, _ outbox.Metadata) error {
		mu.Lock()
		calls[s.Account]++
		mu.Unlock()
		if s.Account == "slow" && s.N == 2 {
			<-goOn
		}
		return nil
	})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Concurrency: 1}, PollInterval: 50 * time.Millisecond}
	cfg.Retry.MaxRetries = -1
	f.commit(step{"before-1", 1}, step{"before-2", 1}, step{"slow", 1}, step{"slow", 2}, step{"slow", 3}, step{"behind-1", 1}, step{"behind-2", 1}, step{"behind-1", 2})
	f.start(cfg, handler)
	require.Eventually(t, func() bool { return count("slow") == 2 }, testenv.Patience, time.Millisecond)
	f.start(cfg, handler)
	require.Eventually(t, func() bool { return count("behind") == 3 }, testenv.Patience, 10*time.Millisecond)
	done := `SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`
	f.eventually(done, 6)
	require.Equal(t, 2, count("slow"), "its key waits")
	release()
	f.eventually(done, 8)
	require.Equal(t, 8, count(""))
	require.Zero(t, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE attempt_count <> 1`))
}

// While a handler without a transaction calls an external service, its worker has no transaction
// open, and so no lock (C5).
func TestNoTransactionIsOpenWhileHandlerRuns(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // which connections are whose
	f := newWorkerFixture(t)
	admin := f.db
	f.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = f.schema })
	began, goOn := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	f.start(outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Lease: time.Second}, outbox.HandleNoTx("SENT", func(context.Context, step, outbox.Metadata) error {
		close(began)
		<-goOn
		return nil
	}))
	f.commit(step{"a", 1})
	<-began
	requireNoIdleTransaction(t, admin, f.schema) // the lease is renewed meanwhile
	release()
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`, 1)
}
