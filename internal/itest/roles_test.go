package itest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// roles are those of docs/roles.md, in the schema of a relayFixture and under names of
// the test's own, each with a login.
type roles struct {
	*relayFixture
	suffix string
	parts  []string // the roles that there are: writer, relay and so on
}

var kim = outboxops.AuditInfo{Operator: "kim", Reason: "the topic's limit was too small"}

const rolePassword = "of the tests"

func newRoles(t *testing.T, h *relayFixture) *roles {
	t.Helper()
	doc, err := os.ReadFile("../../docs/roles.md")
	require.NoError(t, err)
	var sql strings.Builder
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllSubmatch(doc, -1) {
		sql.Write(block[1])
	}
	return grantRoles(t, h, sql.String())
}

// databaseRights is locked while rights to a database are given or taken away: PostgreSQL fails two of these at once
// with "tuple concurrently updated".
var databaseRights sync.Mutex

// grantRoles runs the statements that make the roles.
func grantRoles(t *testing.T, h *relayFixture, sql string) *roles {
	t.Helper()
	r := &roles{relayFixture: h, suffix: fmt.Sprintf("_%.8s", uuid.NewString())}
	sql = "SET LOCAL search_path = " + pgx.Identifier{h.schema}.Sanitize() + ";" + strings.ReplaceAll(sql, "SCHEMA public", "SCHEMA "+pgx.Identifier{h.schema}.Sanitize())
	var names []string
	sql = regexp.MustCompile(`\boutbox_(writer|relay|consumer|worker|inbox|reader|operator)\b`).ReplaceAllStringFunc(sql, func(name string) string {
		return name + r.suffix
	})
	for _, created := range regexp.MustCompile(`CREATE ROLE (\w+);`).FindAllStringSubmatch(sql, -1) {
		names = append(names, created[1])
		r.parts = append(r.parts, strings.TrimSuffix(strings.TrimPrefix(created[1], "outbox_"), r.suffix))
		sql += fmt.Sprintf("CREATE ROLE %s_login LOGIN PASSWORD '%s' IN ROLE %[1]s; ALTER ROLE %[1]s_login SET search_path = pg_catalog, pg_temp;", created[1], rolePassword)
	}
	require.GreaterOrEqual(t, len(names), 5)
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
		_, err := tx.Exec(background, sql, pgx.QueryExecModeSimpleProtocol)
		return err
	}))
	t.Cleanup(func() {
		databaseRights.Lock()
		defer databaseRights.Unlock()
		for _, name := range names {
			_, err := h.db.Exec(background, fmt.Sprintf("DROP OWNED BY %s, %[1]s_login; DROP ROLE %[1]s_login", name))
			require.NoError(t, err)
		}
		_, err := h.db.Exec(background, "DROP ROLE "+strings.Join(names, ", "))
		require.NoError(t, err)
	})
	return r
}

// names returns the roles of the parts.
func (r *roles) names() (all []string) {
	for _, part := range r.parts {
		all = append(all, "outbox_"+part+r.suffix)
	}
	return all
}

// login is who works in a role.
func (r *roles) login(role string) string { return "outbox_" + role + r.suffix + "_login" }

// as returns a pool that works in a role.
func (r *roles) as(t *testing.T, role string) *pgxpool.Pool { return r.connect(t, r.login(role)) }

func (r *roles) connect(t *testing.T, user string) *pgxpool.Pool {
	t.Helper()
	testenv.Direct(t)
	return testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Database = r.db.Config().ConnConfig.Database
		cfg.ConnConfig.User, cfg.ConnConfig.Password = user, rolePassword
	})
}

// giveGroup lets a role write for a consumer group.
func (r *roles) giveGroup(t *testing.T, role, group string) {
	t.Helper()
	_, err := r.db.Exec(background, r.sql(`INSERT INTO {s}.consumer_group_role (consumer_group, role) VALUES ($1, $2)`), group, "outbox_"+role+r.suffix)
	require.NoError(t, err)
}

