package pg

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// sqlLost returns whether process $1 of PostgreSQL certainly runs no statement of a transaction that is older than $2.
// The process may have ended, may serve another client of a pooler, or may have been one of another server. The state
// of a session is NULL if this role may not see it. A standby does not know the sessions of its primary.
const sqlLost = `
SELECT NOT pg_is_in_recovery() AND NOT EXISTS (
       SELECT FROM pg_stat_activity AS a
        WHERE a.pid = $1::int AND a.datname = current_database()
          AND (a.state IS NULL OR a.state = 'disabled'
               OR a.state = 'active' AND a.xact_start < clock_timestamp() - $2::interval))`

// IsLost reports whether a COMMIT that was sent some time ago to a process of PostgreSQL is certainly not running any
// more, or has not arrived. It asks on another connection, see [Beside].
func IsLost(ctx context.Context, db *pgxpool.Pool, backend int32, ago time.Duration) (lost bool, err error) {
	err = Beside(ctx, db, func(conn *pgx.Conn) error {
		return Query(ctx, conn, sqlOwnRole, func(rows pgx.Rows) (err error) {
			lost, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[bool])
			return err
		}, sqlLost, backend, ago/2) // the clocks may differ a little
	})
	if err != nil {
		return false, fmt.Errorf("ask for the state of a session: %w", err)
	}
	return lost, nil
}
