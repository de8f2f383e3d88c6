package outboxops_test

import (
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// cutFixture has consumer groups a and b that get their events from workers, which the test plays.
type cutFixture struct {
	*opsFixture
	t    *testing.T
	cuts *outboxops.Cuts
}

var why = outboxops.AuditInfo{Operator: "kim", Reason: "we move"}

func newCutFixture(t *testing.T) *cutFixture {
	t.Helper()
	f := &cutFixture{opsFixture: newFixture(t), t: t}
	var err error
	f.cuts, err = outboxops.NewCuts(f.db, outboxops.CutsConfig{Schema: f.schema})
	require.NoError(t, err)
	f.do(`INSERT INTO {schema}.event_subscription (consumer_group) VALUES ('a'), ('b')`)
	f.do(`INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 'worker:' || g, 0, '1:1:', 0, (SELECT system_identifier FROM pg_control_system()), 1 FROM unnest(ARRAY['a', 'b']) AS g`)
	f.do(`INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition)
		SELECT g, 'orders', gen_random_uuid(), -1 FROM unnest(ARRAY['a', 'b']) AS g`)
	return f
}

func (f *cutFixture) do(sql string, args ...any) {
	f.t.Helper()
	_, err := f.db.Exec(background, pg.InSchema(sql, f.schema), args...)
	require.NoError(f.t, err)
}

func (f *cutFixture) text(sql string, args ...any) (text string) {
	f.t.Helper()
	require.NoError(f.t, f.db.QueryRow(background, pg.InSchema(sql, f.schema), args...).Scan(&text))
	return text
}

// state returns the states of the groups, the relays that have positions, and whether relay r may lead.
func (f *cutFixture) state() string {
	f.t.Helper()
	return f.text(`SELECT (SELECT string_agg(consumer_group || ' ' || state || coalesce(' ' || relay, ''), ', ' ORDER BY consumer_group) FROM {schema}.event_subscription)
		|| '; ' || (SELECT string_agg(DISTINCT relay, ', ' ORDER BY relay) FROM {schema}.outbox_cursor)
		|| coalesce((SELECT CASE WHEN expires_at > clock_timestamp() THEN '; r waits' ELSE '; r may lead' END FROM {schema}.outbox_lease WHERE name = 'r'), '')`)
}

// depart acts as the workers of groups that have taken all events in front of the cut.
func (f *cutFixture) depart(groups ...string) {
	f.t.Helper()
	f.do(`UPDATE {schema}.event_subscription SET state = 'left', changed_at = now() WHERE consumer_group = ANY ($1) AND state = 'leaving'`, groups)
	f.do(`DELETE FROM {schema}.outbox_cursor WHERE relay = ANY (ARRAY(SELECT 'worker:' || g FROM unnest($1::text[]) AS g))`, groups)
}

// deliver makes a delivery of group a.
func (f *cutFixture) deliver(status string) {
	f.t.Helper()
	f.do(`INSERT INTO {schema}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, locked_until, locked_by, created_at, updated_at, occurred_at,
			recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT 1, 1, 0, 3, now(), CASE WHEN $1::text = 'PROCESSING' THEN now() + interval '1 h' END, CASE WHEN $1 = 'PROCESSING' THEN 'host/1' END,
		       now(), now(), now(), now(), gen_random_uuid(), $1, 'a', 'COUNTED', 'orders', 'shop.order.created.v1', 'shop', 'Order', '1', 'application/json', '1'`, status)
}

func (f *cutFixture) rejects(err error, text string) {
	f.t.Helper()
	require.ErrorIs(f.t, err, outboxops.ErrCutRefused)
	require.ErrorContains(f.t, err, text)
}

var both = []string{"a", "b"}

// Groups go to Kafka and back, and each step is refused at the wrong time.
func TestCut(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	opts := testenv.KafkaOpts(f.brokers)
	ctx := t.Context()
	require.NoError(t, f.cuts.ToKafka(ctx, both, "r", why))
	require.Equal(t, "a leaving r, b leaving r; r, worker:a, worker:b; r waits", f.state())
	f.rejects(f.cuts.ToKafka(ctx, both, "r2", why), "group a does not get its events from workers")
	f.rejects(f.cuts.ToPostgres(ctx, both, "r", nil, why), "group a does not get its events from relay r")
	f.rejects(f.cuts.Finish(ctx, nil, "r", why), "the workers of group a have not taken all events in front of the cut")
	f.rejects(f.cuts.FinishEarly(ctx, "r", why), "the workers of group a have not taken all events in front of the cut")
	f.depart("a")
	f.rejects(f.cuts.Finish(ctx, nil, "r", why), "the workers of group b have not")
	f.depart("b")
	for _, status := range []string{"PROCESSING", "PARKED", "PENDING"} {
		f.deliver(status)
		f.rejects(f.cuts.Finish(ctx, nil, "r", why), "the workers of group a have open deliveries from before the cut")
		f.do(`DELETE FROM {schema}.event_delivery`)
	}
	f.deliver("DEAD")
	f.deliver("DONE")
	f.do(`UPDATE {schema}.consumer_start SET consumer_group = 'c' WHERE consumer_group = 'b'`)
	f.rejects(f.cuts.Finish(ctx, nil, "r", why), "no consumer of group b has begun to read")
	f.do(`UPDATE {schema}.consumer_start SET consumer_group = 'b' WHERE consumer_group = 'c'`)
	f.rejects(f.cuts.ToPostgres(ctx, both, "r", nil, why), "there is a cut at relay r already: finish or cancel it first")
	require.NoError(t, f.cuts.Finish(ctx, nil, "r", why))
	require.Equal(t, "a left r, b left r; r; r may lead", f.state())
	require.ErrorIs(t, f.cuts.Finish(ctx, nil, "r", why), outboxops.ErrNoCut)
	require.ErrorIs(t, f.cuts.Cancel(ctx, "r", why), outboxops.ErrNoCut)

	f.rejects(f.cuts.ToPostgres(ctx, []string{"b"}, "r", nil, why), "group a gets its events from relay r, too")
	f.do(`INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES ('other', 0, '1:1:', 0, 1, 1)`)
	f.rejects(f.cuts.ToPostgres(ctx, both, "other", nil, why), "group a does not get its events from relay other")
	f.do(`DELETE FROM {schema}.outbox_cursor WHERE relay = 'other'`)
	require.NoError(t, f.cuts.ToPostgres(ctx, []string{"b", "a", "a", "new"}, "r", nil, why))
	require.Equal(t, "a returning r, b returning r, new returning r; worker:a, worker:b, worker:new; r waits", f.state())
	require.NoError(t, f.cuts.Finish(ctx, opts, "r", why))
	require.Equal(t, "a active, b active, new active; worker:a, worker:b, worker:new; r waits", f.state())
	require.ErrorIs(t, f.cuts.Finish(ctx, opts, "r", why), outboxops.ErrNoCut)
	require.ErrorIs(t, f.cuts.FinishEarly(ctx, "r", why), outboxops.ErrNoCut, "or its relay would begin anew and send all events again")
	require.Contains(t, f.state(), "; r waits")

	f.do(`INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition) VALUES ('new', 'orders', gen_random_uuid(), -1)`)
	require.NoError(t, f.cuts.ToKafka(ctx, []string{"new", "a", "b"}, "r", why), "the name is free again")
	f.depart("a", "b", "new")
	f.deliver("PENDING")
	require.NoError(t, f.cuts.FinishEarly(ctx, "r", why))
	require.Equal(t, "a left r, b left r, new left r; r; r may lead", f.state())
	require.Equal(t, "to-kafka 5, finish-cut 3, to-postgres 3", f.text(`SELECT string_agg(action || ' ' || n, ', ' ORDER BY first) FROM (
		SELECT action, count(*) AS n, min(id) AS first FROM {schema}.outbox_audit WHERE operator = 'kim' AND reason = 'we move' AND relay = 'r' GROUP BY action) AS a`))
}

// A consumer that has noted no offsets for a topic may begin behind what the relay sends. So a cut waits until the
// consumers have begun with each topic of the group's handlers, also if they have begun with others in an earlier move.
func TestCutNeedsEachTopicBegun(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	ctx := t.Context()
	begin := func(group, topic string) {
		f.do(`INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition) VALUES ($1, $2, gen_random_uuid(), -1)`, group, topic)
	}
	register := func(group, topic, action string) {
		f.do(`INSERT INTO {schema}.consumer_handler (consumer_group, topic, action, event_type) VALUES ($1, $2, $3, 'shop.order.created.v1')`, group, topic, action)
	}
	register("a", "orders", "COUNTED")
	hasConsumer := func() bool {
		all, err := f.cuts.List(ctx)
		require.NoError(t, err)
		return all[0].HasConsumer
	}
	f.do(`UPDATE {schema}.event_subscription AS s SET routes = (
		SELECT jsonb_object_agg(concat_ws(E'\n', 'shop.order.created.v1', r.topic, 'COUNTED'), extract(epoch FROM now() - r.age)::bigint)
		  FROM (VALUES ('orders', interval '1 min'), ('returns', '50 min'), ('given-up', '2 h')) AS r (topic, age))
		WHERE s.consumer_group = 'a'`)
	require.False(t, hasConsumer())
	require.NoError(t, f.cuts.ToKafka(ctx, both, "r", why))
	f.depart(both...)
	f.rejects(f.cuts.Finish(ctx, nil, "r", why), "no consumer of group a has begun to read topic returns for action COUNTED")
	begin("b", "returns")
	register("b", "returns", "COUNTED")
	register("a", "returns", "COUNTED")
	f.rejects(f.cuts.Finish(ctx, nil, "r", why), "no consumer of group a has begun to read topic returns")
	begin("a", "returns")
	f.do(`UPDATE {schema}.consumer_handler SET action = 'SUMMED' WHERE consumer_group = 'a' AND topic = 'returns'`)
	f.rejects(f.cuts.Finish(ctx, nil, "r", why), "no consumer of group a has begun to read topic returns for action COUNTED")
	require.False(t, hasConsumer(), "consumers of a release without the handler")
	register("a", "returns", "COUNTED")
	require.True(t, hasConsumer())
	require.NoError(t, f.cuts.Finish(ctx, nil, "r", why))
}

// The relay of a cut to PostgreSQL takes no other group before that cut is finished or canceled: both move what the
// other one needs.
func TestCutToKafkaAtRelayThatEnds(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	ctx := t.Context()
	require.NoError(t, f.cuts.ToKafka(ctx, []string{"a"}, "r", why))
	f.depart("a")
	require.NoError(t, f.cuts.Finish(ctx, nil, "r", why))
	require.NoError(t, f.cuts.ToPostgres(ctx, []string{"a"}, "r", nil, why))
	f.rejects(f.cuts.ToKafka(ctx, []string{"b"}, "r", why), "a cut at relay r is not finished")
	require.Equal(t, "a returning r, b active; worker:a, worker:b; r waits", f.state())
	require.NoError(t, f.cuts.Cancel(ctx, "r", why))
	require.Equal(t, "a left r, b active; r, worker:b; r may lead", f.state())
}

// A relay is not ended while other groups that read in Kafka get their events from it, or will once they have those of
// an archive.
func TestCutLeavesNoGroupBehind(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	ctx := t.Context()
	require.NoError(t, f.cuts.ToKafka(ctx, both, "r", why))
	f.depart(both...)
	require.NoError(t, f.cuts.Finish(ctx, nil, "r", why))
	start := func(group string, topics ...string) {
		f.do(`SELECT {schema}.outbox_start_group($1, $2, ARRAY(SELECT gen_random_uuid() FROM unnest($2::text[])), ARRAY(SELECT 0 FROM unnest($2)), ARRAY(SELECT 7::bigint FROM unnest($2)), 'kim', 'a view')`, group, topics)
	}
	start("mail", "orders")
	f.rejects(f.cuts.ToPostgres(ctx, both, "r", nil, why), "group mail reads from Kafka, and would get nothing any more from relay r")
	f.do(`SELECT {schema}.outbox_finish_start('mail', 0)`)
	f.do(`INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition) VALUES ('search', 'orders', gen_random_uuid(), -1)`)
	f.rejects(f.cuts.ToPostgres(ctx, both, "r", nil, why), "group mail reads from Kafka, and would get nothing any more from relay r")
	f.rejects(f.cuts.ToPostgres(ctx, both, "r", []string{"mail"}, why), "group search reads from Kafka")
	require.ErrorContains(t, f.cuts.ToPostgres(ctx, both, "r", []string{""}, why), "leave behind")
	require.Equal(t, "a left r, b left r; r; r may lead", f.state())

	f.do(`INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES ('other', 0, '1:1:', 0, 1, 1)`)
	f.rejects(f.cuts.ToPostgres(ctx, both, "r", nil, why), "group mail reads from Kafka")
	f.do(`INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('other', 'host/1', 1, now() + interval '1 h', '30s')`)
	require.NoError(t, f.cuts.ToPostgres(ctx, both, "r", nil, why), "another relay sends all events, too")
	require.NoError(t, f.cuts.Cancel(ctx, "r", why))
	f.do(`DELETE FROM {schema}.outbox_lease WHERE name = 'other'`)

	start("view") // of workers, which read no Kafka
	require.NoError(t, f.cuts.ToPostgres(ctx, append(both, "mail"), "r", []string{"search", "gone"}, why), "search stays behind, mail is moved")
}

// After Cancel, positions are the same as before the cut.
func TestCancelCut(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	ctx := t.Context()
	require.NoError(t, f.cuts.ToKafka(ctx, both, "r", why))
	cut := f.text(`SELECT snapshot::text FROM {schema}.outbox_cursor WHERE relay = 'r'`)
	f.depart("a")
	require.NoError(t, f.cuts.Cancel(ctx, "r", why))
	require.Equal(t, "a active, b active; worker:a, worker:b; r waits", f.state(), "r must not begin at the first event")
	require.Equal(t, cut, f.text(`SELECT snapshot::text FROM {schema}.outbox_cursor WHERE relay = 'worker:a'`))
	require.Equal(t, "1:1:", f.text(`SELECT snapshot::text FROM {schema}.outbox_cursor WHERE relay = 'worker:b'`))
	require.ErrorIs(t, f.cuts.Cancel(ctx, "r", why), outboxops.ErrNoCut)
	require.ErrorIs(t, f.cuts.Finish(ctx, nil, "r", why), outboxops.ErrNoCut)

	require.NoError(t, f.cuts.ToKafka(ctx, both, "r", why))
	f.depart("a", "b")
	require.NoError(t, f.cuts.Finish(ctx, nil, "r", why))
	f.do(`INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch) VALUES ('r', 7, '5:5:', '9:9:', 8, 3, 1)`)
	const position = `SELECT concat_ws(' ', last_processed_id, snapshot, window_snapshot, highest_id, system_identifier) FROM {schema}.outbox_cursor WHERE relay = $1 ORDER BY id DESC LIMIT 1`
	require.NoError(t, f.cuts.ToPostgres(ctx, both, "r", nil, why))
	require.Equal(t, "7 5:5: 9:9: 8 3", f.text(position, "worker:b"))
	require.NoError(t, f.cuts.Cancel(ctx, "r", why))
	require.Equal(t, "a left r, b left r; r; r may lead", f.state())
	require.Equal(t, "7 5:5: 9:9: 8 3", f.text(position, "r"))
	require.ErrorIs(t, f.cuts.Cancel(ctx, "r", why), outboxops.ErrNoCut)

	// c and d had no row before. A worker of d has begun meanwhile, and would take all events without one.
	f.do(`INSERT INTO {schema}.consumer_start (consumer_group, topic, topic_id, partition) VALUES ('c', 'orders', gen_random_uuid(), -1)`)
	require.NoError(t, f.cuts.ToPostgres(ctx, []string{"a", "b", "c", "d"}, "r", nil, why))
	f.do(`UPDATE {schema}.event_subscription SET routes = '{"e": 1}' WHERE consumer_group = 'd'`)
	require.NoError(t, f.cuts.Cancel(ctx, "r", why))
	require.Equal(t, "a left r, b left r, d left r; r; r may lead", f.state())
	require.Equal(t, "7 5:5: 9:9: 8 3", f.text(position, "r"))
	require.NoError(t, f.cuts.ToPostgres(ctx, []string{"a", "b", "d"}, "r", []string{"c"}, why), "c may stay behind, as before")
}

// A cut is refused while a relay still has failed events to send, because they would be lost.
func TestCutRefusesFailedEvents(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	ctx := t.Context()
	require.NoError(t, f.cuts.ToKafka(ctx, both, "r", why))
	f.depart(both...)
	require.NoError(t, f.cuts.Finish(ctx, nil, "r", why))
	for _, status := range []string{"waiting", "failed", "parked", "dead", "resolved"} {
		f.do(`INSERT INTO {schema}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at,
				created_at, retry_count, last_error, error_class, status)
			VALUES ('r', nextval('{schema}.outbox_id_seq'), 'k', gen_random_uuid(), 't.t.t.v1', 's', 'A', 'k', '1', 'application/json', 'orders', now(), now(), 1, 'e', 'c', $1)`, status)
		err := f.cuts.ToPostgres(ctx, both, "r", nil, why)
		if status == "dead" || status == "resolved" {
			require.NoError(t, err)
			require.NoError(t, f.cuts.Cancel(ctx, "r", why))
		} else {
			f.rejects(err, "relay r has events in outbox_failed that it still has to send")
			require.Equal(t, "a left r, b left r; r; r may lead", f.state())
		}
		f.do(`DELETE FROM {schema}.outbox_failed`)
	}
}

func TestCutRefuses(t *testing.T) {
	testenv.Direct(t) // PgBouncer refuses the setting of a session
	t.Parallel()
	f := newCutFixture(t)
	ctx := t.Context()
	for name, relay := range map[string]string{"has a position": `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES ('r', 0, '1:1:', 0, 1, 1)`,
		"has only its lease": `INSERT INTO {schema}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('r', 'host/1', 1, now() + interval '1 min', '30s')`} {
		f.do(relay)
		f.rejects(f.cuts.ToKafka(ctx, both, "r", why), "relay r has begun already")
		f.do(`DELETE FROM {schema}.outbox_cursor WHERE relay = 'r'`)
		f.do(`DELETE FROM {schema}.outbox_lease`)
		require.Equal(t, "a active, b active; worker:a, worker:b", f.state(), name)
	}
	f.rejects(f.cuts.ToKafka(ctx, []string{"a", "nobody"}, "r", why), "group nobody does not get its events from workers")
	f.do(`UPDATE {schema}.outbox_cursor SET system_identifier = 1 WHERE relay = 'worker:b'`)
	f.rejects(f.cuts.ToKafka(ctx, both, "r", why), "group b has no position in this database cluster")
	require.ErrorIs(t, f.cuts.ToPostgres(ctx, []string{"new"}, "nobody", nil, why), outboxops.ErrNoCut)
	require.ErrorIs(t, f.cuts.Cancel(ctx, "nobody", why), outboxops.ErrNoCut)
	require.ErrorIs(t, f.cuts.Await(ctx, testenv.KafkaOpts(f.brokers), "nobody", nil), outboxops.ErrNoCut)
	f.rejects(f.cuts.ToKafka(ctx, []string{"a"}, "worker:x", why), "relay")
	require.ErrorContains(t, f.cuts.ToKafka(ctx, nil, "", why), "relay")
	require.ErrorContains(t, f.cuts.ToKafka(ctx, []string{""}, "r", why), "group")
	require.ErrorContains(t, f.cuts.Cancel(ctx, "", why), "relay")
	require.ErrorContains(t, f.cuts.ToKafka(ctx, both, "r", outboxops.AuditInfo{}), "Operator")
	require.Equal(t, "a active, b active; worker:a, worker:b", f.state())

	// A snapshot that is read behind the transaction's own id is not safe from a crash.
	err := pgx.BeginFunc(ctx, f.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, pg.InSchema(`SELECT {schema}.outbox_cut_to_kafka('{a}', 'r', 'kim', 'x')`, f.schema))
		return err
	})
	require.ErrorContains(t, err, "a transaction that has written nothing before")
	// Cuts work under any default isolation level.
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Database = f.db.Config().ConnConfig.Database
		cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	})
	cuts, err := outboxops.NewCuts(db, outboxops.CutsConfig{Schema: f.schema})
	require.NoError(t, err)
	f.do(`UPDATE {schema}.outbox_cursor SET system_identifier = (SELECT system_identifier FROM pg_control_system())`)
	require.NoError(t, cuts.ToKafka(ctx, both, "r", why))
	require.NoError(t, cuts.Cancel(ctx, "r", why))
	_, err = db.Exec(ctx, pg.InSchema(`SELECT {schema}.outbox_cut_to_kafka('{a,b}', 'r', 'kim', 'x')`, f.schema))
	require.ErrorContains(t, err, "READ COMMITTED")
}

