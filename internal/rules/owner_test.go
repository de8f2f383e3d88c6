package rules

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/migrations"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxreplay"
)

// No part of outbox runs what a stranger has planted in the schema that is named like the owner's login. The owner
// works through a pool as a host makes it, with the default search_path.
func TestOwnerBesideHostileSchema(t *testing.T) {
	testenv.Long(t)
	testenv.Direct(t)
	t.Parallel()
	admin := testenv.OtherDatabase(t)
	owner := plantForOwner(t, admin)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			f := newOwnerFixture(t, admin, owner, mode)
			f.run()
			f.inspect()
			f.changeFailures()
			f.changeGroups()
			f.sendAgain()
			f.try("CleanHandled", second(outbox.CleanHandled(t.Context(), f.db, f.schema, outbox.RetentionConfig{HandledFor: time.Nanosecond, DeliveredFor: time.Nanosecond})))
			f.try("Table.Partitions", second(f.table.Partitions(t.Context())))
			f.try("Table.Expire", second(f.table.Expire(t.Context(), why)))
			require.NotContains(t, f.said.String(), "planted")
			require.False(t, isCalled(t, admin, owner))
		})
	}
}

var why = outboxops.AuditInfo{Operator: "kim", Reason: "a test"}

// plantForOwner makes a login, and a schema of its name with what fits statements better than PostgreSQL's own. Each
// function counts its calls, and fails.
func plantForOwner(t *testing.T, admin *pgxpool.Pool) (owner string) {
	t.Helper()
	texts := statements(t)
	require.NoError(t, fs.WalkDir(migrations.FS, ".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			text, err := fs.ReadFile(migrations.FS, path)
			texts[string(text)] = "migrations"
			return err
		}
		return err
	}))
	owner = "owner_" + uuid.NewString()[:8]
	sql := strings.NewReplacer("BEGIN END", "BEGIN PERFORM pg_catalog.nextval(''hostile.calls''); RAISE EXCEPTION ''planted''; END", "SET search_path = hostile, public", "",
		"CREATE SCHEMA hostile;", "CREATE SCHEMA hostile; GRANT USAGE ON SCHEMA hostile TO PUBLIC; CREATE SEQUENCE hostile.calls; GRANT ALL ON SEQUENCE hostile.calls TO PUBLIC;").Replace(plantedInexact)
	_, err := admin.Exec(t.Context(), "SELECT set_config('test.functions', '"+strings.Join(called(texts), " ")+"', false); CREATE ROLE "+owner+" LOGIN PASSWORD 'secret'; GRANT CREATE ON DATABASE "+
		admin.Config().ConnConfig.Database+" TO "+owner+";"+strings.ReplaceAll(sql, "hostile", owner), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(context.Background(), "DROP OWNED BY "+owner+" CASCADE; DROP ROLE "+owner, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	})
	return owner
}

// isCalled reports whether anything planted has run since the last call.
func isCalled(t *testing.T, admin *pgxpool.Pool, owner string) (called bool) {
	t.Helper()
	require.NoError(t, admin.QueryRow(t.Context(), "SELECT is_called FROM "+owner+".calls").Scan(&called))
	_, err := admin.Exec(t.Context(), "ALTER SEQUENCE "+owner+".calls RESTART")
	require.NoError(t, err)
	return called
}

// deed is the event of these tests.
type deed struct{ Key string }

func (deed) OccurredAt() time.Time { return time.Now() }
func (d deed) key() string         { return d.Key }

// ownerFixture has the tables of the owner in a schema of their own.
type ownerFixture struct {
	*testing.T
	admin, db     *pgxpool.Pool
	owner, schema string
	topic         string
	opts          []kgo.Opt
	events        *outbox.Registry
	rec           *outbox.Recorder
	table         *outboxarchive.Table
	said          testenv.Buffer
	log           *slog.Logger
}

