package outboxops_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// rewindFixture is a topic of two partitions, and a group that notes in a table which
// events it has handled, and how often.
type rewindFixture struct {
	*opsFixture
	group  string
	events *outbox.Registry
	opts   []kgo.Opt // of the group's members
}

func newRewindFixture(t *testing.T, opts ...kgo.Opt) *rewindFixture {
	t.Helper()
	r := &rewindFixture{opsFixture: newFixture(t), opts: opts}
	testenv.RealBrokers(t)
	r.group = "rewind-" + r.topic
	testenv.CreateTopic(t, r.brokers, r.topic, 2)
	testenv.CreateTopic(t, r.brokers, r.topic+".dlq", 1)
	var err error
	r.events, err = outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(r.topic))
	require.NoError(t, err)
	_, err = r.db.Exec(background, r.sql(`CREATE TABLE {schema}.effects (id text, n int)`))
	require.NoError(t, err)
	return r
}

// run runs the group with franz-go's default options.
func (r *rewindFixture) run(t *testing.T) (stop func()) {
	t.Helper()
	c, err := outbox.NewConsumer(r.db, append(r.opts, kgo.SeedBrokers(r.brokers...)), r.events,
		r.group, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: r.schema, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart}},
		outbox.Handle("EFFECT", func(ctx context.Context, tx pgx.Tx, e oracle.Event, _ outbox.Metadata) error {
			_, err := tx.Exec(ctx, r.sql(`INSERT INTO {schema}.effects VALUES ($1, 1)`), e.ID)
			return err
		}))
	require.NoError(t, err)
	return testenv.Run(t, c.Run)
}

func (r *rewindFixture) put(t *testing.T, partition int32, n int) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(r.brokers...), kgo.RecordPartitioner(kgo.ManualPartitioner()))
	require.NoError(t, err)
	defer client.Close()
	for i := range n {
		id := uuid.NewString()
		require.NoError(t, client.ProduceSync(background, &kgo.Record{
			Topic: r.topic, Partition: partition, Key: []byte("k"), Value: fmt.Appendf(nil, `{"id":%q,"key":"k","version":%d}`, id, i),
			Headers: []kgo.RecordHeader{
				{Key: "ce_specversion", Value: []byte("1.0")}, {Key: "ce_id", Value: []byte(id)}, {Key: "ce_source", Value: []byte("test")},
				{Key: "ce_type", Value: []byte("test.oracle.happened.v1")}, {Key: "content-type", Value: []byte("application/json")},
			},
		}).FirstErr())
	}
}

// effects returns the number of events with an effect, and the number of effects.
func (r *rewindFixture) effects(t *testing.T) (events, effects int) {
	t.Helper()
	require.NoError(t, r.db.QueryRow(background, r.sql(`SELECT count(DISTINCT id), count(*) FROM {schema}.effects`)).Scan(&events, &effects))
	return events, effects
}

func (r *rewindFixture) requireEffects(t *testing.T, n int) {
	t.Helper()
	require.Eventually(t, func() bool { events, _ := r.effects(t); return events == n }, testenv.Patience, 10*time.Millisecond)
	_, effects := r.effects(t)
	require.Equal(t, n, effects, "nothing is repeated")
}

func (r *rewindFixture) rewind(cfg outboxops.RewindConfig) (outboxops.RewindReport, error) {
	cfg.Group, cfg.Schema, cfg.Audit = r.group, r.schema, kim
	return outboxops.Rewind(background, r.db, []kgo.Opt{kgo.SeedBrokers(r.brokers...)}, cfg)
}

