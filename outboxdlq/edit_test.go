package outboxdlq_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxops"
)

// An edited dead letter is a copy in the dead-letter topic, and what is sent back is a copy of that: consumers take it
// for a replay. The dead letter itself stays as it was.
func TestEdit(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 1)
	f.produce(t, f.deadLetter("a", `{"n": 1}`, "content-type", "application/json"))
	cfg := outboxdlq.ReplayConfig{Topic: f.dlq, DryRun: true}
	before, after, err := outboxdlq.Edit(background, f.kafka, cfg, 0, 0, []byte(`{"n": 2}`))
	require.NoError(t, err)
	require.Equal(t, []string{`{"n": 1}`, `{"n": 2}`}, []string{string(before.Record.Value), string(after.Record.Value)})
	require.Len(t, f.records(t, f.dlq), 1)
	require.Empty(t, f.records(t, f.topic))

	cfg.DryRun = false
	_, _, err = outboxdlq.Edit(background, f.kafka, cfg, 0, 0, []byte(`{half`))
	require.ErrorIs(t, err, outbox.ErrJSON)
	_, _, err = outboxdlq.Edit(background, f.kafka, cfg, 0, 7, []byte(`{}`))
	require.ErrorIs(t, err, outboxops.ErrNotFound)
	_, after, err = outboxdlq.Edit(background, f.kafka, cfg, 0, 0, []byte(`{"n": 2}`))
	require.NoError(t, err)
	require.Equal(t, f.dlq+"-0-0", after.EditedFrom)
	require.Equal(t, []any{"statistics", "COUNT", int64(17)}, []any{after.Group, after.Action, after.OriginalOffset})
	kept := f.records(t, f.dlq)
	require.Len(t, kept, 2)
	require.Equal(t, `{"n": 1}`, string(kept[0].Value))
	sent := f.records(t, f.topic)
	require.Len(t, sent, 1)
	require.Equal(t, `{"n": 2}`, string(sent[0].Value))
	require.Equal(t, map[string]string{"ce_id": "e-a", "content-type": "application/json", outbox.ReplayOf: f.topic + "-0-17", outbox.ReplayFrom: f.dlq + "-0-1",
		outbox.ReplayGroup: "statistics", outbox.ReplayAction: "COUNT"}, allHeaders(sent[0]))
	replays := deadletter.NewReplays(func() (*kgo.Client, error) { return f.client, nil })
	answers, err := replays.Check(background, sent, f.dlq)
	require.NoError(t, err)
	require.Equal(t, []deadletter.Answer{{Edited: true}}, answers)
}

// A dead letter is edited while other partitions of its topic, and of that of its original, have no leader.
func TestEditBesidePartitionWithoutLeader(t *testing.T) {
	t.Parallel()
	f := &fixture{topic: "sales", dlq: "sales.dlq"}
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(2, f.topic, f.dlq))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	f.kafka = []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...)}
	f.client, err = kgo.NewClient(append(f.kafka, kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
	require.NoError(t, err)
	t.Cleanup(f.client.Close)
	f.produce(t, &kgo.Record{Topic: f.topic, Key: []byte("a"), Value: []byte(`{"n": 1}`), Timestamp: failedAt})
	f.produce(t, f.deadLetter("a", "", outbox.DeadLetterValueOmitted, "8", outbox.DeadLetterOriginalOffset, "0"))
	testenv.WithoutLeader(t, cluster, 1)
	before, after, err := outboxdlq.Edit(background, f.kafka, outboxdlq.ReplayConfig{Topic: f.dlq, DryRun: true}, 0, 0, []byte(`{"n": 2}`))
	require.NoError(t, err)
	require.Equal(t, []string{`{"n": 1}`, `{"n": 2}`}, []string{string(before.Record.Value), string(after.Record.Value)})
}

// A group takes the new value, and only the action that failed does: also if its row, in tables that Edit is not given,
// has the value from before.
func TestEditToConsumer(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 1_048_588)
	f.failing.Store(true)
	f.send(t, f.saleRecord(uuid.NewString(), []byte(`{"amount": 1}`)))
	f.deadLetters(t, 1)
	f.failing.Store(false)
	kafka := testenv.KafkaOpts(f.brokers)
	cfg := outboxdlq.ReplayConfig{Topic: f.dlq, DB: f.db, Schema: f.schema, Audit: outboxops.AuditInfo{Operator: "kim", Reason: "it was two"}}
	require.Eventually(t, func() bool {
		_, _, err := outboxdlq.Edit(background, kafka, cfg, 0, 0, []byte(`{"amount": 2}`))
		require.ErrorIs(t, err, outboxops.ErrStatus)
		return strings.Contains(err.Error(), "the group has delivery-")
	}, testenv.Patience, 10*time.Millisecond)
	cfg.DB = nil
	_, _, err := outboxdlq.Edit(background, kafka, cfg, 0, 0, []byte(`{"amount": 2}`))
	require.NoError(t, err)
	f.requireCounts(t, map[string]int{"a FAILS": 2, "a WORKS": 1, "b FAILS": 1}, map[string]int{})
}

// A large value that only the dead letter has is edited there. The audit has the edit, with the value from before, and
// the replay.
func TestEditOfALargeValue(t *testing.T) {
	t.Parallel()
	f := newReplayFixture(t, 1_048_588)
	f.failing.Store(true)
	large := fmt.Appendf(nil, `{"amount": 1, "note": %q}`, strings.Repeat("x", 100_000))
	f.send(t, f.saleRecord(uuid.NewString(), large))
	f.deadLetters(t, 1)
	stripped := func(t require.TestingT, want int) {
		var n int
		require.NoError(t, f.db.QueryRow(background, "SELECT count(*) FROM "+pgx.Identifier{f.schema, "event_delivery"}.Sanitize()+" WHERE dead_letter IS NOT NULL").Scan(&n))
		require.Equal(t, want, n)
	}
	require.EventuallyWithT(t, func(c *assert.CollectT) { stripped(c, 1) }, testenv.Patience, 10*time.Millisecond)
	f.failing.Store(false)
	cfg := outboxdlq.ReplayConfig{Topic: f.dlq, DB: f.db, Schema: f.schema, Audit: outboxops.AuditInfo{Operator: "kim", Reason: "it was two"}}
	_, _, err := outboxdlq.Edit(background, testenv.KafkaOpts(f.brokers), cfg, 0, 0, []byte(`{"amount": 2}`))
	require.NoError(t, err)
	f.requireCounts(t, map[string]int{"a FAILS": 2, "a WORKS": 1, "b FAILS": 1}, map[string]int{})
	stripped(t, 0)
	failures, err := outboxops.NewFailures(f.db, outboxops.FailuresConfig{Schema: f.schema})
	require.NoError(t, err)
	entries, err := failures.Audit(background, outboxops.FailureID{}, outboxops.AuditPage{})
	require.NoError(t, err)
	require.Len(t, entries, 2)
	require.Equal(t, []string{"replay", "edit"}, []string{entries[0].Action, entries[1].Action})
	require.Equal(t, []string{"a-" + f.topic, "FAILS", "kim", "it was two (dead letter " + f.dlq + "-0-0)"}, []string{entries[1].Group, entries[1].Handler, entries[1].Operator, entries[1].Reason})
	var kept []byte
	require.NoError(t, f.db.QueryRow(background, "SELECT payload_bytes FROM "+pgx.Identifier{f.schema, "outbox_audit"}.Sanitize()+" WHERE action = 'edit'").Scan(&kept))
	require.Equal(t, large, kept)
}