func newOwnerFixture(t *testing.T, admin *pgxpool.Pool, owner string, mode pgx.QueryExecMode) *ownerFixture {
	t.Helper()
	f := &ownerFixture{T: t, admin: admin, owner: owner, schema: "of " + mode.String(), topic: "owner-" + uuid.NewString(), opts: testenv.KafkaOpts(testenv.Brokers(t))}
	f.log = slog.New(slog.NewTextHandler(&f.said, nil))
	f.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Database, cfg.ConnConfig.User, cfg.ConnConfig.Password = admin.Config().ConnConfig.Database, owner, "secret"
		cfg.ConnConfig.DefaultQueryExecMode = mode
	})
	var path string
	require.NoError(t, f.db.QueryRow(t.Context(), "SHOW search_path").Scan(&path))
	require.Equal(t, `"$user", public`, path)
	_, err := f.db.Exec(t.Context(), `SELECT 'a'::varchar = 'a'::text`)
	require.ErrorContains(t, err, "planted", "the trap works")
	require.True(t, isCalled(t, admin, owner))
	for _, topic := range []string{f.topic, outbox.DeadLetterTopic(f.topic)} {
		testenv.CreateTopic(t, testenv.Brokers(t), topic, 1)
	}
	f.events, err = outbox.NewRegistry("test", outbox.Event("test.deed.done.v1", "Deed", deed.key).Topic(f.topic))
	require.NoError(t, err)
	f.rec, err = outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: f.schema})
	require.NoError(t, err)
	f.table, err = outboxarchive.NewTable(f.db, outboxarchive.TableConfig{Schema: f.schema, OutboxSchema: f.schema})
	require.NoError(t, err)
	for range 2 {
		require.NoError(t, outbox.Migrate(t.Context(), f.db, outbox.MigrateConfig{Schema: f.schema, AggregateIndex: true, UniqueEventIDs: true}))
		require.NoError(t, f.table.Ensure(t.Context()))
	}
	return f
}

// try fails if something planted has run, or if the error is not one that outbox refuses an act with.
func (f *ownerFixture) try(what string, err error) {
	f.Helper()
	switch called := isCalled(f.T, f.admin, f.owner); {
	case called:
		f.Errorf("%s runs what is planted: %v %s", what, err, placeOf(err))
	case err != nil && !errors.Is(err, outboxops.ErrCutRefused) && !errors.Is(err, outboxops.ErrNoCut):
		f.Errorf("%s: %v", what, err)
	}
}

// placeOf returns what PostgreSQL says about the place of an error.
func placeOf(err error) string {
	var answer *pgconn.PgError
	if errors.As(err, &answer) {
		return answer.Where
	}
	return ""
}

func second[A any](_ A, err error) error { return err }

func (f *ownerFixture) exec(sql string, args ...any) {
	f.Helper()
	_, err := f.admin.Exec(f.Context(), pg.InSchema(sql, f.schema), args...)
	require.NoError(f, err)
}

func (f *ownerFixture) is(condition string) (is bool) {
	f.Helper()
	require.NoError(f, f.admin.QueryRow(f.Context(), pg.InSchema("SELECT "+condition, f.schema)).Scan(&is))
	return is
}

