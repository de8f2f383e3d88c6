package itest

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
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
	var failed *pgconn.PgError
	require.ErrorAs(t, err, &failed)
	require.Contains(t, failed.Message, "triggers")
}

// The three steps by hand reject a table with a unique index, which would stay on its first partition.
func TestPartitionsWouldLoseUniqueness(t *testing.T) {
	t.Parallel()
	d := testenv.NewTables(t)
	call := func(sql string) error {
		_, err := d.DB.Exec(background, pg.InSchema(sql, d.Schema))
		return err
	}
	rejected := func(sql string) {
		t.Helper()
		err := call(sql)
		require.Equal(t, "0A000", pg.Code(err), "%v", err)
		require.ErrorContains(t, err, "unique index")
	}
	unique := outbox.MigrateConfig{Schema: d.Schema, UniqueEventIDs: true}
	require.NoError(t, outbox.Migrate(background, d.DB, unique))
	rejected(`SELECT {schema}.outbox_prepare_partitions(10)`)

	require.NoError(t, call(`DROP INDEX {schema}.outbox_event_id_key`))
	require.NoError(t, call(`SELECT {schema}.outbox_prepare_partitions(10)`))
	require.NoError(t, outbox.Migrate(background, d.DB, unique))
	require.NoError(t, call(`ALTER TABLE {schema}.outbox VALIDATE CONSTRAINT outbox_before_partitions`))
	rejected(`SELECT {schema}.outbox_partition()`)

	require.NoError(t, call(`DROP INDEX {schema}.outbox_event_id_key`))
	require.NoError(t, call(`SELECT {schema}.outbox_partition()`))
	require.ErrorIs(t, outbox.Migrate(background, d.DB, unique), outbox.ErrPartitioned)
}

// A table whose conversion stops after the first step takes many ids more, also if it has had none. Only where it is
// empty in the last step, the first partition is small.
func TestPreparedTableHasRoom(t *testing.T) {
	t.Parallel()
	for events, behind := range map[int]int64{0: 10, 1: 110} {
		t.Run(fmt.Sprint(events), func(t *testing.T) {
			t.Parallel()
			d := testenv.NewTables(t)
			d.Insert(t, events)
			d.Exec(t, `SELECT {schema}.outbox_prepare_partitions(10)`)
			cut := func() (cut int64) {
				require.NoError(t, d.DB.QueryRow(background, pg.InSchema(`SELECT cut FROM {schema}.outbox_partitioning`, d.Schema)).Scan(&cut))
				return cut
			}
			require.EqualValues(t, 110, cut())
			if events > 0 {
				d.Insert(t, 100)
			}
			require.NoError(t, outbox.Migrate(background, d.DB, outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 10}))
			require.Equal(t, behind, cut())
			d.Insert(t, 100)
		})
	}
}

// Migrate tries to partition a table until its context ends. The log and the error then say who has the lock.
func TestPartitionsSayWhoHasTheLock(t *testing.T) {
	t.Parallel()
	d, log := testenv.NewTables(t), new(testenv.Buffer)
	holder := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = "nightly report" })
	open, err := holder.Begin(background)
	require.NoError(t, err)
	defer open.Rollback(background)
	_, err = open.Exec(background, pg.InSchema(`SELECT FROM {schema}.outbox`, d.Schema))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(background, 2*time.Second)
	defer cancel()
	cfg := outbox.MigrateConfig{Schema: d.Schema, PartitionRows: 10, Logger: slog.New(slog.NewTextHandler(log, nil))}
	err = outbox.Migrate(ctx, d.DB, cfg)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	for _, part := range []string{"partitioning of outbox", "nightly report"} {
		require.Contains(t, log.String(), part)
	}
	require.ErrorContains(t, err, "nightly report")
	require.Equal(t, 1, strings.Count(log.String(), "level=WARN"), log.String())
	require.NoError(t, open.Rollback(background))
	require.NoError(t, outbox.Migrate(background, d.DB, cfg))
}