// places are schemas in which the roles have to do.
var places = map[string]func(t *testing.T) (*pgxpool.Pool, string){
	"in a schema with quotes in its name": func(t *testing.T) (*pgxpool.Pool, string) {
		db := testenv.Pool(t, nil)
		schema := fmt.Sprintf(`we"ird 's Schäma, %.8s`, uuid.NewString())
		schema += strings.Repeat("x", 63-len(schema))
		_, err := db.Exec(background, "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize())
		require.NoError(t, err)
		t.Cleanup(func() {
			_, err := db.Exec(background, "DROP SCHEMA "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
			require.NoError(t, err)
		})
		return db, schema
	},
	"in public, where everybody may create": func(t *testing.T) (*pgxpool.Pool, string) {
		testenv.Direct(t)
		return testenv.OtherDatabase(t), "public"
	},
}

// inEachPlace runs a test in each of the places. In all of them everybody may create, as
// in public before PostgreSQL 15, although Migrate has revoked it.
func inEachPlace(t *testing.T, partitionRows int64, test func(t *testing.T, h *relayFixture)) {
	t.Parallel()
	for name, place := range places {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, schema := place(t)
			h := migratedFixture(t, db, schema, partitionRows)
			_, err := db.Exec(background, h.sql("GRANT CREATE ON SCHEMA {s} TO PUBLIC"))
			require.NoError(t, err)
			test(t, h)
		})
	}
}

// Everybody can do his work under his role of docs/roles.md.
func TestRoles(t *testing.T) {
	inEachPlace(t, 0, func(t *testing.T, h *relayFixture) { testRoles(t, newRoles(t, h), h.poisoned(t), 0) })
}

// The relay makes and drops partitions that are not its own.
func TestRolesOverPartitions(t *testing.T) {
	inEachPlace(t, 100, func(t *testing.T, h *relayFixture) {
		testRoles(t, newRoles(t, h), h.poisoned(t), 99) // the last partition goes when the next one is in use
		require.Eventually(t, func() bool { return !slices.Contains(h.partitions(t), "outbox_min_100") }, testenv.Patience, 10*time.Millisecond)
		require.Greater(t, len(h.partitions(t)), 9)
	})
}

// A writer with CREATE on the database makes the schemas that come first in the search_path of all other logins, and
// plants there what fits better than PostgreSQL's own. No part of outbox runs it.
func TestRolesBesideHostileSchemas(t *testing.T) {
	t.Parallel()
	t.Run("relay, reader and operator", func(t *testing.T) {
		t.Parallel()
		h := newRelayFixture(t)
		testRoles(t, newHostileRoles(t, h), h.poisoned(t), 0)
	})
	t.Run("worker", func(t *testing.T) {
		t.Parallel()
		testWorkerRole(t, newHostileRoles)
	})
	t.Run("consumer", func(t *testing.T) {
		t.Parallel()
		testConsumerRole(t, newHostileRoles)
	})
}

// newHostileRoles returns roles whose logins have no search_path of their own, beside schemas of their names. When the
// test ends, it requires that no login has run what is planted there.
func newHostileRoles(t *testing.T, h *relayFixture) *roles {
	t.Helper()
	r := newRoles(t, h)
	for _, part := range r.parts {
		databaseRights.Lock()
		_, err := h.db.Exec(background, fmt.Sprintf("ALTER ROLE %s RESET search_path; GRANT ALL ON DATABASE %s TO %[1]s", r.login(part),
			pgx.Identifier{h.db.Config().ConnConfig.Database}.Sanitize()))
		databaseRights.Unlock()
		require.NoError(t, err)
	}
	writer := r.as(t, "writer")
	for _, part := range r.parts {
		if part == "writer" {
			continue
		}
		hostile := &relayFixture{db: h.db, schema: r.login(part)}
		_, err := writer.Exec(background, hostile.sql("CREATE SCHEMA {s}; GRANT USAGE ON SCHEMA {s} TO PUBLIC"))
		require.NoError(t, err)
		plant(t, writer, hostile.schema)
		_, err = r.as(t, part).Exec(background, `SELECT format('%s', 'x'::text)`)
		require.NoError(t, err)
		require.Equal(t, []string{hostile.schema + " ran format(text, text)"}, hostile.caught(t), "the trap works")
		_, err = writer.Exec(background, hostile.sql("TRUNCATE {s}.caught"))
		require.NoError(t, err)
		t.Cleanup(func() { require.Empty(t, hostile.caught(t)) })
	}
	return r
}