func (f *ownerFixture) record(keys ...string) {
	f.Helper()
	require.NoError(f, pgx.BeginFunc(f.Context(), f.db, func(tx pgx.Tx) error {
		for _, key := range keys {
			if err := f.rec.Record(f.Context(), tx, deed{key}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// run has a relay with retention, a worker and a consumer work until all is handled and archived, or dead.
func (f *ownerFixture) run() {
	relay, err := outbox.NewRelay(f.db, f.opts, outbox.RelayConfig{Schema: f.schema, PollInterval: 10 * time.Millisecond, Logger: f.log, Retention: outbox.RetentionConfig{
		PublishedFor: time.Nanosecond, CursorsFor: time.Nanosecond, Archive: f.table.Archive}})
	require.NoError(f, err)
	cfg := outbox.HandlerConfig{Schema: f.schema, From: outbox.FromStart, Logger: f.log, HoldDead: true, Retry: outbox.RetryPolicy{MaxRetries: 1, RetryWait: 10 * time.Millisecond},
		Alerts: outbox.AlertConfig{Interval: 50 * time.Millisecond, DeadThreshold: 1}}
	handlers := []outbox.Handler{
		outbox.Handle("DONE", func(context.Context, pgx.Tx, deed, outbox.Metadata) error { return nil }),
		outbox.Handle("FAILS", func(_ context.Context, _ pgx.Tx, d deed, _ outbox.Metadata) error {
			if strings.HasPrefix(d.Key, "bad") {
				return outbox.Permanent(errors.New("bad"))
			}
			return nil
		}),
	}
	worker, err := outbox.NewWorker(f.db, f.events, "workers", outbox.WorkerConfig{HandlerConfig: cfg, PollInterval: 10 * time.Millisecond}, handlers...)
	require.NoError(f, err)
	consumer, err := outbox.NewConsumer(f.db, f.opts, f.events, "consumers-"+f.topic, outbox.ConsumerConfig{HandlerConfig: cfg}, handlers...)
	require.NoError(f, err)
	var stops []func()
	for _, run := range []func(context.Context) error{relay.Run, worker.Run, consumer.Run} {
		stops = append(stops, testenv.Run(f, run))
	}
	require.Eventually(f, func() bool { return f.is(`EXISTS (SELECT FROM {schema}.outbox_cursor WHERE relay = 'worker:workers')`) }, testenv.Patience, 10*time.Millisecond)
	f.record("a", "b", "a", "bad 1", "bad 2", "bad 3")
	require.Eventually(f, func() bool {
		return f.is(`(SELECT count(*) = 0 FROM {schema}.outbox) AND (SELECT count(*) = 6 FROM {schema}.outbox_archive)
			AND (SELECT count(*) = 6 FROM {schema}.event_delivery WHERE status = 'DEAD') AND (SELECT count(*) >= 18 FROM {schema}.event_handled)`)
	}, testenv.Patience, 50*time.Millisecond, "%v", &f.said)
	for _, stop := range stops {
		stop()
	}
	f.try("the parts", nil)
	f.record("c", "d")
}

func (f *ownerFixture) inspect() {
	ctx := f.Context()
	i, err := outboxops.NewInspector(f.db, outboxops.InspectorConfig{Schema: f.schema})
	require.NoError(f, err)
	f.try("Inspector.Relays", second(i.Relays(ctx)))
	f.try("Inspector.Stale", second(i.Stale(ctx, time.Nanosecond)))
	f.try("Inspector.Progress", second(i.Progress(ctx, "default", time.Now().Add(-time.Minute), time.Second)))
	f.try("Inspector.Transactions", second(i.Transactions(ctx, 0)))
	f.try("Inspector.Partitions", second(i.Partitions(ctx)))
	f.try("Inspector.HasAggregateIndex", second(i.HasAggregateIndex(ctx)))
	f.try("Inspector.Topics", second(i.Topics(ctx)))
	all, err := i.Events(ctx, outboxops.EventFilter{}, outboxops.EventPage{})
	f.try("Inspector.Events", err)
	require.Len(f, all, 2)
	f.try("Inspector.Events", second(i.Events(ctx, outboxops.EventFilter{EventID: all[0].EventID, Type: all[0].Type, AggregateType: "Deed", AggregateID: "c",
		Since: time.Now().Add(-time.Hour), Until: time.Now()}, outboxops.EventPage{Before: all[0].OutboxID, Limit: 1})))
	f.try("Inspector.Event", second(i.Event(ctx, all[0].OutboxID)))
	tail, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	for _, err := range i.Tail(tail, outboxops.EventFilter{}) {
		f.try("Inspector.Tail", err)
	}
	m, err := outboxops.NewMonitor(f.db, outboxops.MonitorConfig{Schema: f.schema, Logger: f.log, Alerts: outbox.AlertConfig{Interval: 50 * time.Millisecond, ReportInterval: time.Millisecond}})
	require.NoError(f, err)
	watch, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	f.try("Monitor.Run", m.Run(watch))
}

func (f *ownerFixture) changeFailures() {
	ctx := f.Context()
	f.exec(`INSERT INTO {schema}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload,
		content_type, topic, headers, occurred_at, created_at, retry_count, last_error, error_class, status)
		SELECT n, 'key ' || n, gen_random_uuid(), 'test.deed.done.v1', 'test', 'Deed', 'key', '{"Key": "a"}', 'application/json', $1, '{}', now(), now(), 3, 'bad', 'other', 'dead'
		  FROM generate_series(1001, 1006) AS n`, f.topic)
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(f, err)
	f.try("Failures.Unresolved", second(failures.Unresolved(ctx)))
	for _, kind := range []outboxops.Kind{outboxops.KindEvent, outboxops.KindDelivery} {
		filter := outboxops.FailureFilter{Kind: kind, Type: "test.deed.done.v1", AggregateType: "Deed", Since: time.Now().Add(-time.Hour), Until: time.Now().Add(time.Hour)}
		f.try("Failures.Count", second(failures.Count(ctx, filter)))
		all, err := failures.List(ctx, filter, outboxops.FailurePage{})
		f.try("Failures.List", err)
		require.GreaterOrEqual(f, len(all), 6, kind)
		f.try("Failures.Get", second(failures.Get(ctx, all[0].ID)))
		f.try("Failures.AuditRead", failures.AuditRead(ctx, all[0].ID, why))
		if kind == outboxops.KindEvent {
			f.try("Failures.Edit", failures.Edit(ctx, all[0].ID, []byte(`{"Key": "b"}`), why))
			f.try("Failures.Hold", failures.Hold(ctx, all[1].ID, why))
		}
		f.try("Failures.Release", failures.Release(ctx, all[1].ID, why))
		f.try("Failures.Retry", failures.Retry(ctx, all[2].ID, why))
		f.try("Failures.Resolve", failures.Resolve(ctx, all[3].ID, why))
		f.try("Failures.RetryAll", second(failures.RetryAll(ctx, filter, outboxops.BulkConfig{DryRun: true, Topics: map[string]int{}, Handlers: map[outboxops.FailureHandler]int{}}, why)))
		f.try("Failures.RetryAll", second(failures.RetryAll(ctx, filter, outboxops.BulkConfig{}, why)))
		f.try("Failures.ResolveAll", second(failures.ResolveAll(ctx, filter, outboxops.BulkConfig{}, why)))
		f.try("Failures.Audit", second(failures.Audit(ctx, all[0].ID, outboxops.AuditPage{})))
	}
	f.try("Failures.Audit", second(failures.Audit(ctx, outboxops.FailureID{}, outboxops.AuditPage{})))
	var recorded int64
	require.NoError(f, f.admin.QueryRow(ctx, pg.InSchema("SELECT max(id) FROM {schema}.outbox", f.schema)).Scan(&recorded))
	f.try("Failures.AuditReadRecorded", failures.AuditReadRecorded(ctx, recorded, why))
	deliveries, err := outboxops.NewDeliveries(f.db, outboxops.DeliveriesConfig{Schema: f.schema})
	require.NoError(f, err)
	f.try("Deliveries.Count", second(deliveries.Count(ctx, outboxops.DeliveryFilter{Group: "workers"})))
	f.try("Deliveries.Groups", second(deliveries.Groups(ctx)))
	f.try("Deliveries.Waiting", second(deliveries.Waiting(ctx, "workers")))
}

func (f *ownerFixture) changeGroups() {
	ctx, group := f.Context(), "consumers-"+f.topic
	consumers, err := outboxops.NewConsumers(f.db, outboxops.ConsumersConfig{Schema: f.schema})
	require.NoError(f, err)
	f.try("Consumers.Pause", consumers.Pause(ctx, group, f.topic, why))
	f.try("Consumers.Resume", consumers.Resume(ctx, group, f.topic, why))
	groups, _, err := consumers.List(ctx, outboxops.ConsumerFilter{Group: group})
	f.try("Consumers.List", err)
	require.Len(f, groups, 1)
	f.try("Consumers.Lag", second(consumers.Lag(ctx, f.opts, groups)))
	f.try("Consumers.DeadLetters", second(consumers.DeadLetters(ctx, f.opts, groups)))
	for _, dry := range []bool{true, false} {
		f.try("Rewind", second(outboxops.Rewind(ctx, f.db, f.opts, outboxops.RewindConfig{Group: group, Schema: f.schema, Time: time.Now().Add(-time.Hour), DryRun: dry, Audit: why})))
	}
	cuts, err := outboxops.NewCuts(f.db, outboxops.CutsConfig{Schema: f.schema})
	require.NoError(f, err)
	f.try("Cuts.List", second(cuts.List(ctx)))
	moves := []string{"workers"}
	f.try("Cuts.ToPostgres", cuts.ToPostgres(ctx, moves, "default", nil, why))
	f.try("Cuts.ToKafka", cuts.ToKafka(ctx, moves, "another", why))
	f.try("Cuts.Finish", cuts.Finish(ctx, f.opts, "another", why))
	f.try("Cuts.FinishEarly", cuts.FinishEarly(ctx, "another", why))
	waits, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if err := cuts.Await(waits, f.opts, "another", nil); !errors.Is(err, context.DeadlineExceeded) {
		f.try("Cuts.Await", err)
	}
	f.try("Cuts.Cancel", cuts.Cancel(ctx, "another", why))
	cut := outboxops.DebeziumCut{Relay: "another", Publication: "p", Slot: "s"}
	f.try("Cuts.FromDebezium", cuts.FromDebezium(ctx, cut, why))
	f.try("Cuts.ToDebezium", cuts.ToDebezium(ctx, cut, why))
	f.try("Cuts.BeginRelay", cuts.BeginRelay(ctx, cut, why))
	f.try("Cuts.DebeziumProgress", second(cuts.DebeziumProgress(ctx, cut)))
}

func (f *ownerFixture) sendAgain() {
	ctx := f.Context()
	n := 0
	for _, err := range outboxdlq.Read(ctx, f.opts, outbox.DeadLetterTopic(f.topic), nil) {
		f.try("outboxdlq.Read", err)
		n++
	}
	require.NotZero(f, n)
	for _, dry := range []bool{true, false} {
		f.try("outboxdlq.Replay", second(outboxdlq.Replay(ctx, f.opts, outboxdlq.ReplayConfig{Topic: outbox.DeadLetterTopic(f.topic), DryRun: dry, DB: f.db, Schema: f.schema, Audit: why})))
	}
	recorded, err := outboxarchive.Recorded(f.db, f.schema)
	require.NoError(f, err)
	for _, source := range []outboxarchive.Source{recorded, f.table} {
		filter := outboxarchive.Filter{After: 1, Since: time.Now().Add(-time.Hour), Until: time.Now().Add(time.Hour), Types: []string{"test.deed.done.v1"}, Topics: []string{f.topic},
			AggregateType: "Deed"}
		for _, cfg := range []outboxreplay.Config{{DryRun: true}, {}, {Group: "consumers-" + f.topic, Again: true}} {
			cfg.Source, cfg.Filter, cfg.Schema, cfg.Audit = source, filter, f.schema, why
			report, err := outboxreplay.Run(ctx, f.db, f.opts, cfg)
			f.try("outboxreplay.Run", err)
			require.NotZero(f, report, "something is chosen")
		}
	}
}