// The lag of a group is the number of records that it still has to read, by topic.
func TestLag(t *testing.T) {
	t.Parallel()
	r := newRewindFixture(t)
	consumers, err := outboxops.NewConsumers(r.db, outboxops.ConsumersConfig{Schema: r.schema})
	require.NoError(t, err)
	lag := func() map[string]map[string]int64 {
		groups, _, err := consumers.List(background, outboxops.ConsumerFilter{})
		require.NoError(t, err)
		all, err := consumers.Lag(background, []kgo.Opt{kgo.SeedBrokers(r.brokers...)}, groups)
		require.NoError(t, err)
		return all
	}
	require.Empty(t, lag(), "no group has begun")
	r.put(t, 0, 5)
	r.put(t, 1, 2)
	stop := r.run(t)
	r.requireEffects(t, 7)
	require.Eventually(t, func() bool { return lag()[r.group][r.topic] == 0 }, testenv.Patience, 20*time.Millisecond)
	stop()
	r.put(t, 0, 3)
	r.put(t, 1, 1)
	require.Equal(t, map[string]map[string]int64{r.group: {r.topic: 4}}, lag())
	r.deleteRecords(t, 0, 7)
	require.EqualValues(t, 2, lag()[r.group][r.topic], "without what Kafka has removed")
	_, err = consumers.Lag(background, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1"), kgo.RetryTimeout(time.Second)}, []outboxops.ConsumerGroup{{Group: "g"}})
	require.ErrorContains(t, err, "lag of consumer group g")
}

// deleteRecords has Kafka remove the records of a partition below an offset.
func (r *rewindFixture) deleteRecords(t *testing.T, partition int32, below int64) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(r.brokers...))
	require.NoError(t, err)
	defer client.Close()
	request := kmsg.NewPtrDeleteRecordsRequest()
	topic := kmsg.NewDeleteRecordsRequestTopic()
	one := kmsg.NewDeleteRecordsRequestTopicPartition()
	one.Partition, one.Offset = partition, below
	topic.Topic, topic.Partitions = r.topic, []kmsg.DeleteRecordsRequestTopicPartition{one}
	request.Topics, request.TimeoutMillis = []kmsg.DeleteRecordsRequestTopic{topic}, 10_000
	for _, shard := range client.RequestSharded(background, request) {
		require.NoError(t, shard.Err)
		for _, topic := range shard.Resp.(*kmsg.DeleteRecordsResponse).Topics {
			for _, p := range topic.Partitions {
				require.NoError(t, kerr.ErrorForCode(p.ErrorCode))
			}
		}
	}
}

// PostgreSQL is restored from a backup. The events that were handled since have neither effects nor notes,
// but Kafka has the offsets. After a rewind to the time of the backup, the group handles exactly these
// events again.
func TestRewindAfterRestore(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]kgo.Opt{"classic": nil, "KIP-848": {kgo.ServerSideBalancer()}} {
		t.Run(name, func(t *testing.T) { t.Parallel(); testRewindAfterRestore(t, opts) })
	}
}

func testRewindAfterRestore(t *testing.T, opts []kgo.Opt) {
	r := newRewindFixture(t, opts...)
	r.put(t, 0, 10)
	r.put(t, 1, 10)
	stop := r.run(t)
	r.requireEffects(t, 20)
	backup := time.Now()
	_, err := r.db.Exec(background, r.sql(`CREATE TABLE {schema}.kept AS SELECT * FROM {schema}.effects; CREATE TABLE {schema}.kept_notes AS SELECT * FROM {schema}.event_handled`))
	require.NoError(t, err)
	time.Sleep(10 * time.Millisecond) // Kafka's timestamps are in milliseconds
	r.put(t, 0, 5)
	r.requireEffects(t, 25)
	cfg := outboxops.RewindConfig{Time: backup.Add(-time.Hour)}
	_, err = r.rewind(cfg)
	require.ErrorIs(t, err, outboxops.ErrGroupActive)
	stop()
	_, err = r.db.Exec(background, r.sql(`TRUNCATE {schema}.effects, {schema}.event_handled; INSERT INTO {schema}.effects SELECT * FROM {schema}.kept;
		INSERT INTO {schema}.event_handled SELECT * FROM {schema}.kept_notes`))
	require.NoError(t, err)

	stop = r.run(t)
	time.Sleep(time.Second)
	stop()
	r.requireEffects(t, 20) // the offsets are ahead

	cfg.DryRun = true
	report, err := r.rewind(cfg)
	require.NoError(t, err)
	require.Equal(t, []int{25, 20, 5, 0}, []int{report.Records, report.Noted, report.Unnoted(), report.Older})
	require.Equal(t, []outboxops.RewoundPartition{{Topic: r.topic, From: 15}, {Topic: r.topic, Partition: 1, From: 10}}, report.Partitions)
	cfg.Time = backup
	report, err = r.rewind(cfg)
	require.NoError(t, err)
	require.Equal(t, []int{5, 0, 5, 0}, []int{report.Records, report.Noted, report.Unnoted(), report.Older})
	require.Equal(t, []outboxops.RewoundPartition{{Topic: r.topic, From: 15, To: 10}}, report.Partitions)
	r.requireEffects(t, 20)

	cfg.DryRun = false
	_, err = r.rewind(cfg)
	require.NoError(t, err)
	stop = r.run(t)
	r.requireEffects(t, 25)
	stop()

	// To an earlier offset: everything is noted now.
	offset := int64(3)
	report, err = r.rewind(outboxops.RewindConfig{Offset: &offset, Topics: []string{r.topic}})
	require.NoError(t, err)
	require.Equal(t, []int{19, 19, 0, 0}, []int{report.Records, report.Noted, report.Unnoted(), report.Older})
	r.run(t)
	r.put(t, 1, 1)
	r.requireEffects(t, 26)
}

