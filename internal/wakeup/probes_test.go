package wakeup_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// counting counts the statements that a pool has begun.
type counting struct {
	mu sync.Mutex
	n  int
}

func (c *counting) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n++
	return ctx
}

func (c *counting) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *counting) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

// Those who probe at the same time get what each of them has asked for, by a few statements.
func TestProbesAreShared(t *testing.T) {
	t.Parallel()
	const relays = 100
	own, schema := testenv.Schema(t)
	statements := new(counting)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns, cfg.ConnConfig.Tracer = 1, statements })
	ctx := t.Context()
	for n := range relays {
		name := sequence(schema, n)
		_, err := own.Exec(ctx, "CREATE SEQUENCE "+name)
		require.NoError(t, err)
		if n > 0 {
			_, err = own.Exec(ctx, `SELECT setval($1, $2)`, name, n)
			require.NoError(t, err)
		}
	}
	probes := wakeup.ProbesOf(db)
	require.Same(t, probes, wakeup.ProbesOf(db))

	busy, err := db.Acquire(ctx) // so that all of them wait for the first one
	require.NoError(t, err)
	var all sync.WaitGroup
	for n := range relays {
		all.Go(func() {
			snapshot, drawn, err := probes.Probe(ctx, sequence(schema, n))
			if err != nil || drawn != int64(n) || snapshot == "" {
				t.Errorf("relay %d: snapshot %q, drawn %d, error %v", n, snapshot, drawn, err)
			}
		})
	}
	require.Eventually(t, func() bool { return wakeup.Waiting(probes) == relays-1 }, testenv.Patience, time.Millisecond)
	busy.Release()
	all.Wait()
	require.Equal(t, 2, statements.count())

	_, _, err = probes.Probe(ctx, sequence(schema, relays))
	require.ErrorContains(t, err, "probe: ")
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, _, err = probes.Probe(ended, sequence(schema, 1))
	require.Error(t, err)
	_, drawn, err := probes.Probe(ctx, sequence(schema, 1))
	require.NoError(t, err)
	require.EqualValues(t, 1, drawn)
}

func sequence(schema string, n int) string {
	return pgx.Identifier{schema, fmt.Sprintf("seq %d", n)}.Sanitize()
}
