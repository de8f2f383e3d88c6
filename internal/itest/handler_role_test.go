package itest

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A handler acts in the role of its tenant, which may not use the schema of outbox. Its events succeed at the first
// attempt, also if other statements have pushed ours out of the cache of the connection.
func TestHandlerInRoleOfTenant(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	for name, test := range map[string]struct {
		change     func(*pgxpool.Config)
		statements int // in a call
	}{
		"default":         {func(*pgxpool.Config) {}, 0},
		"many statements": {func(*pgxpool.Config) {}, 520},
		"small cache":     {func(c *pgxpool.Config) { c.ConnConfig.StatementCacheCapacity = 4 }, 0},
		"describe_exec":   {func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeDescribeExec }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newWorkerFixture(t)
			role := "tenant_" + uuid.NewString()[:8]
			f.exec(`CREATE ROLE ` + role)
			t.Cleanup(func() {
				_, err := testenv.Pool(t, nil).Exec(context.Background(), "DROP ROLE "+role)
				require.NoError(t, err)
			})
			f.db = testenv.Pool(t, test.change)
			cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Retry: outbox.RetryPolicy{MaxRetries: 1}}}
			f.start(cfg, outbox.Handle("TENANT", func(ctx context.Context, tx pgx.Tx, s step, _ outbox.Metadata) error {
				for n := range test.statements {
					if _, err := tx.Exec(ctx, fmt.Sprintf("SELECT %d + $1::int", 1000*s.N+n), 1); err != nil {
						return err
					}
				}
				_, err := tx.Exec(ctx, "SET LOCAL ROLE "+role)
				return err
			}))
			const events = 12
			for n := range events { // one after the other, each in a transaction of its own
				f.commit(step{fmt.Sprint("a", n), n})
				require.Eventually(t, func() bool {
					return f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`) == n+1
				}, testenv.Patience, testenv.Patience/1000)
			}
			require.Equal(t, events, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE' AND attempt_count = 1`))
		})
	}
}