func testRoles(t *testing.T, r *roles, reader *oracle.Reader, left int) {
	h := r.relayFixture
	writer := r.as(t, "writer")
	var events []oracle.Event
	for _, n := range []int{1, 10, 600} { // by VALUES, unnest and COPY
		more := numbered(fmt.Sprint("key-", n), 1, n)
		require.NoError(t, pgx.BeginFunc(background, writer, func(tx pgx.Tx) error { return h.record(background, tx, more...) }))
		events = append(events, more...)
	}
	require.NoError(t, pgx.BeginFunc(background, writer, func(tx pgx.Tx) error { return h.record(background, tx, poison("bad", 1)) }))
	delayed := numbered("key-delayed", 1, 2)
	require.NoError(t, pgx.BeginFunc(background, writer, func(tx pgx.Tx) error {
		for i, e := range delayed {
			options := outbox.EventOptions{ID: uuid.MustParse(e.ID), NotBefore: time.Now().Add(time.Duration(i) * time.Hour)}
			if err := h.rec.Record(background, tx, outbox.With(e, options)); err != nil {
				return err
			}
		}
		was, err := h.rec.Cancel(background, tx, uuid.New())
		require.False(t, was)
		return err
	}))
	events = append(events, delayed[0])

	cfg := quick
	cfg.Schema, cfg.Retry.MaxRetries, cfg.Logger = h.schema, 1, slog.New(slog.DiscardHandler)
	cfg.RetryDeadAfter = map[string]time.Duration{"message_too_large": time.Millisecond}
	cfg.Retention = outbox.RetentionConfig{PublishedFor: time.Nanosecond, CursorsFor: time.Nanosecond, HandledFor: time.Nanosecond,
		ResolvedFor: time.Nanosecond}
	relay, err := outbox.NewRelay(r.as(t, "relay"), testenv.KafkaOpts(h.brokers), cfg)
	require.NoError(t, err)
	_, err = h.db.Exec(background, h.sql(`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('g', 't', 'i', 'a')`))
	require.NoError(t, err)
	stop := testenv.Run(t, relay.Run)
	requireArrival(t, reader, events...)
	require.Eventually(t, func() bool { return h.count(t, "outbox_audit") > 0 }, testenv.Patience, 10*time.Millisecond, "retried by RetryDeadAfter")
	require.Eventually(t, func() bool { return h.count(t, "outbox") <= left && h.count(t, "event_handled") == 0 }, testenv.Patience, 10*time.Millisecond, "removed")

	inspector, err := outboxops.NewInspector(r.as(t, "reader"), outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	relays, err := inspector.Relays(background)
	require.NoError(t, err)
	require.Len(t, relays, 1)
	_, err = inspector.Progress(background, "default", time.Now().Add(-time.Minute), time.Second)
	require.NoError(t, err)
	_, err = inspector.Transactions(background, 0)
	require.NoError(t, err)
	_, err = inspector.Events(background, outboxops.EventFilter{}, outboxops.EventPage{})
	require.NoError(t, err)

	own, err := outboxops.NewDelayed(r.as(t, "relay"), outboxops.DelayedConfig{Schema: h.schema})
	require.NoError(t, err)
	status, err := own.Status(background)
	require.NoError(t, err)
	require.Equal(t, outboxops.DelayedStatus{Waiting: 1}, status)
	waiting, err := outboxops.NewDelayed(r.as(t, "operator"), outboxops.DelayedConfig{Schema: h.schema})
	require.NoError(t, err)
	list, err := waiting.List(background, outboxops.DelayedPage{})
	require.NoError(t, err)
	require.Len(t, list, 1)
	cancelled, err := waiting.Cancel(background, []uuid.UUID{uuid.MustParse(list[0].EventID)}, kim)
	require.NoError(t, err)
	require.Equal(t, 1, cancelled)

	operator, err := outboxops.NewFailures(r.as(t, "operator"), outboxops.FailuresConfig{Schema: h.schema})
	require.NoError(t, err)
	require.Eventually(t, func() bool { // it is retried and dies again and again
		rows, err := operator.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{})
		require.NoError(t, err)
		return len(rows) == 1 && operator.Hold(background, rows[0].ID, kim) == nil &&
			operator.Release(background, rows[0].ID, kim) == nil && operator.Resolve(background, rows[0].ID, kim) == nil
	}, testenv.Patience, 10*time.Millisecond)
	h.awaitStatuses(t, map[string]int{}) // retention has removed it
	require.Eventually(t, func() bool {
		audit, err := operator.Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
		require.NoError(t, err)
		return slices.ContainsFunc(audit, func(a outboxops.AuditEntry) bool { return a.Action == "resolve" && a.Login == r.login("operator") }) &&
			slices.ContainsFunc(audit, func(a outboxops.AuditEntry) bool { return a.Operator == "relay default" && a.Login == r.login("relay") })
	}, testenv.Patience, 10*time.Millisecond)
	consumers, err := outboxops.NewConsumers(r.as(t, "operator"), outboxops.ConsumersConfig{Schema: h.schema})
	require.NoError(t, err)
	require.NoError(t, consumers.Pause(background, "g", h.topic, kim))
	groups, _, err := consumers.List(background, outboxops.ConsumerFilter{})
	require.NoError(t, err)
	require.Equal(t, kim.Reason, groups[0].Topics[0].Pause.Reason)
	require.NoError(t, consumers.Resume(background, "g", h.topic, kim))
	stop()

	// After a restore into another cluster.
	_, err = h.db.Exec(background, h.sql(`UPDATE {s}.outbox_cursor SET system_identifier = system_identifier + 1`))
	require.NoError(t, err)
	cfg.Retention.Archive = func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error { return nil }
	archiving, err := outbox.NewRelay(r.as(t, "relay"), testenv.KafkaOpts(h.brokers), cfg)
	require.NoError(t, err)
	testenv.Run(t, archiving.Run)
	more := numbered("later", 1, 10)
	require.NoError(t, pgx.BeginFunc(background, writer, func(tx pgx.Tx) error { return h.record(background, tx, more...) }))
	requireArrival(t, reader, more...)
	require.Eventually(t, func() bool { return h.count(t, "outbox_archiver") == 1 && h.count(t, "outbox") <= left }, testenv.Patience, 10*time.Millisecond)
	_, err = r.as(t, "operator").Exec(background, h.sql(`SELECT {s}.outbox_stop_archive('kim', 'why')`))
	require.Equal(t, "55000", pg.Code(err), "it archives: %v", err)
}

