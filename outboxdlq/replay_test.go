package outboxdlq_test

import (
	"context"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxops"
)

// A record that is sent back is the original with headers that name its group and action.
func TestReplay(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	noAction := f.deadLetter("c", "v3")
	noAction.Headers = slices.DeleteFunc(noAction.Headers, func(h kgo.RecordHeader) bool { return h.Key == outbox.DeadLetterAction })
	empty, none := f.deadLetter("d", ""), f.deadLetter("e", "")
	empty.Value, none.Value, none.Key = []byte{}, nil, nil
	again := f.deadLetter("f", "v6", outbox.ReplayOf, "elsewhere-0-1", outbox.ReplayGroup, "old", outbox.ReplayAction, "OLD")
	f.produce(t, f.deadLetter("a", "v1"), f.deadLetter("b", "v2"), noAction, empty, none, again)

	var reported []string
	report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{
		Topic:  f.dlq,
		Choose: func(d outboxdlq.DeadLetter) bool { return string(d.Record.Key) != "b" },
		Progress: func(d outboxdlq.DeadLetter, err error) {
			require.NoError(t, err)
			reported = append(reported, string(d.Record.Key))
		},
	})
	require.NoError(t, err)
	require.Equal(t, outboxdlq.ReplayReport{Read: 6, Sent: 5, Absent: []string{"statistics"}, Next: map[int32]int64{0: 6}}, report)
	require.Equal(t, []string{"a", "c", "d", "", "f"}, reported)

	sent := f.records(t, f.topic)
	require.Len(t, sent, 5)
	for i, want := range []*kgo.Record{f.deadLetter("a", "v1"), noAction, empty, none, again} {
		require.Equal(t, want.Key, sent[i].Key)
		require.Equal(t, want.Value, sent[i].Value, "nil stays nil")
		require.WithinDuration(t, time.Now(), sent[i].Timestamp, testenv.Patience, "an old one might be deleted at once")
	}
	back := map[string]string{"ce_id": "e-a", outbox.ReplayOf: f.topic + "-0-17", outbox.ReplayFrom: f.dlq + "-0-0", outbox.ReplayGroup: "statistics", outbox.ReplayAction: "COUNT"}
	require.Equal(t, back, allHeaders(sent[0]))
	delete(back, outbox.ReplayAction)
	back["ce_id"], back[outbox.ReplayFrom] = "e-c", f.dlq+"-0-2"
	require.Equal(t, back, allHeaders(sent[1]))
	require.Equal(t, map[string]string{"ce_id": "e-f", outbox.ReplayOf: "elsewhere-0-1", outbox.ReplayFrom: f.dlq + "-0-5", outbox.ReplayGroup: "statistics",
		outbox.ReplayAction: "COUNT"},
		allHeaders(sent[4]), "where it was first, and which action it is for now")
	require.Len(t, f.records(t, f.dlq), 6, "they stay")
}

func TestReplayDryRun(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	f.produce(t, f.deadLetter("a", "v"), &kgo.Record{Topic: f.dlq}, f.deadLetter("b", "", outbox.DeadLetterValueOmitted, "5"), f.deadLetter("c", "v"))
	reported := map[string]error{}
	report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{
		Topic: f.dlq, DryRun: true, From: map[int32]int64{0: 1},
		Progress: func(d outboxdlq.DeadLetter, err error) { reported[string(d.Record.Key)] = err },
	})
	require.NoError(t, err)
	require.Equal(t, 3, report.Read)
	require.Equal(t, 1, report.Sent)
	require.Equal(t, map[int32]int64{0: 4}, report.Next)
	require.Len(t, report.Failed, 2)
	require.Equal(t, int64(1), report.Failed[0].Offset)
	requireFieldError(t, report.Failed[0].Err, outbox.ErrEmpty, outbox.DeadLetterOriginalTopic)
	require.Equal(t, outboxdlq.ReplayFailure{Offset: 2, Err: outboxdlq.ErrOriginalGone}, report.Failed[1])
	require.Empty(t, f.records(t, f.topic))
	require.Equal(t, map[string]error{"": report.Failed[0].Err, "b": outboxdlq.ErrOriginalGone, "c": nil}, reported)
}

