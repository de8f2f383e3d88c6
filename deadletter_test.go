package outbox_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// morgue is a topic, the topic of its dead letters, and a client.
type morgue struct {
	topic, dlq string
	kafka      []kgo.Opt
	client     *kgo.Client
}

func newMorgue(t testing.TB, partitions int32) *morgue {
	t.Helper()
	brokers := testenv.RealBrokers(t)
	m := &morgue{topic: "dead-" + uuid.NewString(), kafka: []kgo.Opt{kgo.SeedBrokers(brokers...), kgo.MetadataMinAge(50 * time.Millisecond)}}
	m.dlq = outbox.DeadLetterTopic(m.topic)
	makeTopic(t, brokers, m.topic, 1, map[string]string{"max.message.bytes": "10000"})
	makeTopic(t, brokers, m.dlq, partitions, nil)
	var err error
	m.client, err = kgo.NewClient(append(m.kafka, kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	t.Cleanup(m.client.Close)
	return m
}

// someTime is when the records of these tests failed.
var someTime = time.Date(2026, 2, 3, 4, 5, 6, 789e6, time.UTC)

// letter returns the dead letter of a record.
func (m *morgue) letter(key, value string, headers ...string) *kgo.Record {
	r := &kgo.Record{Topic: m.dlq, Key: []byte(key), Value: []byte(value)}
	add := func(name, value string) {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	add("ce_id", "e-"+key)
	add(outbox.DeadLetterOriginalTopic, m.topic)
	add(outbox.DeadLetterOriginalPartition, "0")
	add(outbox.DeadLetterOriginalOffset, "17")
	add(outbox.DeadLetterOriginalTimestamp, "2026-02-03T04:05:06.789Z")
	add(outbox.DeadLetterGroup, "statistics")
	add(outbox.DeadLetterAction, "COUNT")
	add(outbox.DeadLetterError, "boom")
	add(outbox.DeadLetterClass, "handler")
	add(outbox.DeadLetterAttempts, "4")
	add(outbox.DeadLetterFailedAt, "2026-02-03T04:05:06.789Z")
	for i := 0; i < len(headers); i += 2 {
		add(headers[i], headers[i+1])
	}
	return r
}

func (m *morgue) produce(t testing.TB, records ...*kgo.Record) {
	t.Helper()
	require.NoError(t, m.client.ProduceSync(background, records...).FirstErr())
}

// keys are those of dead letters, with errors in their places.
func keys(t testing.TB, kafka []kgo.Opt, topic string, from map[int32]int64) (all []string) {
	t.Helper()
	for d, err := range outbox.DeadLetters(background, kafka, topic, from) {
		if d.Record == nil {
			require.NoError(t, err)
		}
		all = append(all, cmp.Or(string(d.Record.Key), "?"))
	}
	return all
}

// records returns all records of a topic.
func (m *morgue) records(t testing.TB, topic string) (all []*kgo.Record) {
	t.Helper()
	for d, err := range outbox.DeadLetters(background, m.kafka, topic, nil) {
		require.NotNil(t, d.Record, "%v", err)
		all = append(all, d.Record)
	}
	return all
}

func allHeaders(r *kgo.Record) map[string]string {
	all := map[string]string{}
	for _, h := range r.Headers {
		if _, again := all[h.Key]; again {
			all[h.Key] += ", "
		}
		all[h.Key] += string(h.Value)
	}
	return all
}

func TestDecodeDeadLetter(t *testing.T) {
	m := &morgue{topic: "orders", dlq: "orders.dlq"}
	r := m.letter("a", "v", outbox.DeadLetterValueOmitted, "1234", outbox.DeadLetterError, "bang", outbox.ReplayOf, "first-0-1")
	got, err := outbox.DecodeDeadLetter(r)
	require.NoError(t, err)
	require.Equal(t, outbox.DeadLetter{
		OriginalTopic: "orders", OriginalOffset: 17, OriginalTimestamp: someTime, ReplayOf: "first-0-1", Group: "statistics", Action: "COUNT",
		Error: "bang", Class: "handler", Attempts: 4, FailedAt: someTime, ValueOmitted: 1234, Record: r,
	}, got, "of two headers the last")
	r.Headers = slices.DeleteFunc(r.Headers, func(h kgo.RecordHeader) bool {
		return !slices.Contains([]string{outbox.DeadLetterOriginalTopic, outbox.DeadLetterOriginalPartition, outbox.DeadLetterOriginalOffset, outbox.DeadLetterGroup}, h.Key)
	})
	got, err = outbox.DecodeDeadLetter(r)
	require.NoError(t, err)
	require.Equal(t, outbox.DeadLetter{OriginalTopic: "orders", OriginalOffset: 17, Group: "statistics", Record: r}, got)
}

var badDeadLetters = []struct {
	header, value string
	want          error
}{
	{outbox.DeadLetterOriginalTopic, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalTopic, "a b", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalPartition, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalPartition, "-1", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalPartition, "2147483648", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalOffset, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalOffset, "x", outbox.ErrMalformed},
	{outbox.DeadLetterOriginalOffset, "9223372036854775808", outbox.ErrMalformed},
	{outbox.DeadLetterGroup, "", outbox.ErrEmpty},
	{outbox.DeadLetterOriginalTimestamp, "today", outbox.ErrTime},
	{outbox.DeadLetterFailedAt, "", outbox.ErrTime},
	{outbox.DeadLetterAttempts, "many", outbox.ErrMalformed},
	{outbox.DeadLetterValueOmitted, "-5", outbox.ErrMalformed},
}

func TestBadDeadLetter(t *testing.T) {
	m := &morgue{topic: "orders", dlq: "orders.dlq"}
	for _, tt := range badDeadLetters {
		t.Run(tt.header+"="+tt.value, func(t *testing.T) {
			r := m.letter("a", "v", tt.header, tt.value)
			got, err := outbox.DecodeDeadLetter(r)
			requireRefused(t, err, tt.want, refusal{"", -1, tt.header})
			require.Equal(t, outbox.DeadLetter{Record: r}, got)
		})
	}
	_, err := outbox.DecodeDeadLetter(&kgo.Record{})
	requireRefused(t, err, outbox.ErrEmpty, refusal{"", -1, outbox.DeadLetterOriginalTopic})
}

// Reading goes to the end as it was when it began, partition by partition.
func TestDeadLetters(t *testing.T) {
	m := newMorgue(t, 3)
	require.Empty(t, keys(t, m.kafka, m.dlq, nil))
	var want []string
	for p := range int32(3) {
		for n := range 500 {
			r := m.letter(fmt.Sprintf("%d-%d", p, n), random(3000))
			r.Partition = p
			m.client.Produce(background, r, nil)
			want = append(want, string(r.Key))
		}
	}
	require.NoError(t, m.client.Flush(background))
	require.Equal(t, want, keys(t, m.kafka, m.dlq, nil))
	require.Equal(t, slices.Concat(want[300:500], want[500:1000], want[1499:]), keys(t, m.kafka, m.dlq, map[int32]int64{0: 300, 2: 499}))
	require.Equal(t, want[1000:], keys(t, m.kafka, m.dlq, map[int32]int64{0: 500, 1: 1_000_000}), "nothing is behind the end")
	old := slices.Concat(m.kafka, []kgo.Opt{kgo.MaxVersions(kversion.V2_8_0())}) // which knows no ids of topics
	require.Equal(t, want, keys(t, old, m.dlq, nil))

	n := 0
	for _, err := range outbox.DeadLetters(background, m.kafka, m.dlq, nil) {
		require.NoError(t, err)
		if n++; n == 1 {
			m.produce(t, m.letter("late", "v"))
		}
	}
	require.Equal(t, 1500, n)
	for range outbox.DeadLetters(background, m.kafka, m.dlq, nil) {
		n++
		break
	}
	require.Equal(t, 1501, n)
}

// What is no dead letter is told and passed over.
func TestDeadLettersAmongOthers(t *testing.T) {
	m := newMorgue(t, 1)
	m.produce(t, m.letter("a", "v"), &kgo.Record{Topic: m.dlq, Key: []byte("other")}, m.letter("b", "v"))
	var got []string
	for d, err := range outbox.DeadLetters(background, m.kafka, m.dlq, nil) {
		got = append(got, string(d.Record.Key))
		require.Equal(t, string(d.Record.Key) == "other", err != nil, "%v", err)
		if err != nil {
			requireRefused(t, err, outbox.ErrEmpty, refusal{"", -1, outbox.DeadLetterOriginalTopic})
		}
	}
	require.Equal(t, []string{"a", "other", "b"}, got)
}

// Aborted and open transactions are not there, and do not keep the reader waiting,
// wherever they stand.
func TestDeadLettersOfTransactions(t *testing.T) {
	m := newMorgue(t, 1)
	transaction := func(key string) (end func(kgo.TransactionEndTry)) {
		return m.transaction(t, m.letter(key, "v"), m.letter(key, "v"))
	}
	requireReadable := func(want ...string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(background, testenv.Patience)
		defer cancel()
		require.Eventually(t, func() bool { // markers are written after the transaction has ended
			var got []string
			for d, err := range outbox.DeadLetters(ctx, m.kafka, m.dlq, nil) {
				require.NoError(t, err)
				got = append(got, string(d.Record.Key))
			}
			return slices.Equal(want, got)
		}, testenv.Patience, 10*time.Millisecond)
	}
	transaction("aborted")(kgo.TryAbort)
	requireReadable()
	transaction("committed")(kgo.TryCommit)
	requireReadable("committed", "committed")
	// The marker of this one comes after an open transaction has begun, so that an
	// aborted record is the last before what nobody may read yet.
	abort := transaction("aborted")
	commit := transaction("open")
	abort(kgo.TryAbort)
	requireReadable("committed", "committed")
	m.awaitStable(t, m.dlq, 8)
	requireReadable("committed", "committed")
	commit(kgo.TryCommit)
	requireReadable("committed", "committed", "open", "open")
}

// transaction produces records in a transaction that remains to be ended.
func (m *morgue) transaction(t testing.TB, records ...*kgo.Record) (end func(kgo.TransactionEndTry)) {
	t.Helper()
	client, err := kgo.NewClient(append(m.kafka, kgo.TransactionalID(uuid.NewString()))...)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	require.NoError(t, client.BeginTransaction())
	require.NoError(t, client.ProduceSync(background, records...).FirstErr())
	return func(how kgo.TransactionEndTry) { require.NoError(t, client.EndTransaction(background, how)) }
}

// awaitStable waits until a topic can be read up to an offset.
func (m *morgue) awaitStable(t testing.TB, topic string, offset int64) {
	t.Helper()
	require.Eventually(t, func() bool {
		request := kmsg.NewPtrListOffsetsRequest()
		request.ReplicaID, request.IsolationLevel = -1, 1
		request.Topics = []kmsg.ListOffsetsRequestTopic{{Topic: topic, Partitions: []kmsg.ListOffsetsRequestTopicPartition{{Timestamp: -1, CurrentLeaderEpoch: -1}}}}
		response, err := request.RequestWith(background, m.client)
		require.NoError(t, err)
		return response.Topics[0].Partitions[0].Offset == offset
	}, testenv.Patience, 10*time.Millisecond)
}

func TestDeadLettersOfNoTopic(t *testing.T) {
	m := newMorgue(t, 1)
	for name, tt := range map[string]struct {
		kafka []kgo.Opt
		topic string
		from  map[int32]int64
		want  string
	}{
		"a missing topic":     {m.kafka, m.topic + ".no", nil, "UNKNOWN_TOPIC_OR_PARTITION"},
		"a missing partition": {m.kafka, m.dlq, map[int32]int64{7: 0}, "partition " + m.dlq + "/7 to begin with: UNKNOWN_TOPIC_OR_PARTITION"},
		"a negative offset":   {m.kafka, m.dlq, map[int32]int64{0: -1}, "offset -1 of partition 0 to begin with: must not be negative"},
		"a group":             {append(m.kafka, kgo.ConsumerGroup("g")), m.dlq, nil, "kafka option ConsumerGroup"},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			for d, err := range outbox.DeadLetters(background, tt.kafka, tt.topic, tt.from) {
				n++
				require.Nil(t, d.Record)
				require.ErrorContains(t, err, tt.want)
				require.ErrorContains(t, err, "outbox: dead letters of "+tt.topic)
			}
			require.Equal(t, 1, n)
		})
	}
	ctx, cancel := context.WithCancel(background)
	cancel()
	for _, err := range outbox.DeadLetters(ctx, m.kafka, m.dlq, nil) {
		require.ErrorIs(t, err, context.Canceled)
	}
}

// A replayed record is the original, with the names of those for whom it is.
func TestReplay(t *testing.T) {
	m := newMorgue(t, 1)
	noAction := m.letter("c", "v3")
	noAction.Headers = slices.DeleteFunc(noAction.Headers, func(h kgo.RecordHeader) bool { return h.Key == outbox.DeadLetterAction })
	empty, none := m.letter("d", ""), m.letter("e", "")
	empty.Value, none.Value, none.Key = []byte{}, nil, nil
	again := m.letter("f", "v6", outbox.ReplayOf, "elsewhere-0-1", outbox.ReplayGroup, "old", outbox.ReplayAction, "OLD")
	m.produce(t, m.letter("a", "v1"), m.letter("b", "v2"), noAction, empty, none, again)

	var told []string
	report, err := outbox.ReplayDeadLetters(background, m.kafka, outbox.ReplayConfig{
		Topic:  m.dlq,
		Choose: func(d outbox.DeadLetter) bool { return string(d.Record.Key) != "b" },
		Progress: func(d outbox.DeadLetter, err error) {
			require.NoError(t, err)
			told = append(told, string(d.Record.Key))
		},
	})
	require.NoError(t, err)
	require.Equal(t, outbox.ReplayReport{Read: 6, Sent: 5, Next: map[int32]int64{0: 6}}, report)
	require.Equal(t, []string{"a", "c", "d", "", "f"}, told)

	sent := m.records(t, m.topic)
	require.Len(t, sent, 5)
	for i, want := range []*kgo.Record{m.letter("a", "v1"), noAction, empty, none, again} {
		require.Equal(t, want.Key, sent[i].Key)
		require.Equal(t, want.Value, sent[i].Value, "and nil is nil")
		require.WithinDuration(t, time.Now(), sent[i].Timestamp, testenv.Patience, "an old one might be deleted at once")
	}
	back := map[string]string{"ce_id": "e-a", outbox.ReplayOf: m.topic + "-0-17", outbox.ReplayGroup: "statistics", outbox.ReplayAction: "COUNT"}
	require.Equal(t, back, allHeaders(sent[0]))
	delete(back, outbox.ReplayAction)
	back["ce_id"] = "e-c"
	require.Equal(t, back, allHeaders(sent[1]))
	require.Equal(t, map[string]string{"ce_id": "e-f", outbox.ReplayOf: "elsewhere-0-1", outbox.ReplayGroup: "statistics", outbox.ReplayAction: "COUNT"},
		allHeaders(sent[4]), "where it was first, and for whom it is now")
	require.Len(t, m.records(t, m.dlq), 6, "they stay")
}

func TestReplayDryRun(t *testing.T) {
	m := newMorgue(t, 1)
	m.produce(t, m.letter("a", "v"), &kgo.Record{Topic: m.dlq}, m.letter("b", "", outbox.DeadLetterValueOmitted, "5"), m.letter("c", "v"))
	told := map[string]error{}
	report, err := outbox.ReplayDeadLetters(background, m.kafka, outbox.ReplayConfig{
		Topic: m.dlq, DryRun: true, From: map[int32]int64{0: 1},
		Progress: func(d outbox.DeadLetter, err error) { told[string(d.Record.Key)] = err },
	})
	require.NoError(t, err)
	require.Equal(t, 3, report.Read)
	require.Equal(t, 1, report.Sent)
	require.Equal(t, map[int32]int64{0: 4}, report.Next)
	require.Len(t, report.Failed, 2)
	require.Equal(t, int64(1), report.Failed[0].Offset)
	requireRefused(t, report.Failed[0].Err, outbox.ErrEmpty, refusal{"", -1, outbox.DeadLetterOriginalTopic})
	require.Equal(t, outbox.ReplayFailure{Offset: 2, Err: outbox.ErrOriginalGone}, report.Failed[1])
	require.Empty(t, m.records(t, m.topic))
	require.Equal(t, map[string]error{"": report.Failed[0].Err, "b": outbox.ErrOriginalGone, "c": nil}, told)
}

// A value that the dead letter does not have comes from the original, if that is
// still the one it was.
func TestReplayOfOmittedValue(t *testing.T) {
	m := newMorgue(t, 1)
	original := func(key, value string) *kgo.Record {
		return &kgo.Record{Topic: m.topic, Key: []byte(key), Value: []byte(value), Timestamp: someTime}
	}
	m.produce(t, original("a", "deleted"), original("b", "value b"), original("c", "value c"), original("d", "value d"))
	m.deleteBefore(t, 1)
	m.transaction(t, original("e", "value e"))(kgo.TryAbort)
	m.produce(t, original("e", "value e"))
	m.awaitStable(t, m.topic, 7)
	omitted := func(key string, size, offset int, timestamp string) *kgo.Record {
		return m.letter(key, "", outbox.DeadLetterValueOmitted, strconv.Itoa(size), outbox.DeadLetterOriginalOffset, strconv.Itoa(offset),
			outbox.DeadLetterOriginalTimestamp, timestamp)
	}
	const then = "2026-02-03T04:05:06.789Z"
	elsewhere := omitted("b", 7, 1, then)
	elsewhere.Headers = append(elsewhere.Headers, kgo.RecordHeader{Key: outbox.DeadLetterOriginalPartition, Value: []byte("5")})
	nowhere := omitted("b", 7, 1, then)
	nowhere.Headers = append(nowhere.Headers, kgo.RecordHeader{Key: outbox.DeadLetterOriginalTopic, Value: []byte(m.topic + ".gone")})
	m.produce(t,
		omitted("b", 7, 0, then),                       // deleted
		omitted("b", 7, 1, then),                       // there
		omitted("x", 7, 2, then),                       // another key
		omitted("c", 8, 2, then),                       // another size
		omitted("c", 7, 2, "2026-02-03T04:05:06.788Z"), // another time
		omitted("e", 7, 4, then),                       // aborted
		omitted("e", 7, 7, then),                       // at the end
		omitted("e", 7, 40, then),                      // behind it
		elsewhere, nowhere,
		m.letter("e", "its own", outbox.DeadLetterValueOmitted, "0"),
		omitted("d", 7, 3, then), // there
	)
	report, err := outbox.ReplayDeadLetters(background, m.kafka, outbox.ReplayConfig{Topic: m.dlq})
	require.NoError(t, err)
	require.Equal(t, 3, report.Sent)
	var gone []int64
	for _, f := range report.Failed {
		require.ErrorIs(t, f.Err, outbox.ErrOriginalGone)
		gone = append(gone, f.Offset)
	}
	require.Equal(t, []int64{0, 2, 3, 4, 5, 6, 7, 8, 9}, gone)
	sent := m.records(t, m.topic)[4:]
	require.Equal(t, "value b", string(sent[0].Value))
	require.Equal(t, "its own", string(sent[1].Value))
	require.Equal(t, "value d", string(sent[2].Value))
	require.Equal(t, map[string]string{"ce_id": "e-d", outbox.ReplayOf: m.topic + "-0-3", outbox.ReplayGroup: "statistics", outbox.ReplayAction: "COUNT"}, allHeaders(sent[2]))
}

// deleteBefore deletes the records of the topic up to an offset.
func (m *morgue) deleteBefore(t testing.TB, offset int64) {
	t.Helper()
	request := kmsg.NewPtrDeleteRecordsRequest()
	request.Topics = []kmsg.DeleteRecordsRequestTopic{{Topic: m.topic, Partitions: []kmsg.DeleteRecordsRequestTopicPartition{{Offset: offset}}}}
	response, err := request.RequestWith(background, m.client)
	require.NoError(t, err)
	require.Zero(t, response.Topics[0].Partitions[0].ErrorCode)
}

// What the topic does not take any more is reported, and does not condemn what shares
// a request with it.
func TestReplayOfRefused(t *testing.T) {
	m := newMorgue(t, 1)
	var want []string
	for n := range 20 {
		value := "v"
		if n%7 == 3 {
			value = random(20_000) // over the topic's limit, within the client's
		} else {
			want = append(want, strconv.Itoa(n))
		}
		m.produce(t, m.letter(strconv.Itoa(n), value))
	}
	report, err := outbox.ReplayDeadLetters(background, m.kafka, outbox.ReplayConfig{Topic: m.dlq})
	require.NoError(t, err)
	require.Equal(t, 20, report.Read)
	require.Equal(t, 17, report.Sent)
	for i, f := range report.Failed {
		require.Equal(t, int64(3+7*i), f.Offset)
		require.ErrorIs(t, f.Err, kerr.MessageTooLarge)
	}
	var got []string
	for _, r := range m.records(t, m.topic) {
		got = append(got, string(r.Key))
	}
	require.ElementsMatch(t, want, got, "each once")
}

// A run that is stopped says how far it came, and another one sends the rest.
func TestReplayGoesOn(t *testing.T) {
	m := newMorgue(t, 2)
	var want []string
	for n := range 400 {
		r := m.letter(strconv.Itoa(n), random(8000))
		r.Partition = int32(n % 2)
		m.client.Produce(background, r, nil)
		want = append(want, string(r.Key))
	}
	require.NoError(t, m.client.Flush(background))
	ctx, cancel := context.WithCancel(background)
	report, err := outbox.ReplayDeadLetters(ctx, m.kafka, outbox.ReplayConfig{Topic: m.dlq, Choose: func(outbox.DeadLetter) bool {
		cancel()
		return true
	}})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "outbox: replay of "+m.dlq)
	require.Positive(t, report.Sent)
	require.Less(t, report.Sent, 200)
	require.Equal(t, report.Sent, report.Read)
	require.Len(t, m.records(t, m.topic), report.Sent, "what was in flight is acknowledged")
	require.Equal(t, map[int32]int64{0: int64(report.Sent), 1: 0}, report.Next)

	late := func(d outbox.DeadLetter, _ error) {
		if string(d.Record.Key) == want[1] { // the first of the last partition, which is about to be read
			m.produce(t, &kgo.Record{Topic: m.dlq, Partition: 1, Key: []byte("late")})
		}
	}
	rest, err := outbox.ReplayDeadLetters(background, m.kafka, outbox.ReplayConfig{Topic: m.dlq, Choose: report.Left, From: report.Next, Progress: late})
	require.NoError(t, err)
	require.Equal(t, map[int32]int64{0: 200, 1: 200}, rest.Next, "as far as it was at the start")
	require.Equal(t, 400, report.Sent+rest.Sent)
	var got []string
	for _, r := range m.records(t, m.topic) {
		got = append(got, string(r.Key))
	}
	require.ElementsMatch(t, want, got, "each once")
	require.False(t, rest.Left(outbox.DeadLetter{Record: &kgo.Record{Partition: 1, Offset: 199}}))
	require.True(t, rest.Left(outbox.DeadLetter{Record: &kgo.Record{Partition: 1, Offset: 200}}))
	none, err := outbox.ReplayDeadLetters(background, m.kafka, outbox.ReplayConfig{Topic: m.dlq, From: map[int32]int64{0: 1_000_000, 1: 201}})
	require.NoError(t, err)
	require.Equal(t, outbox.ReplayReport{Next: map[int32]int64{0: 200, 1: 201}}, none)
}