// A group that lags handles records that are much older than the present time. So records whose handling
// was lost may have been sent long before the backup. The backup has the position of the group.
func TestRewindOfLaggingGroup(t *testing.T) {
	t.Parallel()
	r := newRewindFixture(t)
	r.put(t, 0, 3)
	stop := r.run(t)
	r.requireEffects(t, 3)
	stop() // its position is saved
	r.put(t, 0, 10)
	time.Sleep(10 * time.Millisecond)
	backup := time.Now() // the group has not come to the 10 by then
	saved := func(to, from string) {
		_, err := r.db.Exec(background, r.sql(`CREATE TABLE IF NOT EXISTS `+to+` (LIKE `+from+`); TRUNCATE `+to+`; INSERT INTO `+to+` SELECT * FROM `+from))
		require.NoError(t, err)
	}
	for _, table := range []string{"effects", "event_handled", "consumer_start"} {
		saved("{schema}.kept_"+table, "{schema}."+table)
	}
	time.Sleep(10 * time.Millisecond)
	stop = r.run(t)
	r.requireEffects(t, 13)
	stop()
	for _, table := range []string{"effects", "event_handled", "consumer_start"} {
		saved("{schema}."+table, "{schema}.kept_"+table)
	}
	r.requireEffects(t, 3)
	report, err := r.rewind(outboxops.RewindConfig{Time: backup})
	require.NoError(t, err)
	require.Equal(t, []outboxops.RewoundPartition{{Topic: r.topic, From: 13, To: 3}}, report.Partitions)
	require.Equal(t, []int{10, 0, 10, 0}, []int{report.Records, report.Noted, report.Unnoted(), report.Older})

	// If Kafka had not taken the offsets, a second Rewind would go back as far.
	client, err := kgo.NewClient(kgo.SeedBrokers(r.brokers...))
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, kafka.CommitGroupOffsets(background, client, r.group, map[kafka.Partition]int64{{Topic: r.topic}: 13}))
	report, err = r.rewind(outboxops.RewindConfig{Time: backup})
	require.NoError(t, err)
	require.Equal(t, []outboxops.RewoundPartition{{Topic: r.topic, From: 13, To: 3}}, report.Partitions)
	r.run(t)
	r.requireEffects(t, 13)
}

// commitOther commits an offset of another topic of this cluster, which had the name before the topic of the fixture.
func (r *rewindFixture) commitOther(t *testing.T, partition int32, offset int64) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(r.brokers...))
	require.NoError(t, err)
	defer client.Close()
	described, err := kafka.Metadata(background, client, r.topic)
	require.NoError(t, err)
	other := uuid.New()
	metadata := "topic " + base64.RawURLEncoding.EncodeToString(other[:]) + " in cluster " + *described.ClusterID
	request := kmsg.NewPtrOffsetCommitRequest()
	topic := kmsg.NewOffsetCommitRequestTopic()
	one := kmsg.NewOffsetCommitRequestTopicPartition()
	one.Partition, one.Offset, one.Metadata = partition, offset, &metadata
	topic.Topic, topic.TopicID, topic.Partitions = r.topic, described.Topics[0].TopicID, []kmsg.OffsetCommitRequestTopicPartition{one}
	request.Group, request.Topics = r.group, []kmsg.OffsetCommitRequestTopic{topic}
	response, err := request.RequestWith(background, client)
	require.NoError(t, err)
	require.Zero(t, response.Topics[0].Partitions[0].ErrorCode)
}

