package verify

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// fixture is a schema with the events of a relay that has sent them all, and their topic.
type fixture struct {
	*testenv.Tables
	brokers []string
	topic   string
	client  *kgo.Client
}

// stored is an event in outbox.
type stored struct {
	id    int64
	event uuid.UUID
	key   string
}

func newFixture(t testing.TB) *fixture {
	t.Helper()
	f := &fixture{Tables: testenv.NewTables(t), brokers: testenv.Brokers(t), topic: "verify-" + uuid.NewString()}
	testenv.CreateTopic(t, f.brokers, f.topic, 2)
	var err error
	f.client, err = kgo.NewClient(append(testenv.KafkaOpts(f.brokers), kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	t.Cleanup(f.client.Close)
	return f
}

// record inserts events with these keys, in one transaction each.
func (f *fixture) record(t testing.TB, keys ...string) (all []stored) {
	t.Helper()
	for _, key := range keys {
		e := stored{event: uuid.Must(uuid.NewV7()), key: key}
		err := f.DB.QueryRow(background, f.in(`INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
			VALUES ($1, 'test.thing.happened.v1', 'shop', 'Thing', $2, '{}', 'application/json', $3, now()) RETURNING id`), e.event, key, f.topic).Scan(&e.id)
		require.NoError(t, err)
		all = append(all, e)
	}
	return all
}

func (f *fixture) in(sql string) string { return pg.InSchema(sql, f.Schema) }

// pass moves the cursor behind all events.
func (f *fixture) pass(t testing.TB) {
	t.Helper()
	f.Exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 'default', 0, pg_current_snapshot(), coalesce((SELECT max(id) FROM {schema}.outbox), 0), system_identifier, 1 FROM pg_control_system()`)
}

// send produces the records of events to a partition.
func (f *fixture) send(t testing.TB, partition int32, events ...stored) {
	t.Helper()
	for _, e := range events {
		r := f.recordOf(e)
		r.Partition = partition
		require.NoError(t, f.client.ProduceSync(background, r).FirstErr())
	}
}

func (f *fixture) recordOf(e stored) *kgo.Record {
	return &kgo.Record{Topic: f.topic, Key: []byte(e.key), Value: []byte("{}"), Headers: []kgo.RecordHeader{
		{Key: "ce_specversion", Value: []byte("1.0")}, {Key: "ce_id", Value: []byte(e.event.String())}, {Key: "ce_source", Value: []byte("shop")},
		{Key: "ce_type", Value: []byte("test.thing.happened.v1")}, {Key: "ce_time", Value: []byte(time.Now().UTC().Format(time.RFC3339Nano))}}}
}

func (f *fixture) verify(t testing.TB, cfg Config) Report {
	t.Helper()
	cfg.Schema, cfg.Relay, cfg.Findings = f.Schema, "default", 20
	report, err := Run(background, f.DB, testenv.KafkaOpts(f.brokers), cfg)
	require.NoError(t, err)
	return report
}

func places(findings []Finding) (all []string) {
	for _, f := range findings {
		all = append(all, fmt.Sprintf("%s %s %d %d/%d %s", f.Kind, f.EventID, f.OutboxID, f.Partition, f.Offset, f.Key))
	}
	return all
}

// Each kind of fault that is planted is found, and nothing else.
func TestPlantedFaults(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	e := f.record(t, "a", "b", "a", "c", "b", "a")
	f.send(t, 0, e[0], e[2], e[5])
	f.send(t, 1, e[1], e[3], e[4])
	f.pass(t)
	report := f.verify(t, Config{})
	require.Empty(t, report.Findings)
	require.EqualValues(t, 6, report.Events)
	require.EqualValues(t, 6, report.Records)
	require.Equal(t, []int64{e[0].id, e[5].id}, []int64{report.FirstID, report.LastID})

	lost := f.record(t, "d")[0]
	late := f.record(t, "e", "e")
	f.pass(t)
	phantom := stored{event: uuid.Must(uuid.NewV7()), key: "x"}
	f.send(t, 0, late[1], late[0], phantom, e[1])
	want := []string{
		fmt.Sprintf("lost %s %d -1/0 ", lost.event, lost.id),
		fmt.Sprintf("phantom %s 0 0/5 ", phantom.event),
		fmt.Sprintf("inverted %s %d 0/4 e", late[0].event, late[0].id),
		fmt.Sprintf("repeated %s %d 1/0 ", e[1].event, e[1].id),
	}
	report = f.verify(t, Config{})
	require.Equal(t, want, places(report.Findings))
	require.EqualValues(t, 4, report.Problems(Kinds...))

	// A range has only the faults of its own events.
	report = f.verify(t, Config{Before: lost.id})
	require.Equal(t, want[3:], places(report.Findings))
	report = f.verify(t, Config{After: e[5].id})
	require.Equal(t, want[:3], places(report.Findings))
	report = f.verify(t, Config{Until: time.Now().Add(-time.Minute)})
	require.Empty(t, report.Findings)
	require.Zero(t, report.Events)
	report = f.verify(t, Config{Since: time.Now().Add(-time.Minute)})
	require.Equal(t, want, places(report.Findings))
}

// Events that are not in Kafka for a reason that PostgreSQL knows are not lost.
func TestExplainedEvents(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	e := f.record(t, "a", "b", "c", "d", "e")
	f.pass(t)
	f.record(t, "f", "g")
	for i, status := range []string{"waiting", "failed", "parked", "dead"} {
		f.Exec(t, `INSERT INTO {schema}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at, created_at, status)
			VALUES ($1, $2, $3, 'test.thing.happened.v1', 'shop', 'Thing', $4, '{}', 'application/json', $5, now(), now(), $6)`,
			e[i].id, f.topic+"/"+e[i].key, e[i].event, e[i].key, f.topic, status)
	}
	f.Exec(t, `INSERT INTO {schema}.outbox_audit (operator, action, reason, relay, parking_key, outbox_id, event_id) VALUES ('kim', 'resolve', 'why', 'default', $1, $2, $3)`,
		f.topic+"/e", e[4].id, e[4].event)
	report := f.verify(t, Config{})
	require.Empty(t, report.Findings)
	require.Equal(t, map[string]int64{"waiting": 1, "failed": 1, "parked": 1, "dead": 1, "resolved": 1, "pending": 2}, report.NotSent)

	// Behind a dead event, a key has no order.
	behind := f.record(t, "d", "d")
	f.send(t, 0, behind[1], behind[0])
	f.pass(t)
	report = f.verify(t, Config{After: e[4].id + 2})
	require.Empty(t, report.Findings)
	require.EqualValues(t, 1, report.Released)
}

// Records of events that retention has removed, of other sources and for one group are not judged.
func TestUnknownRecords(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	e := f.record(t, "a", "b", "c")
	f.send(t, 0, e...)
	f.pass(t)
	f.Exec(t, `DELETE FROM {schema}.outbox WHERE id <= $1`, e[1].id)
	foreign, replayed := f.recordOf(e[0]), f.recordOf(e[2])
	foreign.Headers[2].Value = []byte("other")
	replayed.Headers = append(replayed.Headers, kgo.RecordHeader{Key: "replay_of", Value: []byte("x-1-2")})
	require.NoError(t, f.client.ProduceSync(background, foreign, replayed, &kgo.Record{Topic: f.topic, Value: []byte("plain")}).FirstErr())
	report := f.verify(t, Config{})
	require.Empty(t, report.Findings)
	require.Equal(t, []int64{1, 3, 2, 2, 1}, []int64{report.Events, report.Records, report.Older, report.Foreign, report.Replayed})
}

// The relay must have a position, and PostgreSQL tables.
func TestVerifyCannot(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, err := Run(background, f.DB, testenv.KafkaOpts(f.brokers), Config{Schema: f.Schema, Relay: "nobody"})
	require.ErrorIs(t, err, ErrNoRelay)
	_, err = Run(background, f.DB, testenv.KafkaOpts(f.brokers), Config{Schema: "nowhere", Relay: "default"})
	require.ErrorContains(t, err, "nowhere")
	f.Exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES ('default', 0, '1:1:', 0, 17, 1)`)
	_, err = Run(background, f.DB, testenv.KafkaOpts(f.brokers), Config{Schema: f.Schema, Relay: "default"})
	require.ErrorIs(t, err, ErrOtherCluster)
}