// An omitted value is read from the original, if the original is still at its offset.
func TestReplayOfOmittedValue(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	original := func(key, value string) *kgo.Record {
		return &kgo.Record{Topic: f.topic, Key: []byte(key), Value: []byte(value), Timestamp: failedAt}
	}
	f.produce(t, original("a", "deleted"), original("b", "value b"), original("c", "value c"), original("d", "value d"))
	f.deleteBefore(t, 1)
	f.transaction(t, original("e", "value e"))(kgo.TryAbort)
	f.produce(t, original("e", "value e"))
	f.awaitStable(t, f.topic, 7)
	omitted := func(key string, size, offset int, timestamp string) *kgo.Record {
		return f.deadLetter(key, "", outbox.DeadLetterValueOmitted, strconv.Itoa(size), outbox.DeadLetterOriginalOffset, strconv.Itoa(offset),
			outbox.DeadLetterOriginalTimestamp, timestamp)
	}
	const then = "2026-02-03T04:05:06.789Z"
	elsewhere := omitted("b", 7, 1, then)
	elsewhere.Headers = append(elsewhere.Headers, kgo.RecordHeader{Key: outbox.DeadLetterOriginalPartition, Value: []byte("5")})
	nowhere := omitted("b", 7, 1, then)
	nowhere.Headers = append(nowhere.Headers, kgo.RecordHeader{Key: outbox.DeadLetterOriginalTopic, Value: []byte(f.topic + ".gone")})
	f.produce(t,
		omitted("b", 7, 0, then),                       // deleted
		omitted("b", 7, 1, then),                       // there
		omitted("x", 7, 2, then),                       // another key
		omitted("c", 8, 2, then),                       // another size
		omitted("c", 7, 2, "2026-02-03T04:05:06.788Z"), // another time
		omitted("e", 7, 4, then),                       // aborted
		omitted("e", 7, 7, then),                       // at the end
		omitted("e", 7, 40, then),                      // past the end
		elsewhere, nowhere,
		f.deadLetter("e", "its own", outbox.DeadLetterValueOmitted, "0"),
		omitted("d", 7, 3, then), // there
	)
	report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, To: []string{f.topic, f.topic + ".gone"}})
	require.NoError(t, err)
	require.Equal(t, 3, report.Sent)
	var gone []int64
	for _, f := range report.Failed {
		require.ErrorIs(t, f.Err, outboxdlq.ErrOriginalGone)
		gone = append(gone, f.Offset)
	}
	require.Equal(t, []int64{0, 2, 3, 4, 5, 6, 7, 8, 9}, gone)
	sent := f.records(t, f.topic)[4:]
	require.Equal(t, "value b", string(sent[0].Value))
	require.Equal(t, "its own", string(sent[1].Value))
	require.Equal(t, "value d", string(sent[2].Value))
	require.Equal(t, map[string]string{"ce_id": "e-d", outbox.ReplayOf: f.topic + "-0-3", outbox.ReplayFrom: f.dlq + "-0-11", outbox.ReplayGroup: "statistics",
		outbox.ReplayAction: "COUNT"}, allHeaders(sent[2]))
}