// An operator whose transaction stays open holds up the events that it has changed, and neither
// the relay's lease nor other events.
func TestOpenOperatorHoldsUpNothingElse(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.poisoned(t)
	r := newRoles(t, h)
	var log testenv.Buffer
	cfg := quick
	cfg.Schema, cfg.Retry.MaxRetries, cfg.Logger = h.schema, 1000, slog.New(slog.NewTextHandler(&log, nil))
	relay, err := outbox.NewRelay(r.as(t, "relay"), testenv.KafkaOpts(h.brokers), cfg)
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	h.commit(t, poison("bad", 1))
	h.awaitStatuses(t, map[string]int{outbox.StatusFailed: 1})
	operator, err := r.as(t, "operator").Begin(background)
	require.NoError(t, err)
	var changed int
	require.NoError(t, operator.QueryRow(background, h.sql(`SELECT {s}.outbox_retry_failed(ARRAY(SELECT id FROM {s}.outbox_failed), 'kim', 'why')`)).Scan(&changed))
	require.Equal(t, 1, changed)
	h.commit(t, poison("worse", 1))
	retried := `SELECT count(*) FROM {s}.outbox_failed WHERE aggregate_id = 'worse' AND retry_count > 0`
	require.Eventually(t, func() bool { return h.countWhere(t, retried) > 0 }, testenv.Patience, 10*time.Millisecond, "other events are retried")
	began := time.Now()
	more := numbered("good", 1, 5)
	h.commit(t, more...)
	requireArrival(t, reader, more...)
	require.Less(t, time.Since(began), 10*time.Second)
	require.NotContains(t, log.String(), "lease lost")
	require.NotContains(t, log.String(), "PostgreSQL")
	require.NoError(t, operator.Rollback(background))
}

