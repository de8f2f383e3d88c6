package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// roles are those of docs/roles.md, in the schema of a relayFixture and under names of
// the test's own.
type roles struct {
	*relayFixture
	suffix string
}

var kim = outboxops.AuditInfo{Operator: "kim", Reason: "the topic's limit was too small"}

func newRoles(t *testing.T, h *relayFixture) *roles {
	t.Helper()
	doc, err := os.ReadFile("docs/roles.md")
	require.NoError(t, err)
	r := &roles{relayFixture: h, suffix: fmt.Sprintf("_%.8s", uuid.NewString())}
	sql := "SET LOCAL search_path = " + pgx.Identifier{h.schema}.Sanitize() + ";"
	for _, block := range regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllSubmatch(doc, -1) {
		sql += string(block[1])
	}
	sql = strings.ReplaceAll(sql, "SCHEMA public", "SCHEMA "+pgx.Identifier{h.schema}.Sanitize())
	var names []string
	sql = regexp.MustCompile(`\boutbox_(writer|relay|consumer|reader|operator)\b`).ReplaceAllStringFunc(sql, func(name string) string {
		return name + r.suffix
	})
	for _, created := range regexp.MustCompile(`CREATE ROLE (\w+);`).FindAllStringSubmatch(sql, -1) {
		names = append(names, created[1])
	}
	require.Len(t, names, 5)
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
		_, err := tx.Exec(background, sql, pgx.QueryExecModeSimpleProtocol)
		return err
	}))
	t.Cleanup(func() {
		for _, name := range names {
			_, err := h.db.Exec(background, "DROP OWNED BY "+name)
			require.NoError(t, err)
		}
		_, err := h.db.Exec(background, "DROP ROLE "+strings.Join(names, ", "))
		require.NoError(t, err)
	})
	return r
}

// as returns a pool that works under a role.
func (r *roles) as(t *testing.T, role string) *pgxpool.Pool {
	t.Helper()
	testenv.Direct(t) // a role of sessions
	return testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET ROLE outbox_"+role+r.suffix)
			return err
		}
	})
}

// Everybody can do his work under his role of docs/roles.md.
func TestRoles(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	testRoles(t, h, reader, 0)
}

// The relay makes and drops partitions that are not its own.
func TestRolesOverPartitions(t *testing.T) {
	t.Parallel()
	h, reader := newPoisonedFixture(t)
	require.NoError(t, outbox.Migrate(background, h.db, outbox.MigrateConfig{Schema: h.schema, PartitionRows: 100}))
	testRoles(t, h, reader, 99) // the last partition goes when the next one is in use
	require.Eventually(t, func() bool { return !slices.Contains(h.partitions(t), "outbox_min_100") }, testenv.Patience, 10*time.Millisecond)
	require.Greater(t, len(h.partitions(t)), 9)
}

func testRoles(t *testing.T, h *relayFixture, reader *oracle.Reader, left int) {
	r := newRoles(t, h)

	writer := r.as(t, "writer")
	var events []oracle.Event
	for _, n := range []int{1, 10, 600} { // by VALUES, unnest and COPY
		more := numbered(fmt.Sprint("key-", n), 1, n)
		require.NoError(t, pgx.BeginFunc(background, writer, func(tx pgx.Tx) error { return h.record(background, tx, more...) }))
		events = append(events, more...)
	}
	require.NoError(t, pgx.BeginFunc(background, writer, func(tx pgx.Tx) error { return h.record(background, tx, poison("bad", 1)) }))

	cfg := quick
	cfg.Schema, cfg.MaxRetries, cfg.Logger = h.schema, 1, slog.New(slog.DiscardHandler)
	cfg.RetryDeadAfter = map[string]time.Duration{"message_too_large": time.Millisecond}
	cfg.Retention = outbox.RetentionConfig{PublishedFor: time.Nanosecond, CursorsFor: time.Nanosecond, HandledFor: time.Nanosecond,
		ResolvedFor: time.Nanosecond, Interval: 10 * time.Millisecond}
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

	operator, err := outboxops.NewFailures(r.as(t, "operator"), outboxops.FailuresConfig{Schema: h.schema})
	require.NoError(t, err)
	require.Eventually(t, func() bool { // it is retried and dies again and again
		rows, err := operator.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{})
		require.NoError(t, err)
		return len(rows) == 1 && operator.Hold(background, "default", h.topic, "bad", kim) == nil &&
			operator.Release(background, "default", h.topic, "bad", kim) == nil && operator.Resolve(background, rows[0].ID, kim) == nil
	}, testenv.Patience, 10*time.Millisecond)
	h.awaitStatuses(t, map[string]int{}) // retention has removed it
	consumers, err := outboxops.NewConsumers(r.as(t, "operator"), outboxops.ConsumersConfig{Schema: h.schema})
	require.NoError(t, err)
	require.NoError(t, consumers.Pause(background, "g", h.topic, kim))
	groups, err := consumers.List(background)
	require.NoError(t, err)
	require.Equal(t, kim.Reason, groups[0].Topics[0].Pause.Reason)
	require.NoError(t, consumers.Resume(background, "g", h.topic, kim))
	stop()

	// After a restore into another cluster.
	_, err = h.db.Exec(background, h.sql(`UPDATE {s}.outbox_cursor SET system_identifier = system_identifier + 1`))
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	more := numbered("later", 1, 10)
	require.NoError(t, pgx.BeginFunc(background, writer, func(tx pgx.Tx) error { return h.record(background, tx, more...) }))
	requireArrival(t, reader, more...)
}