// The original of a dead letter may be in a batch that no client decompresses. It is reported, and the others are sent.
func TestReplayOfABomb(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	testenv.CreateTopic(t, testenv.Brokers(t), f.topic+"-bombs", 1)
	client, err := kgo.NewClient(append(f.kafka, kgo.ProducerBatchCompression(kgo.ZstdCompression()), kgo.ProducerBatchMaxBytes(90<<20))...)
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(background, &kgo.Record{Topic: f.topic + "-bombs", Key: []byte("b"), Value: make([]byte, 80<<20), Timestamp: failedAt}).FirstErr())
	bomb := f.deadLetter("b", "", outbox.DeadLetterValueOmitted, strconv.Itoa(80<<20), outbox.DeadLetterOriginalTopic, f.topic+"-bombs", outbox.DeadLetterOriginalOffset, "0")
	f.produce(t, f.deadLetter("a", "v"), bomb, f.deadLetter("c", "v"))
	for _, dryRun := range []bool{true, false} {
		report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, To: []string{f.topic, f.topic + "-bombs"}, DryRun: dryRun})
		require.NoError(t, err)
		require.Equal(t, []any{3, 2, map[int32]int64{0: 3}}, []any{report.Read, report.Sent, report.Next})
		require.Len(t, report.Failed, 1)
		require.Equal(t, int64(1), report.Failed[0].Offset)
		require.ErrorIs(t, report.Failed[0].Err, kgo.ErrMaxDecompress)
		require.ErrorContains(t, report.Failed[0].Err, "the original record cannot be read: ")
	}
	require.Len(t, f.records(t, f.topic), 2)
}

// A dead letter of a record of which nothing was read is not sent back: it would be an empty record, for every reader
// of the topic. Those of releases before the header dlq_unread have nothing at all.
func TestReplayOfUnread(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	unread := func(headers ...string) *kgo.Record {
		r := f.deadLetter("", "", append(headers, outbox.DeadLetterClass, "undecodable", outbox.DeadLetterOriginalOffset, "0")...)
		r.Key, r.Value = nil, nil
		r.Headers = slices.DeleteFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == "ce_id" })
		return r
	}
	withKey := unread("dlq_unread", "PostgreSQL cannot read it")
	withKey.Key = []byte("k")
	f.produce(t, &kgo.Record{Topic: f.topic, Key: []byte("k"), Value: []byte("original"), Timestamp: failedAt})
	f.produce(t, unread("dlq_unread", "it takes too much memory"), withKey, unread(), f.deadLetter("a", "v"))
	report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq})
	require.NoError(t, err)
	require.Equal(t, 1, report.Sent)
	require.Len(t, report.Failed, 3)
	for i, failed := range report.Failed {
		require.Equal(t, int64(i), failed.Offset)
		require.ErrorIs(t, failed.Err, outboxdlq.ErrOriginalGone)
		require.ErrorContains(t, failed.Err, "nothing of the original record")
	}
	require.ErrorContains(t, report.Failed[0].Err, "it takes too much memory")
	sent := f.records(t, f.topic)
	require.Len(t, sent, 2)
	require.Equal(t, []string{"original", "v"}, []string{string(sent[0].Value), string(sent[1].Value)})
	_, _, err = outboxdlq.Edit(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq}, 0, 0, []byte("{}"))
	require.ErrorIs(t, err, outboxdlq.ErrOriginalGone)
}

// A client that may write to a dead-letter topic must not choose the target of a replay, because a replay
// has the rights of the operator.
func TestReplayToOtherTopic(t *testing.T) {
	t.Parallel()
	f, other := newFixture(t, 1), newFixture(t, 1)
	elsewhere := f.deadLetter("b", "v2", outbox.DeadLetterOriginalTopic, other.topic)
	f.produce(t, f.deadLetter("a", "v1"), elsewhere, f.deadLetter("c", "v3"))
	report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq})
	require.NoError(t, err)
	require.Equal(t, 2, report.Sent)
	require.Len(t, report.Failed, 1)
	require.ErrorIs(t, report.Failed[0].Err, outboxdlq.ErrOtherTopic)
	require.ErrorContains(t, report.Failed[0].Err, other.topic)
	require.Empty(t, other.records(t, other.topic))
	report, err = outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, To: []string{other.topic}})
	require.NoError(t, err)
	require.Equal(t, 1, report.Sent, "on request")
	require.Len(t, other.records(t, other.topic), 1)
}

