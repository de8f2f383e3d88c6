package itest

import (
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestPartitionRowsOutOfRange(t *testing.T) {
	t.Parallel()
	const most = 1_000_000_000
	for _, rows := range []int64{-1, most + 1} {
		require.ErrorContains(t, outbox.Migrate(background, nil, outbox.MigrateConfig{PartitionRows: rows}), "field PartitionRows")
	}
}

// A table with what would not go with its name stays plain.
func TestPartitionsWouldLoseATrigger(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	d.Exec(t, `CREATE TRIGGER mine BEFORE UPDATE ON {schema}.outbox FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()`)
	err := outbox.Migrate(background, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 20})
	var pg *pgconn.PgError
	require.ErrorAs(t, err, &pg)
	require.Contains(t, pg.Message, "triggers")
}
