package itest

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxreplay"
)

// The text of an error of an exported function begins with outbox: and does not repeat it.
func TestErrorsNameOutboxOnce(t *testing.T) {
	t.Parallel()
	db, empty := testenv.Schema(t)
	own, schema := testenv.Migrated(t)
	quiet := slog.New(slog.DiscardHandler)
	events, err := outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account))
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: empty})
	require.NoError(t, err)
	relay, err := outbox.NewRelay(db, testenv.KafkaOpts(testenv.Brokers(t)), outbox.RelayConfig{Schema: empty, Logger: quiet})
	require.NoError(t, err)
	handlers := outbox.HandlerConfig{Schema: empty, Logger: quiet, From: outbox.FromStart}
	handler := outbox.Handle("COUNTED", func(context.Context, pgx.Tx, step, outbox.Metadata) error { return nil })
	worker, err := outbox.NewWorker(db, events, "bank", outbox.WorkerConfig{HandlerConfig: handlers}, handler)
	require.NoError(t, err)
	consumer, err := outbox.NewConsumer(db, testenv.KafkaOpts(testenv.Brokers(t)), events, "bank", outbox.ConsumerConfig{HandlerConfig: handlers}, handler)
	require.NoError(t, err)
	waker, err := outbox.NewWaker(db, outbox.WakerConfig{Schema: empty, Logger: quiet})
	require.NoError(t, err)
	inspector, err := outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: empty})
	require.NoError(t, err)
	monitor, err := outboxops.NewMonitor(db, outboxops.MonitorConfig{Schema: empty, Logger: quiet})
	require.NoError(t, err)
	cuts, err := outboxops.NewCuts(own, outboxops.CutsConfig{Schema: schema})
	require.NoError(t, err)
	table, err := outboxarchive.NewTable(own, outboxarchive.TableConfig{Schema: schema, OutboxSchema: schema})
	require.NoError(t, err)
	why := outboxops.AuditInfo{Operator: "kim", Reason: "test"}
	ctx := t.Context()
	for name, call := range map[string]func() error{
		"Relay.Run":    func() error { return relay.Run(ctx) },
		"Worker.Run":   func() error { return worker.Run(ctx) },
		"Consumer.Run": func() error { return consumer.Run(ctx) },
		"Monitor.Run":  func() error { return monitor.Run(ctx) },
		"Waker.Run, twice": func() error {
			both, stop := context.WithCancel(ctx)
			ended := make(chan error, 2)
			for range 2 {
				go func() { ended <- waker.Run(both) }()
			}
			err := <-ended
			stop()
			require.NoError(t, <-ended)
			return err
		},
		"Recorder.Record": func() error {
			return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, step{"a", 1}) })
		},
		"Recorder.Record, rejected": func() error {
			return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error { return rec.Record(ctx, tx, step{"", 1}) })
		},
		"Migrate": func() error {
			return outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: empty, PartitionRows: 100_000, UniqueEventIDs: true})
		},
		"Inspector.Relays": func() error { _, err := inspector.Relays(ctx); return err },
		"Cuts.Cancel":      func() error { return cuts.Cancel(ctx, "nowhere", why) },
		"Cuts.Finish":      func() error { return cuts.Finish(ctx, nil, "nowhere", why) },
		"Cuts.Await":       func() error { return cuts.Await(ctx, nil, "nowhere", nil) },
		"Table.Partitions": func() error { _, err := table.Partitions(ctx); return err },
		"Replay": func() error {
			_, err := outboxreplay.Run(ctx, nil, nil, outboxreplay.Config{Schema: empty})
			return err
		},
	} {
		err := call()
		if err == nil || !strings.HasPrefix(err.Error(), "outbox: ") || strings.Count(err.Error(), "outbox: ") != 1 {
			t.Errorf("%s: %v", name, err)
		}
	}
}