// An event without a record is not lost if Kafka may have removed its record, and it is if the topic is missing.
func TestKafkaRemoves(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	e := f.record(t, "a", "b")
	f.send(t, 0, e...)
	f.pass(t)
	f.deleteRecords(t, 1)
	report := f.verify(t, Config{})
	require.Empty(t, report.Findings)
	require.EqualValues(t, 1, report.Expired)
	f.Exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (gen_random_uuid(), 'test.`+uuid.NewString()+`.happened.v1', 'shop', 'Thing', 'k', '{}', 'application/json', now())`)
	f.pass(t)
	report = f.verify(t, Config{})
	require.Len(t, report.Findings, 1)
	require.Equal(t, "the relay has passed it, and its topic is missing", report.Findings[0].Why)
}

// deleteRecords removes the records of partition 0 in front of an offset.
func (f *fixture) deleteRecords(t testing.TB, before int64) {
	t.Helper()
	partition := kmsg.NewDeleteRecordsRequestTopicPartition()
	partition.Partition, partition.Offset = 0, before
	request := kmsg.NewPtrDeleteRecordsRequest()
	request.Topics = append(request.Topics, kmsg.DeleteRecordsRequestTopic{Topic: f.topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{partition}})
	response, err := request.RequestWith(background, f.client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].Partitions[0].ErrorCode))
}
