package main

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/testenv"
)

// deliveryFindings returns the doctor's findings about deliveries, and their ids.
func (d *commandFixture) deliveryFindings(t testing.TB, args ...string) (ids []string, all []finding) {
	t.Helper()
	all = slices.DeleteFunc(d.findings(t, append(args, "--only", "delivery,doctor")...), func(f finding) bool { return f.Severity == severityNote })
	for _, f := range all {
		ids = append(ids, f.ID)
	}
	return ids, all
}

func TestDoctorOnDeliveries(t *testing.T) {
	testenv.Long(t)
	testenv.Direct(t) // the doctor has a finding about PgBouncer
	t.Parallel()
	d := newClinic(t)
	d.deliver(t, "healthy", "PROCESSING", "PARKED", "DONE")
	d.deliver(t, "soon", "PENDING")
	d.exec(t, `UPDATE {s}.event_delivery SET next_retry_at = now() + interval '1 min' WHERE status = 'PENDING'`)
	ids, _ := d.deliveryFindings(t)
	require.Empty(t, ids)

	for _, test := range []struct{ name, sql, id, what string }{
		{"a worker of the group is at others of this action", `UPDATE {s}.event_delivery SET next_retry_at = now() - interval '6 min' WHERE status = 'PENDING'`,
			"delivery.backlog", "of stream orders to action COUNTED has been due for 6m"},
		{"a worker of the group is at another action", `UPDATE {s}.event_delivery SET action = 'SENT' WHERE status = 'PENDING'`, "delivery.unhandled", "to action SENT"},
		{"an operator has paused another stream", `INSERT INTO {s}.consumer_pause (consumer_group, topic, operator, reason) VALUES ('stats', 'others', 'kim', 'x')`, "delivery.unhandled", "SENT"},
		{"an operator has paused the stream", `INSERT INTO {s}.consumer_pause (consumer_group, topic, operator, reason) VALUES ('stats', 'orders', 'kim', 'x')`, "", ""},
		{"or all of the group", `UPDATE {s}.consumer_pause SET topic = '' WHERE topic = 'orders'`, "", ""},
		{"the pause has ended", `DELETE FROM {s}.consumer_pause`, "delivery.unhandled", "SENT"},
		{"no worker is at anything", `UPDATE {s}.event_delivery SET locked_until = now() - interval '30 s' WHERE status = 'PROCESSING'`, "delivery.worker", "SENT"},
		{"nor does one take over", `UPDATE {s}.event_delivery SET locked_until = now() - interval '6 min' WHERE status = 'PROCESSING';
			UPDATE {s}.event_delivery SET next_retry_at = now() WHERE status = 'PENDING'`, "delivery.stuck", "since its lease ended 6m"},
		{"and another group has nothing", `UPDATE {s}.event_delivery SET consumer_group = 'mails' WHERE status = 'PENDING'`, "delivery.stuck", "group stats"},
	} {
		_, err := d.db.Exec(background, strings.ReplaceAll(test.sql, "{s}", `"`+d.schema+`"`))
		require.NoError(t, err)
		ids, all := d.deliveryFindings(t)
		if test.id == "" {
			require.Empty(t, ids, test.name)
			continue
		}
		require.Equal(t, []string{test.id}, ids, test.name)
		require.Contains(t, all[0].What, test.what, test.name)
	}
	d.exec(t, `UPDATE {s}.event_delivery SET locked_until = now() + interval '1 min' WHERE status = 'PROCESSING'`)

	d.deliver(t, "dead", "DEAD", "DEAD")
	held := d.deliver(t, "held", "DEAD", "PARKED")[0]
	d.exec(t, `UPDATE {s}.event_delivery SET held = true WHERE id = `+held)
	ids, all := d.deliveryFindings(t)
	require.Equal(t, []string{"delivery.dead", "delivery.held"}, ids)
	require.Contains(t, all[0].What, "group stats: 3 deliveries are dead")
	require.Contains(t, all[1].What, "1 key is held")
	d.ok(t, "failures", "resolve", "--kind", "delivery", "--status", "dead", "--yes", "--reason", "gone")
	ids, _ = d.deliveryFindings(t)
	require.Empty(t, ids)

	// Events that a group has not come to.
	d.record(t, "k")
	d.exec(t, `INSERT INTO {s}.event_subscription (consumer_group) VALUES ('stats'), ('mails')`)
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT r, 0, '1:1:', 0, system_identifier, 1 FROM pg_control_system(), unnest('{worker:stats,worker:mails}'::text[]) AS r`)
	require.Contains(t, d.ok(t, "consumers", "--group", "stats"), "group stats: 1 event has no deliveries yet, the oldest is ")
	ids, _ = d.deliveryFindings(t)
	require.Empty(t, ids)
	ids, all = d.deliveryFindings(t, "--max-age", "1ns")
	require.Equal(t, []string{"delivery.members", "delivery.members", "delivery.stale", "delivery.stale", "delivery.worker", "delivery.backlog", "delivery.worker", "delivery.backlog"}, ids,
		"who runs, what waits, what is due, and what has no deliveries")
	require.Contains(t, all[6].What, "group mails: 1 event has no deliveries yet")
	d.exec(t, `UPDATE {s}.event_subscription SET state = 'left', relay = 'default'`)
	ids, _ = d.deliveryFindings(t, "--max-age", "1ns")
	require.Equal(t, []string{"delivery.members", "delivery.members", "delivery.stale", "delivery.stale", "delivery.worker", "delivery.backlog"}, ids, "who runs, what waits, and what is due")
	require.Contains(t, d.ok(t, "consumers"), "group mails: left since ")
	require.NotContains(t, d.ok(t, "status"), "worker:")
	var doc struct {
		Groups      []groupJSON
		More        bool
		Deliveries  []deliveriesJSON
		Workers     []workersJSON
		States      []groupStateJSON
		DeadLetters []deadLettersJSON `json:"dead_letters"`
	}
	d.json(t, &doc, exitOK, "consumers", "--group", "mails")
	require.Len(t, doc.Workers, 1)
	require.Equal(t, []string{"left", "default"}, []string{doc.Workers[0].State, doc.Workers[0].Relay})

	// The doctor's advice about keys without a head solves the problem.
	d.exec(t, `UPDATE {s}.event_delivery SET status = 'DONE', locked_by = NULL, locked_until = NULL WHERE status = 'PROCESSING'`)
	ids, all = d.deliveryFindings(t)
	require.Equal(t, []string{"delivery.headless"}, ids)
	require.Contains(t, all[0].What, "group stats: all deliveries of 1 key are parked")
	_, sql, _ := strings.Cut(all[0].Do, "At once: ")
	d.exec(t, sql)
	ids, _ = d.deliveryFindings(t)
	require.Empty(t, ids)
}

// The advice for a handler or a group that is given up picks its deliveries, and none of other groups, actions and
// topics. It counts them by group and action before it acts.
func TestDoctorAdvisesOnOneHandler(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	sets := []string{
		`consumer_group = 'given up'`, `consumer_group = 'given up', action = 'SENT'`, `consumer_group = 'given up', stream = 'others'`, `consumer_group = 'live'`,
	}
	for n, set := range sets {
		d.deliver(t, strings.Repeat("k", n+1), "PENDING", "PARKED", "PARKED")
		d.exec(t, `UPDATE {s}.event_delivery SET next_retry_at = now() + interval '1 h', `+set+` WHERE aggregate_id = $1`, strings.Repeat("k", n+1))
	}
	d.exec(t, `UPDATE {s}.event_delivery SET next_retry_at = now() - interval '6 min' WHERE aggregate_id = 'k'`)
	left := func() (keys string) {
		require.NoError(t, d.db.QueryRow(background, strings.ReplaceAll(`SELECT string_agg(aggregate_id, ' ' ORDER BY id) FROM {s}.event_delivery WHERE resolved_at IS NULL`,
			"{s}", `"`+d.schema+`"`)).Scan(&keys))
		return keys
	}
	advice := func() []string {
		_, all := d.deliveryFindings(t)
		require.Len(t, all, 1)
		command := regexp.MustCompile(`outbox (failures resolve .*) \(it counts`).FindStringSubmatch(all[0].Do)
		require.NotNil(t, command, all[0].Do)
		require.Contains(t, command[1], "--group 'given up' --action COUNTED --topic orders")
		words := strings.Fields(strings.ReplaceAll(command[1], "'given up'", "given_up"))
		for i := range words {
			words[i] = strings.ReplaceAll(words[i], "given_up", "given up")
		}
		return append(words, "--reason", "given up")
	}
	command := advice()
	require.Contains(t, d.ok(t, command...), "group given up, action COUNTED: 3\nwould resolve 3 failures")
	require.Equal(t, "k k k kk kk kk kkk kkk kkk kkkk kkkk kkkk", left())
	require.Contains(t, d.ok(t, append(command, "--yes")...), "group given up, action COUNTED: 3\n")
	require.Equal(t, "kk kk kk kkk kkk kkk kkkk kkkk kkkk", left())

	undo := []string{"failures", "retry", "--kind", "delivery", "--group", "given up", "--status", "resolved", "--reason", "a mistake"}
	require.Contains(t, d.ok(t, undo...), "group given up, action COUNTED: 3\nwould retry 3 failures")
	require.Contains(t, d.ok(t, append(undo, "--yes")...), "retried 3 failures")
	require.Equal(t, "k k k kk kk kk kkk kkk kkk kkkk kkkk kkkk", left())
	require.Contains(t, d.ok(t, undo...), "would retry 0 failures")

	counts := d.ok(t, "failures", "resolve", "--kind", "delivery", "--status", "waiting,failed,parked", "--reason", "x")
	for _, line := range []string{"group given up, action COUNTED: 6\n", "group given up, action SENT: 3\n", "group live, action COUNTED: 3\n"} {
		require.Contains(t, counts, line)
	}
	var doc bulkDoc
	d.json(t, &doc, exitOK, "failures", "resolve", "--kind", "delivery", "--status", "waiting,failed,parked", "--reason", "x")
	require.Contains(t, doc.Handlers, handlerJSON{"live", "COUNTED", 3})
}

// A handler that no running worker has is a finding before its group forgets it, and so are deliveries of a type that
// no running process handles.
func TestDoctorOnHandlersThatAreAway(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.exec(t, `INSERT INTO {s}.event_subscription (consumer_group, routes) VALUES ('stats', jsonb_build_object(
		't' || chr(10) || 'orders' || chr(10) || 'COUNTED', extract(epoch FROM now())::bigint, 'u' || chr(10) || 'orders' || chr(10) || 'GONE', extract(epoch FROM now() - interval '20 min 30 s')::bigint))`)
	d.deliver(t, "k", "PENDING", "PARKED")
	d.exec(t, `UPDATE {s}.event_delivery SET next_retry_at = now() + interval '1 h', event_type = 'x'`)
	ids, _ := d.deliveryFindings(t)
	require.Empty(t, ids, "no process of the group runs")

	d.exec(t, `INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes)
		VALUES ('stats', 'a', false, now(), '1 h', ARRAY['t' || chr(10) || 'orders' || chr(10) || 'COUNTED'])`)
	ids, all := d.deliveryFindings(t)
	require.Equal(t, []string{"delivery.handler", "delivery.handler"}, ids)
	require.Contains(t, all[0].What, "no running worker has the handler of action GONE for type u of stream orders")
	require.Contains(t, all[0].Means, "A worker last had it 20m")
	require.Contains(t, all[1].What, "deliveries of type x of stream orders wait for action COUNTED")

	d.exec(t, `UPDATE {s}.event_delivery SET event_type = 't'`)
	d.exec(t, `INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes)
		VALUES ('stats', 'b', false, now(), '1 h', ARRAY['u' || chr(10) || 'orders' || chr(10) || 'GONE'])`)
	ids, _ = d.deliveryFindings(t)
	require.Empty(t, ids)
	d.exec(t, `UPDATE {s}.event_member SET renewed_at = now() - interval '4 h' WHERE member = 'b'`)
	ids, _ = d.deliveryFindings(t)
	require.Equal(t, []string{"delivery.handler"}, ids, "its row has expired")
}

// Members without an action have read events that the action lacks.
func TestDoctorOnGaps(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.exec(t, `INSERT INTO {s}.consumer_handler (consumer_group, topic, action, event_type) VALUES ('stats', 'sales', 'SUM', 'e'), ('stats', 'sales', 'COUNT', 'e');
		INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset, opened_at)
		SELECT 'stats', 'sales', gen_random_uuid(), n, 'SUM', 'e', 7, now() - interval '4 min' FROM generate_series(0, 2) AS n`)
	ids, _ := d.deliveryFindings(t)
	require.Empty(t, ids, "a rollout takes a while")
	d.exec(t, `UPDATE {s}.consumer_gap SET opened_at = now() - interval '90 min'`)
	ids, all := d.deliveryFindings(t)
	require.Equal(t, []string{"delivery.gap"}, ids)
	require.Equal(t, "group stats: action SUM has lacked events of topic sales for 1h30m", all[0].What)
	found := regexp.MustCompile(`SELECT .*`).FindString(all[0].Do) // ends the action
	require.NotEmpty(t, found)
	d.exec(t, found)
	var left string
	require.NoError(t, d.db.QueryRow(background, strings.ReplaceAll(`SELECT concat_ws(' ', (SELECT count(*) FROM {s}.consumer_gap), (SELECT string_agg(action, ',') FROM {s}.consumer_handler),
		(SELECT string_agg(concat_ws(' ', action, consumer_group, parking_key), ',') FROM {s}.outbox_audit))`, "{s}", pgx.Identifier{d.schema}.Sanitize())).Scan(&left))
	require.Equal(t, "0 COUNT forget-action stats /SUM", left)
	ids, _ = d.deliveryFindings(t)
	require.Empty(t, ids)
}

// Retention of Kafka removes what an action lacks, or comes near.
func TestDoctorOnGapsInKafka(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t).withKafka(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	client, err := kgo.NewClient(kgo.SeedBrokers(d.brokers...), kgo.DefaultProduceTopic(d.topic))
	require.NoError(t, err)
	defer client.Close()
	for range 100 {
		require.NoError(t, client.ProduceSync(background, kgo.StringRecord("x")).FirstErr())
	}
	request := kmsg.NewPtrDeleteRecordsRequest()
	request.Topics = []kmsg.DeleteRecordsRequestTopic{{Topic: d.topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{{Partition: 0, Offset: 20}}}}
	response, err := request.RequestWith(background, client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
	d.exec(t, `INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset)
		SELECT 'stats', $1, gen_random_uuid(), 0, action, 'e', at
		  FROM (VALUES ('LOST', 10), ('NEAR', 25), ('FAR', 60)) AS g (action, at)
		 UNION ALL
		SELECT 'stats', 'missing', gen_random_uuid(), 0, 'GONE', 'e', 1`, d.topic)
	var what []string
	for _, f := range d.findings(t, "--only", "kafka.gap,doctor") {
		require.Equal(t, "kafka.gap", f.ID)
		what = append(what, f.What)
	}
	require.Equal(t, []string{
		"group stats: action LOST, " + d.topic + "/0: Kafka has removed 10 records that it lacks",
		"group stats: action NEAR, " + d.topic + "/0: Kafka removes what it lacks after 5 more records",
	}, what)
}