// A cut is refused while Debezium still has events to send. Otherwise the workers would lose their order,
// and the relay its position.
func TestCutLeavesRelayToDebezium(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	ctx, cut := t.Context(), outboxops.DebeziumCut{Relay: "r", Publication: "cut_" + strconv.FormatUint(rand.Uint64(), 36), Slot: "debezium"}
	require.NoError(t, outbox.Migrate(ctx, f.db, outbox.MigrateConfig{Schema: f.schema, Publication: cut.Publication}))
	t.Cleanup(func() { f.do(`DROP PUBLICATION ` + cut.Publication) })
	f.do(`SELECT {schema}.outbox_cut_from_debezium($1, 'r', 'kim', 'x')`, cut.Publication) // without logical decoding there is no slot
	const state = "a active, b active; r, worker:a, worker:b; r waits"
	require.Equal(t, state, f.state())

	const text = "relay r takes the events from Debezium: let it begin first"
	f.rejects(f.cuts.ToPostgres(ctx, []string{"c"}, "r", nil, why), text)
	f.rejects(f.cuts.Finish(ctx, nil, "r", why), text)
	f.rejects(f.cuts.Cancel(ctx, "r", why), text)
	f.rejects(f.cuts.ToKafka(ctx, both, "r", why), "relay r has begun already")
	require.Equal(t, state, f.state())
	f.do(`SELECT {schema}.outbox_begin_relay('debezium', 'r', 'kim', 'x')`)
	require.NoError(t, f.cuts.ToPostgres(ctx, []string{"c"}, "r", nil, why))
}

