package itest

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// behind are the parts that use the tables, each with one thing that it does.
var behind = []struct {
	name string
	do   func(t *testing.T, f *schemaFixture) error
}{
	{"a relay", func(t *testing.T, f *schemaFixture) error {
		relay, err := outbox.NewRelay(f.db, nil, outbox.RelayConfig{Schema: f.schema})
		require.NoError(t, err)
		return relay.Run(background)
	}},
	{"a recorder, of one event", func(t *testing.T, f *schemaFixture) error { return f.record(t, 1) }},
	{"a recorder, of some", func(t *testing.T, f *schemaFixture) error { return f.record(t, 2) }},
	{"a recorder, by COPY", func(t *testing.T, f *schemaFixture) error { return f.record(t, 1000) }},
	{"an operator who lists", func(t *testing.T, f *schemaFixture) error {
		f.exec(t, `ALTER TABLE {s}.outbox_failed DROP COLUMN next_retry_at`)
		failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
		require.NoError(t, err)
		_, err = failures.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{})
		return err
	}},
	{"an operator who looks at what was recorded", func(t *testing.T, f *schemaFixture) error {
		inspector, err := outboxops.NewInspector(f.db, outboxops.InspectorConfig{Schema: f.schema})
		require.NoError(t, err)
		_, err = inspector.Events(background, outboxops.EventFilter{}, outboxops.EventPage{})
		return err
	}},
	{"a monitor", func(t *testing.T, f *schemaFixture) error {
		f.exec(t, `ALTER TABLE {s}.outbox_failed DROP COLUMN next_retry_at`)
		monitor, err := outboxops.NewMonitor(f.db, outboxops.MonitorConfig{Schema: f.schema})
		require.NoError(t, err)
		return monitor.Run(background)
	}},
	{"a consumer", func(t *testing.T, f *schemaFixture) error {
		f.exec(t, `ALTER TABLE {s}.event_handled DROP COLUMN event_source`)
		consumer, err := outbox.NewConsumer(f.db, testenv.KafkaOpts(testenv.Brokers(t)), parcels(t),
			"behind", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: f.schema}}, outbox.Handle("DONE", func(context.Context, pgx.Tx, parcel, outbox.Metadata) error { return nil }))
		require.NoError(t, err)
		return consumer.Run(background)
	}},
}

// A database that is a migration behind lacks columns, not tables. Each part that meets it
// says so, and what to do about it, instead of trying again for ever.
func TestDatabaseBehind(t *testing.T) {
	t.Parallel()
	for _, tt := range behind {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			f := migrated(t)
			f.exec(t, `ALTER TABLE {s}.outbox DROP COLUMN size, DROP COLUMN occurred_at; ALTER TABLE {s}.outbox_failed DROP COLUMN size; ALTER TABLE {s}.outbox_lease DROP COLUMN lasts`)
			err := tt.do(t, f)
			require.ErrorIs(t, err, outbox.ErrNotMigrated)
			require.ErrorContains(t, err, "Migrate")
			require.ErrorContains(t, err, "42703")
		})
	}
}

// record records n events in a transaction of its own.
func (f *schemaFixture) record(t *testing.T, n int) error {
	t.Helper()
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{Schema: f.schema})
	require.NoError(t, err)
	events := make([]outbox.DomainEvent, n)
	for i := range events {
		events[i] = good
	}
	return pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error { return rec.Record(background, tx, events...) })
}

// A column or function that a trigger of the user does not find is no matter of
// migrations.
func TestTriggerOfTheUserFails(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"column": `PERFORM missing FROM pg_class`, "function": `PERFORM missing()`, "table": `PERFORM FROM missing`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := migrated(t)
			f.script(t, `CREATE FUNCTION mine() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN `+body+`; RETURN NEW; END $$;
				CREATE TRIGGER mine BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION mine()`)
			for _, n := range []int{1, 2, 1000} {
				err := f.record(t, n)
				require.ErrorContains(t, err, "missing")
				require.NotErrorIs(t, err, outbox.ErrNotMigrated)
			}
		})
	}
}

// A newer release has migrated the database, and its files allow this release to run on the tables. Then Migrate
// changes nothing and is no error, so processes of this release can start again during the upgrade.
func TestMigrateDatabaseAheadAndCompatible(t *testing.T) {
	t.Parallel()
	f := migrated(t)
	f.exec(t, fmt.Sprintf(`INSERT INTO {s}.outbox_migration (version, name, compatible_from) VALUES (9999, '9999_future.sql', %d)`, len(files(t))))
	tables, done := describe(t, f.db, f.schema), applied(t, f.db, f.schema)
	var log testenv.Buffer
	cfg := outbox.MigrateConfig{Schema: f.schema, PartitionRows: 100, AggregateIndex: true, Logger: slog.New(slog.NewTextHandler(&log, nil))}
	require.NoError(t, outbox.Migrate(background, f.db, cfg))
	require.Contains(t, log.String(), "level=WARN")
	require.Contains(t, log.String(), "version=9999")
	require.Equal(t, tables, describe(t, f.db, f.schema))
	require.Equal(t, done, applied(t, f.db, f.schema))
	require.NoError(t, f.record(t, 1))

	f.exec(t, fmt.Sprintf(`UPDATE {s}.outbox_migration SET compatible_from = %d WHERE version = 9999`, len(files(t))+1))
	require.ErrorIs(t, outbox.Migrate(background, f.db, cfg), outbox.ErrDatabaseAhead)
	require.Equal(t, tables, describe(t, f.db, f.schema))
}
