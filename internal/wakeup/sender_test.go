package wakeup_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Many schemas on a pool with many wake-ups are notified by a few statements: each of them once completely, then at
// most once in an interval, and all that was wanted at last.
func TestNotificationsAreSentTogether(t *testing.T) {
	t.Parallel()
	const schemas = 100
	statements := new(counting)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns, cfg.ConnConfig.Tracer = 1, statements })
	testenv.Direct(t) // a pooler delivers no notifications
	own, schema := testenv.Schema(t)
	listener, err := pgx.ConnectConfig(t.Context(), own.Config().ConnConfig.Copy())
	require.NoError(t, err)
	defer listener.Close(context.WithoutCancel(t.Context()))
	name := func(n int) string { return fmt.Sprintf("%s %d", schema, n) }
	ctx, stop := context.WithCancel(t.Context())
	var serving sync.WaitGroup
	for n := range schemas {
		_, err := listener.Exec(ctx, "LISTEN "+wakeup.Channel(name(n)))
		require.NoError(t, err)
		serving.Go(func() { wakeup.Of(db, name(n)).Serve(ctx, slog.Default()) })
	}
	began := time.Now()
	heard := map[string]int{}
	for time.Since(began) < 2*wakeup.Interval {
		for n := range schemas {
			wakeup.Of(db, name(n)).Wake()
		}
		waiting, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		if n, err := listener.WaitForNotification(waiting); err == nil {
			heard[n.Channel]++
		}
		cancel()
	}
	stop()
	serving.Wait()
	most := 3 + int(time.Since(began)/wakeup.Interval) // and the first and the last one
	for {
		waiting, cancel := context.WithTimeout(t.Context(), wakeup.Interval)
		n, err := listener.WaitForNotification(waiting)
		cancel()
		if err != nil {
			break
		}
		heard[n.Channel]++
	}
	require.Len(t, heard, schemas)
	for _, n := range heard {
		require.Greater(t, n, 1)
		require.LessOrEqual(t, n, most)
	}
	require.Less(t, statements.count(), 4*schemas, "the last ones come one by one")
}
