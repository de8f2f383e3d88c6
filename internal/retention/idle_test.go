package retention_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/retention"
)

// PostgreSQL ends the transaction of a process that is frozen while it removes rows. Nobody could remove them
// otherwise. An archive has as long as its context.
func TestIdleTransactionsEnd(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	d.Insert(t, 2)
	d.send(t, "default")
	d.age(t, "outbox", "created_at", "8 days")
	d.Exec(t, `CREATE TABLE {schema}.seen (idle text)`)
	d.Exec(t, `CREATE FUNCTION {schema}.see() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN INSERT INTO {schema}.seen SELECT current_setting('idle_in_transaction_session_timeout'); RETURN NULL; END$$`)
	d.Exec(t, `CREATE TRIGGER see AFTER DELETE ON {schema}.outbox EXECUTE FUNCTION {schema}.see()`)
	var during string
	r, l := d.cleaning(t, archiving(1, func(ctx context.Context, tx pgx.Tx, _ []retention.Row) error {
		return tx.QueryRow(ctx, `SELECT current_setting('idle_in_transaction_session_timeout')`).Scan(&during)
	}))
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	defer cancel()
	_, err := r.Published(ctx, l, 0)
	require.NoError(t, err)
	idle, err := time.ParseDuration(during)
	require.NoError(t, err, "%s", during)
	require.InDelta(t, time.Hour+10*time.Second, idle, float64(time.Minute))
	r.Cfg.Archive = nil
	_, err = r.Published(ctx, l, 0)
	require.NoError(t, err)
	var seen []string
	require.NoError(t, d.DB.QueryRow(ctx, `SELECT array_agg(DISTINCT idle) FROM `+pgx.Identifier{d.Schema, "seen"}.Sanitize()).Scan(&seen))
	require.Equal(t, []string{"10s"}, seen)
	require.Empty(t, d.IDs(t, "outbox"))
}
