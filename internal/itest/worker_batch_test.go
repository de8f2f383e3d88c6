package itest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

// One delivery of a batch fails. The others are committed in few transactions, and their handlers are not called often.
func TestOneDeliveryOfBatchFails(t *testing.T) {
	t.Parallel()
	failures := map[string]string{"error": "", "panic": "", "session": "SELECT pg_terminate_backend(pg_backend_pid())", "commit": "INSERT INTO {schema}.single VALUES (1)"}
	for _, form := range []string{"Handle", "HandleBatch"} {
		for name, statement := range failures {
			t.Run(form+" "+name, func(t *testing.T) {
				t.Parallel()
				const n, at = 100, 57
				f := newWorkerFixture(t)
				f.exec(`CREATE TABLE {schema}.single (n int UNIQUE DEFERRABLE INITIALLY DEFERRED); INSERT INTO {schema}.single VALUES (1)`)
				var calls atomic.Int64
				one := func(ctx context.Context, tx pgx.Tx, s step) error {
					calls.Add(1)
					switch {
					case s.N != at:
					case name == "panic":
						panic("spilled")
					case statement == "":
						return errTest
					default:
						if _, err := tx.Exec(ctx, f.sql(statement)); err != nil {
							return err
						}
					}
					_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('DONE', $1, $2)`), s.Account, s.N)
					return err
				}
				h := outbox.Handle("DONE", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error { return one(ctx, tx, s) })
				if form == "HandleBatch" {
					h = outbox.HandleBatch("DONE", func(ctx context.Context, tx pgx.Tx, steps []outbox.Received[step]) error {
						for _, r := range steps {
							if err := one(ctx, tx, r.Event); err != nil {
								return err
							}
						}
						return nil
					})
				}
				steps := make([]step, n)
				for i := range steps {
					steps[i] = step{fmt.Sprint("account ", i+1), i + 1}
				}
				cfg := outbox.WorkerConfig{PollInterval: 20 * time.Millisecond, HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetries: -1}, Concurrency: 1}}
				_, stop := f.start(cfg, h) // what is recorded before its first start it does not get
				f.eventually(`SELECT count(*) FROM {schema}.event_subscription`, 1)
				f.commit(steps...)
				f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`, 1)
				f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, n-1)
				stop()
				require.Equal(t, n-1, f.count(`SELECT count(*) FROM {schema}.effect`))
				require.Equal(t, n-1, f.count(`SELECT count(DISTINCT n) FROM {schema}.effect WHERE n <> 57`))
				require.LessOrEqual(t, calls.Load(), int64(6*n))
				require.LessOrEqual(t, f.count(`SELECT count(DISTINCT xmin::text) FROM {schema}.effect`), 16)
			})
		}
	}
}
