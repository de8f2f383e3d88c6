package testenv

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// OtherClock returns a pool whose sessions see a database with another clock: it is ahead of the clock of this host, or
// behind it for a negative difference. Statements that name pg_catalog, and what the columns of tables have as their
// default, see the real clock.
func OtherClock(t testing.TB, ahead time.Duration) *pgxpool.Pool {
	t.Helper()
	Direct(t)
	schema := schemaName()
	owner := Pool(t, nil)
	_, err := owner.Exec(context.Background(), "CREATE SCHEMA "+quoted(schema))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, dropSchema(context.Background(), owner, schema)) })
	for _, name := range []string{"now", "clock_timestamp"} {
		_, err := owner.Exec(context.Background(), fmt.Sprintf(`CREATE FUNCTION %s.%s() RETURNS timestamptz LANGUAGE sql AS 'SELECT pg_catalog.%[2]s() + interval ''%[3]d ms'''`,
			quoted(schema), name, ahead.Milliseconds()))
		require.NoError(t, err)
	}
	return Pool(t, func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET search_path = "+quoted(schema)+", pg_catalog, public")
			return err
		}
	})
}
