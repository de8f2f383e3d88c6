package testenv

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// ShortTimeout is the timeout of sessions in [UnderTimeouts].
const ShortTimeout = 300 * time.Millisecond

// UnderTimeouts runs a test with pools whose sessions have a short timeout, as if their role had it: each of
// PostgreSQL's timeouts in a test of its own. Versions before 17 have no transaction_timeout.
func UnderTimeouts(t *testing.T, test func(t *testing.T, db *pgxpool.Pool)) {
	t.Helper()
	Direct(t) // settings of sessions
	for _, name := range []string{"statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "transaction_timeout"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			known := false
			require.NoError(t, Pool(t, nil).QueryRow(context.Background(), `SELECT current_setting($1, true) IS NOT NULL`, name).Scan(&known))
			if !known {
				return
			}
			test(t, Pool(t, func(cfg *pgxpool.Config) {
				cfg.ConnConfig.RuntimeParams[name] = fmt.Sprintf("%dms", ShortTimeout.Milliseconds())
				cfg.ConnConfig.RuntimeParams["application_name"] = uuid.NewString()
			}))
		})
	}
}

// OutlastTimeouts calls release after a session of a pool of [UnderTimeouts] has waited for a lock for twice
// [ShortTimeout]. admin is another pool.
func OutlastTimeouts(t *testing.T, admin, db *pgxpool.Pool, release func()) {
	t.Helper()
	defer release()
	require.Eventually(t, func() bool {
		waits := false
		err := admin.QueryRow(context.Background(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE wait_event_type = 'Lock' AND clock_timestamp() - query_start > $1::interval AND application_name = $2)`,
			2*ShortTimeout, db.Config().ConnConfig.RuntimeParams["application_name"]).Scan(&waits)
		return err == nil && waits
	}, Patience, time.Millisecond, "no session waits for so long")
}