// Who may write all data writes for all groups, and no table has a row for that: rows of
// a dump are restored into tables that are new.
func TestWriteAllData(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	require.Zero(t, h.count(t, "consumer_group_role"))
	r := newRoles(t, h)
	_, err := h.db.Exec(background, h.sql(`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('g', 't', 'i', 'a')`))
	require.NoError(t, err)
	db := r.as(t, "consumer")
	renew := h.sql(`UPDATE {s}.event_handled SET handled_at = now()`)
	tag, err := db.Exec(background, renew)
	require.NoError(t, err)
	require.Zero(t, tag.RowsAffected())
	_, err = h.db.Exec(background, `GRANT pg_write_all_data TO `+r.login("consumer"))
	require.NoError(t, err)
	plan, err := db.Query(background, `EXPLAIN (COSTS OFF) `+renew)
	require.NoError(t, err)
	lines, err := pgx.CollectRows(plan, pgx.RowTo[string])
	require.NoError(t, err)
	require.Contains(t, strings.Join(lines, "\n"), "One-Time Filter: pg_has_role('pg_write_all_data'::name")
	tag, err = db.Exec(background, renew)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
}

// A worker does all its work in its role: new events, retries, requeued events, and the deliveries
// of a worker that is gone. Meanwhile operators act on its deliveries in their role.
func TestWorkerRole(t *testing.T) {
	t.Parallel()
	testWorkerRole(t, newRoles)
}