// A cut changes only publications that Migrate has made or accepted. An operator could otherwise stop what another
// service replicates, or send events where they do not belong.
func TestCutTakesNoOthersPublication(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	name := "cut_" + strconv.FormatUint(rand.Uint64(), 36)
	tables := func() string {
		return f.text(`SELECT coalesce(string_agg(tablename, ' '), 'nothing') FROM pg_publication_tables WHERE pubname = $1`, name)
	}
	comment := func() string {
		return f.text(`SELECT coalesce(obj_description(oid, 'pg_publication'), '') FROM pg_publication WHERE pubname = $1`, name)
	}
	migrate := func() {
		t.Helper()
		require.NoError(t, outbox.Migrate(t.Context(), f.db, outbox.MigrateConfig{Schema: f.schema, Publication: name}))
	}
	t.Cleanup(func() { f.do(`DROP PUBLICATION IF EXISTS ` + name) })
	refuses := func(sql, args string) {
		t.Helper()
		_, err := f.db.Exec(t.Context(), pg.InSchema(`SELECT {schema}.`+sql+`('`+name+`', `+args+`, 'kim', 'x')`, f.schema))
		require.Equal(t, "55000", pg.Code(err), "%v", err)
		require.ErrorContains(t, err, "publication "+name+" is not one of outbox")
		require.ErrorContains(t, err, "outbox migrate up --publication "+name)
	}

	f.do(`CREATE PUBLICATION ` + name + ` FOR TABLE {schema}.outbox WITH (publish = 'insert', publish_via_partition_root = true)`)
	f.do(`COMMENT ON PUBLICATION ` + name + ` IS 'outbox and others, for the warehouse'`)
	refuses("outbox_cut_from_debezium", "'r'")
	require.Equal(t, "outbox", tables())
	f.do(`ALTER PUBLICATION ` + name + ` DROP TABLE {schema}.outbox`)
	refuses("outbox_cut_to_debezium", "'slot', 'r'")
	require.Equal(t, "nothing", tables())

	f.do(`ALTER PUBLICATION ` + name + ` ADD TABLE {schema}.outbox`)
	for range 2 { // Migrate marks it once, and keeps what the comment said
		migrate()
		require.Regexp(t, `^outbox: \S.*; outbox and others, for the warehouse$`, comment())
	}
	f.do(`COMMENT ON PUBLICATION ` + name + ` IS NULL`) // with the trigger there
	refuses("outbox_cut_from_debezium", "'r'")
	migrate()
	f.do(`SELECT {schema}.outbox_cut_from_debezium($1, 'r', 'kim', 'x')`, name)
	require.Equal(t, "nothing", tables())

	f.do(`DROP PUBLICATION ` + name)
	migrate()
	require.Regexp(t, `^outbox: [^;]+$`, comment())
}