// In a compacted topic Kafka would keep a dead letter that was sent back to one group as the last record of its key.
func TestReplayToCompactedTopic(t *testing.T) {
	t.Parallel()
	f, compacted := newFixture(t, 1), "compacted-"+uuid.NewString()
	testenv.CreateTopic(t, testenv.RealBrokers(t), compacted, 1, "cleanup.policy", "compact,delete")
	f.produce(t, f.deadLetter("a", "v1"), f.deadLetter("b", "v2", outbox.DeadLetterOriginalTopic, compacted), f.deadLetter("c", "v3"))
	report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, To: []string{f.topic, compacted}})
	require.NoError(t, err)
	require.Equal(t, 2, report.Sent)
	require.Len(t, report.Failed, 1)
	require.ErrorIs(t, report.Failed[0].Err, outboxdlq.ErrCompacted)
	require.ErrorContains(t, report.Failed[0].Err, compacted)
	require.Empty(t, f.records(t, compacted))
}

// Records that the topic rejects are reported. Other records of the same request are sent.
func TestReplayOfRefused(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	var want []string
	for n := range 20 {
		value := "v"
		if n%7 == 3 {
			value = random(20_000) // exceeds the topic's limit, but not the client's
		} else {
			want = append(want, strconv.Itoa(n))
		}
		f.produce(t, f.deadLetter(strconv.Itoa(n), value))
	}
	report, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq})
	require.NoError(t, err)
	require.Equal(t, 20, report.Read)
	require.Equal(t, 17, report.Sent)
	for i, f := range report.Failed {
		require.Equal(t, int64(3+7*i), f.Offset)
		require.ErrorIs(t, f.Err, kerr.MessageTooLarge)
	}
	var got []string
	for _, r := range f.records(t, f.topic) {
		got = append(got, string(r.Key))
	}
	require.ElementsMatch(t, want, got, "each once")
}

// A run that is stopped reports its progress, and another run sends the rest.
func TestReplayGoesOn(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2)
	var want []string
	for n := range 400 {
		r := f.deadLetter(strconv.Itoa(n), random(8000))
		r.Partition = int32(n % 2)
		f.client.Produce(background, r, nil)
		want = append(want, string(r.Key))
	}
	require.NoError(t, f.client.Flush(background))
	ctx, cancel := context.WithCancel(background)
	report, err := outboxdlq.Replay(ctx, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, Choose: func(outboxdlq.DeadLetter) bool {
		cancel()
		return true
	}})
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "outbox: replay of "+f.dlq)
	require.Positive(t, report.Sent)
	require.Less(t, report.Sent, 200)
	require.Equal(t, report.Sent, report.Read)
	require.Len(t, f.records(t, f.topic), report.Sent, "what was in flight is acknowledged")
	require.Equal(t, map[int32]int64{0: int64(report.Sent), 1: 0}, report.Next)

	late := func(d outboxdlq.DeadLetter, _ error) {
		if string(d.Record.Key) == want[1] { // the first of the last partition, which is about to be read
			f.produce(t, &kgo.Record{Topic: f.dlq, Partition: 1, Key: []byte("late")})
		}
	}
	rest, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, Choose: report.Left, From: report.Next, Progress: late})
	require.NoError(t, err)
	require.Equal(t, map[int32]int64{0: 200, 1: 200}, rest.Next, "as far as it was at the start")
	require.Equal(t, 400, report.Sent+rest.Sent)
	var got []string
	for _, r := range f.records(t, f.topic) {
		got = append(got, string(r.Key))
	}
	require.ElementsMatch(t, want, got, "each once")
	require.False(t, rest.Left(outboxdlq.DeadLetter{Record: &kgo.Record{Partition: 1, Offset: 199}}))
	require.True(t, rest.Left(outboxdlq.DeadLetter{Record: &kgo.Record{Partition: 1, Offset: 200}}))
	none, err := outboxdlq.Replay(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, From: map[int32]int64{0: 1_000_000, 1: 201}})
	require.NoError(t, err)
	require.Equal(t, outboxdlq.ReplayReport{Next: map[int32]int64{0: 200, 1: 201}}, none)
}