func testWorkerRole(t *testing.T, newRoles func(*testing.T, *relayFixture) *roles) {
	f := newWorkerFixture(t)
	r := newRoles(t, &relayFixture{db: f.db, schema: f.schema})
	f.exec(`GRANT SELECT, INSERT ON {schema}.effect TO outbox_worker` + r.suffix)
	f.exec(`GRANT USAGE ON SEQUENCE {schema}.effect_id_seq TO outbox_worker` + r.suffix)
	r.giveGroup(t, "worker", "bank")
	f.db = r.as(t, "worker") // what the fixture's worker uses
	var mended atomic.Bool
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{HoldDead: true, From: outbox.FromStart}, Lease: 3 * time.Second}
	cfg.Retry.RetryWait, cfg.Retry.MaxRetries = 10*time.Millisecond, 2
	cfg.Retry.MaxOutage = -1
	f.start(cfg, f.effects("COUNTED", func(s step, m outbox.Metadata) error {
		if s.N == 2 && !mended.Load() {
			return errors.New("not yet")
		}
		return nil
	}), outbox.HandleNoTx("PUSHED", func(context.Context, step, outbox.Metadata) error { return nil }))
	f.db = r.db
	f.commit(step{"a", 1}, step{"a", 2}, step{"a", 3})
	failures, err := outboxops.NewFailures(r.as(t, "operator"), outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	counted := outboxops.FailureFilter{Action: "COUNTED", Statuses: []string{outbox.StatusDead}}
	var dead []outboxops.Failure
	require.Eventually(t, func() bool {
		dead, err = failures.List(t.Context(), counted, outboxops.FailurePage{})
		require.NoError(t, err)
		return len(dead) == 1
	}, testenv.Patience, 10*time.Millisecond)
	require.True(t, dead[0].Held)
	mended.Store(true)
	require.NoError(t, failures.Retry(t.Context(), dead[0].ID, kim))
	f.await(3)
	f.requireOrder()

	// What a worker had that is gone is taken over.
	f.exec(`INSERT INTO {schema}.event_delivery SELECT d.* FROM {schema}.event_delivery AS s, LATERAL jsonb_populate_record(s, jsonb_build_object('id',
		1000, 'position', 1000, 'status', 'PROCESSING', 'attempt_count', 1, 'locked_by', 'gone', 'locked_until', now() - interval '1 h', 'processed_at', NULL)) AS d
		WHERE s.action = 'PUSHED' AND s.position = 3`)
	require.Eventually(t, func() bool {
		d, err := failures.Get(t.Context(), outboxops.FailureID{Kind: outboxops.KindDelivery, Number: 1000})
		require.NoError(t, err)
		return d.Status == outboxops.StatusDone
	}, testenv.Patience, 10*time.Millisecond)
	deliveries, err := outboxops.NewDeliveries(r.as(t, "operator"), outboxops.DeliveriesConfig{Schema: f.schema})
	require.NoError(t, err)
	groups, err := deliveries.Groups(t.Context())
	require.NoError(t, err)
	require.Zero(t, groups[0].Pending)
	audit, err := failures.Audit(t.Context(), dead[0].ID, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Equal(t, []string{"retry", r.login("operator")}, []string{audit[0].Action, audit[0].Login})
}

func TestConsumerRole(t *testing.T) {
	t.Parallel()
	testConsumerRole(t, newRoles)
}

func testConsumerRole(t *testing.T, newRoles func(*testing.T, *relayFixture) *roles) {
	s := newConsumerFixture(t, 1)
	r := newRoles(t, &relayFixture{db: s.db, schema: s.schema})
	_, err := s.db.Exec(background, `GRANT SELECT, INSERT, UPDATE ON `+pgx.Identifier{s.schema, "counts"}.Sanitize()+` TO outbox_consumer`+r.suffix)
	require.NoError(t, err)
	r.giveGroup(t, "consumer", "roles-"+s.topic)
	_, err = s.db.Exec(background, r.sql(`INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('another', 't', 'i', 'a')`))
	require.NoError(t, err)
	db, box := r.as(t, "consumer"), &mailbox{}
	s.sendTo(t, 1, 10)
	c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.brokers), s.events,
		"roles-"+s.topic, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logTo(t, slog.LevelWarn), From: outbox.FromStart, Alerts: outbox.AlertConfig{Alerter: box, Interval: 20 * time.Millisecond, DeadThreshold: 1, ReportInterval: time.Millisecond, StaleAfter: time.Minute, StalePending: 1}}},
		outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, c.Run)

	// It alerts also to relays, and to groups for which it may not write.
	s.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT name, 0, pg_current_snapshot(), 0, 1, 1 FROM unnest('{default,worker:another}'::text[]) AS name`)
	s.sell(t, sale{"p", 1, ""})
	s.update(t, `UPDATE {s}.outbox SET created_at = now() - interval '1 h'`)
	s.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, lost, lost_at) VALUES ('another', 't', gen_random_uuid(), 0, 0, 1, now())`)
	dead := s.owe(t, "another", "DEAD")
	for _, kind := range []outbox.AlertKind{outbox.AlertDeadDeliveries, outbox.AlertManyDead, outbox.AlertReport, outbox.AlertStale, outbox.AlertNoLeader, outbox.AlertLost} {
		box.await(t, kind, false)
	}
	require.Equal(t, map[int64]int{dead: 1}, box.deaths())
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 10 }, testenv.Patience, 10*time.Millisecond)
	for _, source := range []string{"a", "b"} {
		require.NoError(t, c.Deliver(background, s.saleOf(source, "the same id")))
	}
	n, err := outbox.CleanHandled(background, db, s.schema, outbox.RetentionConfig{HandledFor: time.Nanosecond})
	require.NoError(t, err)
	require.EqualValues(t, 12, n, "and not the note of another group")
}