// A relay that is started meanwhile waits, and makes itself no position.
func TestRelayWaitsForCut(t *testing.T) {
	t.Parallel()
	f := newCutFixture(t)
	events := numbered("k", 1, 7)
	f.commit(t, events[:3]...)
	ctx := t.Context()
	require.NoError(t, f.cuts.ToKafka(ctx, both, "r", why))
	cfg := quick
	cfg.Name = "r"
	testenv.Run(t, f.relay(t, cfg).Run)
	reader := f.follow(t)
	f.commit(t, events[3:5]...)
	time.Sleep(200 * time.Millisecond) // twenty polls
	require.Equal(t, "1", f.text(`SELECT count(*)::text FROM {schema}.outbox_cursor WHERE relay = 'r'`))
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Empty(t, arrived)
	f.depart(both...)
	require.NoError(t, f.cuts.Finish(ctx, nil, "r", why))
	requireArrival(t, reader, events[3:5]...)
	// It is retired, and stays so.
	require.NoError(t, f.cuts.ToPostgres(ctx, both, "r", nil, why))
	require.NoError(t, f.cuts.FinishEarly(ctx, "r", why))
	f.commit(t, events[5:]...)
	time.Sleep(200 * time.Millisecond)
	arrived, err = reader.Arrived()
	require.NoError(t, err)
	require.Equal(t, events[3:5], arrived)
	require.Equal(t, "a active, b active; worker:a, worker:b; r waits", f.state())
}