// ward is a till whose groups a and b do what their handlers say, but that the action
// FAILS of group a fails while it is ill, and that a cannot read anything while blind.
type ward struct {
	*till
	ill, blind atomic.Bool

	mu      sync.Mutex
	repeats map[string]int // by group and action
}

func newWard(t testing.TB, createTopics func(*house)) *ward {
	t.Helper()
	testenv.RealBrokers(t)
	w := &ward{repeats: map[string]int{}}
	if createTopics == nil {
		w.till = newTill(t, 1)
	} else {
		w.till = newTillOn(t, createTopics)
	}
	w.start(t, "a", "FAILS", "WORKS")
	w.start(t, "b", "FAILS")
	return w
}

func (w *ward) start(t testing.TB, group string, actions ...string) {
	t.Helper()
	var handlers []outbox.Handler
	for _, action := range actions {
		handlers = append(handlers, outbox.Handle(action, func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
			if group == "a" && action == "FAILS" && w.ill.Load() {
				return outbox.Permanent(errors.New("ill"))
			}
			return w.count(ctx, tx, sale{Product: group + " " + action, Amount: e.Amount}, m)
		}))
	}
	plain := outbox.PlainRecords{Type: saleType}
	cfg := outbox.ConsumerConfig{
		Group: group + "-" + w.topic, FromStart: true,
		Decode: func(r *kgo.Record) (*outbox.Message, error) {
			if group == "a" && w.blind.Load() {
				return nil, errors.New("blind")
			}
			return plain.Decode(r)
		},
		Hooks: outbox.ConsumerHooks{Repeated: func(_ outbox.Metadata, action string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.repeats[group+" "+action]++
		}},
	}
	testenv.Run(t, w.consumer(t, cfg, handlers...).Run)
}

