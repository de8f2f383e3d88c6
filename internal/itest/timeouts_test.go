package itest

import (
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
)

// Migrate waits for another process, and builds an index beside an open transaction, whatever timeouts the role has.
func TestMigrateUnderTimeouts(t *testing.T) {
	t.Parallel()
	testenv.UnderTimeouts(t, func(t *testing.T, db *pgxpool.Pool) {
		admin, schema := testenv.Schema(t)
		cfg := outbox.MigrateConfig{Schema: schema, Logger: slog.New(slog.DiscardHandler)}
		migrate := func(cfg outbox.MigrateConfig) <-chan error {
			migrated := make(chan error, 1)
			go func() { migrated <- outbox.Migrate(background, db, cfg) }()
			return migrated
		}
		other, err := admin.Begin(background)
		require.NoError(t, err)
		_, err = other.Exec(background, `SELECT pg_advisory_xact_lock(hashtextextended('outbox.migrate.' || $1, 0))`, schema)
		require.NoError(t, err)
		migrated := migrate(cfg)
		testenv.OutlastTimeouts(t, admin, db, func() { require.NoError(t, other.Rollback(background)) })
		require.NoError(t, <-migrated)

		h := migratedFixture(t, admin, schema, 0)
		other, err = admin.Begin(background)
		require.NoError(t, err)
		require.NoError(t, h.record(background, other, numbered("open", 1, 1)...))
		cfg.AggregateIndex = true
		migrated = migrate(cfg)
		testenv.OutlastTimeouts(t, admin, db, func() { require.NoError(t, other.Rollback(background)) })
		require.NoError(t, <-migrated)
		cfg.AggregateIndex, cfg.PartitionRows = false, 1000
		require.NoError(t, outbox.Migrate(background, db, cfg))
	})
}

// The archive waits for another process that makes its table, whatever timeouts the role has.
func TestArchiveUnderTimeouts(t *testing.T) {
	t.Parallel()
	testenv.UnderTimeouts(t, func(t *testing.T, db *pgxpool.Pool) {
		admin, schema := testenv.Migrated(t)
		table, err := outboxarchive.NewTable(db, outboxarchive.TableConfig{Schema: schema, OutboxSchema: schema})
		require.NoError(t, err)
		other, err := admin.Begin(background)
		require.NoError(t, err)
		_, err = other.Exec(background, `SELECT pg_advisory_xact_lock(hashtextextended('outbox.archive.' || $1, 0))`, schema)
		require.NoError(t, err)
		ensured := make(chan error, 1)
		go func() { ensured <- table.Ensure(background) }()
		testenv.OutlastTimeouts(t, admin, db, func() { require.NoError(t, other.Rollback(background)) })
		require.NoError(t, <-ensured)
	})
}