// A group is not moved to PostgreSQL while one of its actions lacks events that are in Kafka.
func TestCutWaitsForGaps(t *testing.T) {
	t.Parallel()
	for _, early := range []bool{false, true} {
		f := newCutFixture(t)
		require.NoError(t, f.cuts.ToKafka(t.Context(), both, "r", why))
		f.depart(both...)
		require.NoError(t, f.cuts.Finish(t.Context(), nil, "r", why))
		f.do(`INSERT INTO {schema}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset) VALUES ('b', 'orders', gen_random_uuid(), 0, 'GONE', 'e', 7)`)
		f.rejects(f.cuts.ToPostgres(t.Context(), both, "r", nil, why), "action GONE has missed events")
		f.do(`DELETE FROM {schema}.consumer_gap`)
		f.do(`INSERT INTO {schema}.consumer_handler (consumer_group, topic, action, event_type) VALUES ('b', 'orders', 'SUM', 'e')`)
		require.NoError(t, f.cuts.ToPostgres(t.Context(), both, "r", nil, why))
		f.do(`INSERT INTO {schema}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
			SELECT g, 'orders', gen_random_uuid(), 0, 'SUM', 'e', 7 FROM unnest(ARRAY['b', 'other']) AS g`)
		f.rejects(f.cuts.Finish(t.Context(), testenv.KafkaOpts(f.brokers), "r", why), "action SUM of group b has missed events of topic orders")
		if early {
			require.NoError(t, f.cuts.FinishEarly(t.Context(), "r", why))
		} else {
			f.do(`DELETE FROM {schema}.consumer_gap WHERE consumer_group = 'b'`)
			require.NoError(t, f.cuts.Finish(t.Context(), testenv.KafkaOpts(f.brokers), "r", why))
		}
		require.Contains(t, f.state(), "a active, b active")
		require.Equal(t, "e orders SUM", f.text(`SELECT replace(string_agg(key, ','), E'\n', ' ') FROM {schema}.event_subscription, jsonb_object_keys(routes) AS key WHERE consumer_group = 'b'`),
			"workers owe events to what the consumers handle")
		require.Equal(t, "other", f.text(`SELECT string_agg(consumer_group, ',') FROM {schema}.consumer_gap`))
	}
}