// A run that outbox_audit stops names the first dead letter that it did not send, also if the row of an earlier group
// was written.
func TestReplayWithoutAudit(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	closed, err := pgxpool.NewWithConfig(background, db.Config())
	require.NoError(t, err)
	closed.Close()
	audit := outboxops.AuditInfo{Operator: "kim", Reason: "mended"}
	for name, tt := range map[string]struct {
		before string // makes the audit of the second group fail
		db     *pgxpool.Pool
	}{
		"no connection":         {"", closed},
		"the second is refused": {`ALTER TABLE {schema}.outbox_audit ADD CONSTRAINT only_one CHECK (consumer_group <> 'bills') NOT VALID`, db},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 1)
			f.produce(t, f.deadLetter("a", "v1"), f.deadLetter("b", "v2", outbox.DeadLetterGroup, "bills"))
			if tt.before != "" {
				_, err := db.Exec(background, pg.InSchema(tt.before, schema))
				require.NoError(t, err)
			}
			cfg := outboxdlq.ReplayConfig{Topic: f.dlq, DB: tt.db, Schema: schema, Audit: audit}
			report, err := outboxdlq.Replay(background, f.kafka, cfg)
			require.ErrorContains(t, err, "outbox_audit")
			require.Equal(t, outboxdlq.ReplayReport{Next: map[int32]int64{0: 0}}, report)
			for d, err := range outboxdlq.Read(background, f.kafka, f.dlq, nil) {
				require.NoError(t, err)
				require.True(t, report.Left(d))
			}
			require.Empty(t, f.records(t, f.topic))

			if tt.before != "" {
				_, err = db.Exec(background, pg.InSchema(`ALTER TABLE {schema}.outbox_audit DROP CONSTRAINT only_one`, schema))
				require.NoError(t, err)
			}
			cfg.DB, cfg.From, cfg.Choose = db, report.Next, report.Left
			report, err = outboxdlq.Replay(background, f.kafka, cfg)
			require.NoError(t, err)
			require.Equal(t, 2, report.Sent)
			require.Equal(t, []string{"a", "b"}, keys(t, f.kafka, f.topic, nil))
		})
	}
}

func TestReplayConfig(t *testing.T) {
	t.Parallel()
	nowhere := []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1"), kgo.RequestRetries(0)}
	for name, tt := range map[string]struct {
		cfg   outboxdlq.ReplayConfig
		kafka []kgo.Opt
		want  string
	}{
		"no topic":              {outboxdlq.ReplayConfig{}, nowhere, "outbox: replay config: field Topic is empty"},
		"a topic of no name":    {outboxdlq.ReplayConfig{Topic: "a b"}, nowhere, `outbox: replay config: field Topic "a b" is malformed`},
		"to nobody knows where": {outboxdlq.ReplayConfig{Topic: "a"}, nowhere, "field To is empty: a is not named {topic}.dlq"},
		"to a topic of no name": {outboxdlq.ReplayConfig{Topic: "a", To: []string{"a b"}}, nowhere, `field To "a b" is malformed`},
		"a negative offset":     {outboxdlq.ReplayConfig{Topic: "a.dlq", From: map[int32]int64{0: -1}}, nowhere, "field From: offset -1 of partition 0"},
		"no idempotence":        {outboxdlq.ReplayConfig{Topic: "a.dlq"}, append(nowhere, kgo.DisableIdempotentWrite()), "kafka option DisableIdempotentWrite"},
		"no broker":             {outboxdlq.ReplayConfig{Topic: "a", To: []string{"b"}}, nowhere, "outbox: replay of a: "},
		"no broker, and more":   {outboxdlq.ReplayConfig{Topic: "a.dlq", DryRun: true}, nowhere, "outbox: replay of a.dlq: "},
	} {
		t.Run(name, func(t *testing.T) {
			report, err := outboxdlq.Replay(background, tt.kafka, tt.cfg)
			require.ErrorContains(t, err, tt.want)
			require.Empty(t, report)
		})
	}
	_, err := outboxdlq.Replay(background, append(nowhere, kgo.ConsumerGroup("g")), outboxdlq.ReplayConfig{From: map[int32]int64{-1: 0}})
	for _, want := range []string{"field Topic", "field From", "kafka option ConsumerGroup"} {
		require.ErrorContains(t, err, want)
	}
}