// replay sends n dead letters back.
func (w *ward) replay(t testing.TB, n int, choose func(outbox.DeadLetter) bool) {
	t.Helper()
	report, err := outbox.ReplayDeadLetters(background, []kgo.Opt{kgo.SeedBrokers(w.brokers...)},
		outbox.ReplayConfig{Topic: outbox.DeadLetterTopic(w.topic), Choose: choose})
	require.NoError(t, err)
	require.Empty(t, report.Failed)
	require.Equal(t, n, report.Sent)
}

// requireCounts requires what each action has counted, and which were asked to do it
// again, once all have come to where the topic ends now.
func (w *ward) requireCounts(t testing.TB, counts, repeats map[string]int) {
	t.Helper()
	const mark = 1_000_000
	before := w.counts(t)
	w.send(t, w.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": %d}`, mark)))
	require.Eventually(t, func() bool {
		now := w.counts(t)
		for _, name := range []string{"a FAILS", "a WORKS", "b FAILS"} {
			if now[name]/mark == before[name]/mark {
				return false
			}
		}
		return true
	}, testenv.Patience, 10*time.Millisecond)
	now := w.counts(t)
	for name, n := range now {
		now[name] = n % mark
	}
	require.Equal(t, counts, now)
	w.mu.Lock()
	defer w.mu.Unlock()
	require.Equal(t, repeats, w.repeats)
}

// What a consumer gave up and somebody sends back is handled by the group and the
// action that failed, by no other, and once, however often it is sent.
func TestReplayToConsumer(t *testing.T) {
	w := newWard(t, nil)
	w.ill.Store(true)
	for _, amount := range []int{1, 2, 4, 8, 16} {
		w.send(t, w.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": %d}`, amount)))
	}
	w.letters(t, 5)
	w.ill.Store(false)
	w.requireCounts(t, map[string]int{"a FAILS": 0, "a WORKS": 31, "b FAILS": 31}, map[string]int{})
	w.replay(t, 3, func(d outbox.DeadLetter) bool { return d.Action == "FAILS" && d.Record.Offset < 3 })
	w.requireCounts(t, map[string]int{"a FAILS": 7, "a WORKS": 31, "b FAILS": 31}, map[string]int{})
	w.replay(t, 5, nil)
	w.requireCounts(t, map[string]int{"a FAILS": 31, "a WORKS": 31, "b FAILS": 31}, map[string]int{"a FAILS": 3})
	w.replay(t, 5, nil)
	w.requireCounts(t, map[string]int{"a FAILS": 31, "a WORKS": 31, "b FAILS": 31}, map[string]int{"a FAILS": 8})
}

// What fails again is a dead letter again, which says where it was now and where it
// was first; and both count once.
func TestReplayFailsAgain(t *testing.T) {
	w := newWard(t, nil)
	w.ill.Store(true)
	id := uuid.NewString()
	w.send(t, w.saleRecord(uuid.NewString(), []byte(`{"amount": 1}`)), w.saleRecord(id, []byte(`{"amount": 2}`)))
	w.letters(t, 2)
	w.replay(t, 1, func(d outbox.DeadLetter) bool { return d.OriginalOffset == 1 })
	again := w.letters(t, 3)[2]
	d, err := outbox.DecodeDeadLetter(again)
	require.NoError(t, err)
	require.Equal(t, outbox.DeadLetter{
		OriginalTopic: w.topic, OriginalOffset: 2, OriginalTimestamp: d.OriginalTimestamp, ReplayOf: w.topic + "-0-1",
		Group: "a-" + w.topic, Action: "FAILS", Error: "ill", Class: d.Class, Attempts: 1, FailedAt: d.FailedAt, Record: again,
	}, d)
	require.Equal(t, id, allHeaders(again)["ce_id"])
	require.NotContains(t, allHeaders(again), outbox.ReplayGroup)
	w.replay(t, 1, func(d outbox.DeadLetter) bool { return d.Record.Offset == 2 })
	fourth, err := outbox.DecodeDeadLetter(w.letters(t, 4)[3])
	require.NoError(t, err)
	require.Equal(t, []any{int64(3), w.topic + "-0-1"}, []any{fourth.OriginalOffset, fourth.ReplayOf}, "the first place, not the last")
	w.ill.Store(false)
	w.replay(t, 4, nil)
	w.requireCounts(t, map[string]int{"a FAILS": 3, "a WORKS": 3, "b FAILS": 3}, map[string]int{"a FAILS": 2})
}

// A record without an id that nobody could read goes to all actions of the group, and
// is still the same when it comes again.
func TestReplayOfUnreadable(t *testing.T) {
	w := newWard(t, nil)
	w.blind.Store(true)
	w.send(t, &kgo.Record{Topic: w.topic, Value: []byte(`{"amount": 5}`)})
	letter := allHeaders(w.letters(t, 1)[0])
	require.Equal(t, "undecodable", letter[outbox.DeadLetterClass])
	w.replay(t, 1, nil)
	w.letters(t, 2) // still blind
	w.blind.Store(false)
	w.replay(t, 2, nil)
	w.replay(t, 1, func(d outbox.DeadLetter) bool { return d.Record.Offset == 0 })
	w.requireCounts(t, map[string]int{"a FAILS": 5, "a WORKS": 5, "b FAILS": 5}, map[string]int{"a FAILS": 2, "a WORKS": 2})
}

// A record too large for its dead-letter topic is there without its value, and goes
// back with it.
func TestReplayOfHugeRecord(t *testing.T) {
	w := newWard(t, func(h *house) {
		testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "20000000")
		testenv.CreateTopic(t, h.brokers, h.topic+".dlq", 1)
	})
	w.ill.Store(true)
	w.send(t, w.saleRecord(uuid.NewString(), fmt.Appendf(nil, `{"amount": 6, "more": %q}`, random(3_000_000))))
	require.Empty(t, w.letters(t, 1)[0].Value)
	w.ill.Store(false)
	for range 2 {
		w.replay(t, 1, nil)
	}
	w.requireCounts(t, map[string]int{"a FAILS": 6, "a WORKS": 6, "b FAILS": 6}, map[string]int{"a FAILS": 1})
}

func TestReplayConfig(t *testing.T) {
	nowhere := []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1"), kgo.RequestRetries(0)}
	for name, tt := range map[string]struct {
		cfg   outbox.ReplayConfig
		kafka []kgo.Opt
		want  string
	}{
		"no topic":            {outbox.ReplayConfig{}, nowhere, "outbox: replay config: field Topic is empty"},
		"a topic of no name":  {outbox.ReplayConfig{Topic: "a b"}, nowhere, `outbox: replay config: field Topic "a b" is malformed`},
		"a negative offset":   {outbox.ReplayConfig{Topic: "a", From: map[int32]int64{0: -1}}, nowhere, "field From: offset -1 of partition 0"},
		"no idempotence":      {outbox.ReplayConfig{Topic: "a"}, append(nowhere, kgo.DisableIdempotentWrite()), "kafka option DisableIdempotentWrite"},
		"no broker":           {outbox.ReplayConfig{Topic: "a"}, nowhere, "outbox: replay of a: "},
		"no broker, and more": {outbox.ReplayConfig{Topic: "a", DryRun: true}, nowhere, "outbox: replay of a: "},
	} {
		t.Run(name, func(t *testing.T) {
			report, err := outbox.ReplayDeadLetters(background, tt.kafka, tt.cfg)
			require.ErrorContains(t, err, tt.want)
			require.Empty(t, report)
		})
	}
	_, err := outbox.ReplayDeadLetters(background, append(nowhere, kgo.ConsumerGroup("g")), outbox.ReplayConfig{From: map[int32]int64{-1: 0}})
	for _, want := range []string{"field Topic", "field From", "kafka option ConsumerGroup"} {
		require.ErrorContains(t, err, want)
	}
}