func TestConsumerRole(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	r := newRoles(t, &relayFixture{db: s.db, schema: s.schema})
	_, err := s.db.Exec(background, `GRANT SELECT, INSERT, UPDATE ON `+pgx.Identifier{s.schema, "counts"}.Sanitize()+` TO outbox_consumer`+r.suffix)
	require.NoError(t, err)
	db := r.as(t, "consumer")
	s.sendTo(t, 1, 10)
	c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.brokers), s.events,
		outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Group: "roles-" + s.topic, Schema: s.schema, Logger: logTo(t, slog.LevelWarn)}, FromStart: true}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	require.Eventually(t, func() bool { return s.counts(t)["p-0"] == 10 }, testenv.Patience, 10*time.Millisecond)
	for _, source := range []string{"a", "b"} {
		require.NoError(t, c.Deliver(background, s.saleOf(source, "the same id")))
	}
	n, err := outbox.CleanHandled(background, db, outbox.CleanHandledConfig{Schema: s.schema, HandledFor: time.Nanosecond})
	require.NoError(t, err)
	require.EqualValues(t, 12, n)
}

// What a role may do beside its work is nothing.
func TestRolesCannot(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	r := newRoles(t, h)
	h.commit(t, numbered("key", 1, 1)...)
	tables := []string{"outbox", "outbox_cursor", "outbox_lease", "outbox_failed", "outbox_audit", "event_handled", "consumer_start", "consumer_pause", "outbox_partitioning"}
	statements := map[string]string{
		"select": `SELECT FROM {t}`, "update": `UPDATE {t} SET {c} = {c}`, "delete": `DELETE FROM {t}`, "truncate": `TRUNCATE {t}`,
		"insert": `INSERT INTO {t} DEFAULT VALUES`, "trigger": `CREATE TRIGGER x AFTER INSERT ON {t} EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
	}
	can := map[string][]string{ // a statement with missing values fails later than one without the right to it
		"writer": {"outbox insert"},
		"relay": {"outbox select", "outbox delete", "outbox_cursor select", "outbox_cursor insert", "outbox_cursor delete",
			"outbox_lease select", "outbox_lease insert", "outbox_lease update", "outbox_failed select", "outbox_failed insert",
			"outbox_failed update", "outbox_failed delete", "outbox_audit select", "outbox_audit insert", "outbox_audit delete",
			"event_handled select", "event_handled delete", "consumer_start select"},
		"consumer": {"event_handled select", "event_handled insert", "event_handled delete",
			"consumer_start select", "consumer_start insert", "consumer_start update", "consumer_start delete", "consumer_pause select"},
		"reader": {"outbox select", "outbox_cursor select", "outbox_lease select", "outbox_failed select", "outbox_audit select",
			"event_handled select", "consumer_start select", "consumer_pause select"},
		"operator": {"outbox select", "outbox_cursor select", "outbox_lease select", "outbox_failed select", "outbox_audit select",
			"event_handled select", "outbox_failed update", "outbox_audit insert", "consumer_start select", "consumer_start insert",
			"consumer_start update", "consumer_pause select", "consumer_pause insert", "consumer_pause delete"},
	}
	column := map[string]string{"outbox": "payload", "outbox_cursor": "relay", "outbox_lease": "holder", "outbox_failed": "status",
		"outbox_audit": "reason", "event_handled": "action", "consumer_start": "position", "consumer_pause": "reason", "outbox_partitioning": "rows"}
	for role, allowed := range can {
		db := r.as(t, role)
		var got []string
		for _, table := range tables {
			for kind, sql := range statements {
				sql = strings.NewReplacer("{t}", pgx.Identifier{h.schema, table}.Sanitize(), "{c}", column[table]).Replace(sql)
				err := pgx.BeginFunc(background, db, func(tx pgx.Tx) error {
					_, err := tx.Exec(background, sql)
					if err == nil {
						err = tx.Rollback(background)
					}
					return err
				})
				if !isDenied(err) {
					got = append(got, table+" "+kind)
				}
			}
		}
		require.ElementsMatch(t, allowed, got, role)
	}
	functions := map[string]bool{ // and whether the relay may call it
		`outbox_partitions()`: true, `outbox_relays()`: true, `outbox_make_partitions()`: true,
		`outbox_drop_partition('x', true, '1:1:', now(), '{}', 'r', 'h', 1)`: true,
		`outbox_prepare_partitions(10)`:                                      false, `outbox_partition()`: false,
	}
	for role := range can {
		db := r.as(t, role)
		for function, relay := range functions {
			_, err := db.Exec(background, h.sql(`SELECT {s}.`+function))
			require.Equal(t, role != "relay" || !relay, isDenied(err), "%s calls %s: %v", role, function, err)
		}
	}
	_, err := r.as(t, "writer").Exec(background, h.sql(`INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload,
		content_type, occurred_at, xid) VALUES (gen_random_uuid(), 't', 's', 'a', 'i', '{}', 'application/json', now(), '3')`))
	require.True(t, isDenied(err), "a forged transaction id: %v", err)
}

func isDenied(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "42501"
}
