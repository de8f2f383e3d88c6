package itest

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// encodedDatabase returns a pool on a database with an encoding.
func encodedDatabase(t *testing.T, encoding string) *pgxpool.Pool {
	t.Helper()
	admin := testenv.Pool(t, nil)
	name := strings.ToLower(encoding) + "_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err := admin.Exec(background, "CREATE DATABASE "+name+" ENCODING '"+encoding+"' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0")
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(background, "DROP DATABASE "+name+" WITH (FORCE)")
		require.NoError(t, err)
	})
	return testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.Database = name })
}

// requireEncodingRefused holds Migrate, a relay, a worker and a consumer against a database whose encoding is another
// one, or whose sessions have another one. A row that a statement in SQL records there arrives as invalid JSON.
func requireEncodingRefused(t *testing.T, db *pgxpool.Pool, schema string, want ...string) {
	t.Helper()
	quiet := slog.New(slog.DiscardHandler)
	events, err := outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account))
	require.NoError(t, err)
	handler := outbox.HandleNoTx("COUNTED", func(context.Context, step, outbox.Metadata) error { return nil })
	cfg := outbox.HandlerConfig{Schema: schema, From: outbox.FromStart, Logger: quiet}
	opts := testenv.KafkaOpts(testenv.Brokers(t))
	relay, err := outbox.NewRelay(db, opts, outbox.RelayConfig{Schema: schema, Logger: quiet})
	require.NoError(t, err)
	worker, err := outbox.NewWorker(db, events, "group", outbox.WorkerConfig{HandlerConfig: cfg}, handler)
	require.NoError(t, err)
	consumer, err := outbox.NewConsumer(db, opts, events, "group", outbox.ConsumerConfig{HandlerConfig: cfg}, handler)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	for name, err := range map[string]error{
		"migrate": outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: schema, Logger: quiet}),
		"relay":   relay.Run(ctx), "worker": worker.Run(ctx), "consumer": consumer.Run(ctx),
	} {
		require.ErrorIs(t, err, outbox.ErrEncoding, name)
		for _, text := range want {
			require.ErrorContains(t, err, text, name)
		}
	}
}

func TestOtherEncodingsAreRefused(t *testing.T) {
	t.Parallel()
	for _, encoding := range []string{"LATIN1", "EUC_JP", "SQL_ASCII"} {
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			db := encodedDatabase(t, encoding)
			requireEncodingRefused(t, db, "public", "database "+db.Config().ConnConfig.Database+" has the encoding "+encoding)
		})
	}
}

// pgx takes texts as UTF-8, whatever client_encoding a role has.
func TestOtherClientEncodingIsRefused(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a setting of the session
	_, schema := testenv.Migrated(t)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["client_encoding"] = "LATIN1" })
	requireEncodingRefused(t, db, schema, "client_encoding LATIN1", "in database "+db.Config().ConnConfig.Database)
}