// The offset of a topic that was deleted and created again counts as none: all records of the new topic are unread, and
// no rewind has the group begin behind some of them.
func TestOffsetsOfDeletedTopics(t *testing.T) {
	t.Parallel()
	r := newRewindFixture(t)
	r.put(t, 0, 30)
	time.Sleep(10 * time.Millisecond)
	middle := time.Now()
	time.Sleep(10 * time.Millisecond)
	r.put(t, 0, 20)
	r.commitOther(t, 0, 50)

	opts := []kgo.Opt{kgo.SeedBrokers(r.brokers...)}
	t.Run("lag", func(t *testing.T) {
		consumers, err := outboxops.NewConsumers(r.db, outboxops.ConsumersConfig{Schema: r.schema})
		require.NoError(t, err)
		lag, err := consumers.Lag(background, opts, []outboxops.ConsumerGroup{{Group: r.group}})
		require.NoError(t, err)
		require.Equal(t, map[string]map[string]int64{r.group: {r.topic: 50}}, lag)
	})
	t.Run("cut", func(t *testing.T) {
		r.exec(t, `INSERT INTO {schema}.event_subscription (consumer_group, state, relay) VALUES ($1, 'returning', 'r')`, r.group)
		defer r.exec(t, `DELETE FROM {schema}.event_subscription`)
		cuts, err := outboxops.NewCuts(r.db, outboxops.CutsConfig{Schema: r.schema})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(background)
		defer cancel()
		var unread int64
		_ = cuts.Await(ctx, opts, "r", func(p outboxops.CutProgress) { unread = p.Unread(); cancel() })
		require.EqualValues(t, 50, unread)
	})
	t.Run("rewind", func(t *testing.T) {
		_, err := r.rewind(outboxops.RewindConfig{Time: middle})
		if err != nil {
			require.ErrorIs(t, err, outboxops.ErrNotFound)
		}
		r.run(t)
		r.requireEffects(t, 50)
	})
}

// What a rewind commits names its topic, too, so that it does not count for a topic that is created later.
func TestRewindNamesTheTopic(t *testing.T) {
	t.Parallel()
	r := newRewindFixture(t)
	r.put(t, 0, 3)
	stop := r.run(t)
	r.requireEffects(t, 3)
	stop()
	client, err := kgo.NewClient(kgo.SeedBrokers(r.brokers...))
	require.NoError(t, err)
	defer client.Close()
	committed := func() kafka.GroupOffset {
		offsets, err := kafka.GroupOffsets(background, client, r.group, map[string][]int32{r.topic: {0}})
		require.NoError(t, err)
		return offsets[kafka.Partition{Topic: r.topic}]
	}
	before := committed()
	require.NotEmpty(t, before.Metadata)
	first := int64(0)
	_, err = r.rewind(outboxops.RewindConfig{Offset: &first, Topics: []string{r.topic}})
	require.NoError(t, err)
	require.Equal(t, kafka.GroupOffset{At: 0, Metadata: before.Metadata}, committed())
}

// Events older than the oldest note may have been handled, but retention has removed their notes. They are
// repeated, and the dry run says how many.
func TestRewindBehindNotes(t *testing.T) {
	t.Parallel()
	r := newRewindFixture(t)
	r.put(t, 0, 4)
	stop := r.run(t)
	r.requireEffects(t, 4)
	_, err := r.db.Exec(background, r.sql(`DELETE FROM {schema}.event_handled`))
	require.NoError(t, err)
	r.put(t, 0, 3)
	r.requireEffects(t, 7)
	stop()
	report, err := r.rewind(outboxops.RewindConfig{Time: time.Now().Add(-time.Hour), DryRun: true})
	require.NoError(t, err)
	require.Equal(t, []int{7, 3, 0, 4}, []int{report.Records, report.Noted, report.Unnoted(), report.Older})
	require.WithinDuration(t, time.Now(), report.OldestNote, time.Minute)
}

func TestRewindConfig(t *testing.T) {
	t.Parallel()
	offset, negative := int64(1), int64(-1)
	for want, cfg := range map[string]outboxops.RewindConfig{
		"field Group is empty":                            {Time: time.Now()},
		"fields Time and Offset: one of them must be set": {Group: "g"},
		"field Offset: needs one topic":                   {Group: "g", Offset: &offset},
		"field Offset is -1: must not be negative":        {Group: "g", Offset: &negative, Topics: []string{"t"}},
		"field Topics: ":                                  {Group: "g", Time: time.Now(), Topics: []string{"a b"}},
	} {
		_, err := outboxops.Rewind(background, nil, nil, cfg)
		require.ErrorContains(t, err, want)
	}
	brokers := testenv.Brokers(t)
	_, err := outboxops.Rewind(background, nil, []kgo.Opt{kgo.SeedBrokers(brokers...)}, outboxops.RewindConfig{Group: "nobody-" + uuid.NewString(), Time: time.Now()})
	require.ErrorIs(t, err, outboxops.ErrNotFound)
}
