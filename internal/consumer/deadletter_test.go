package consumer

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// The dead letter of a record of which nothing was read says so, in each form, and has no digest of what is not there.
func TestDeadLetterOfUnreadRecord(t *testing.T) {
	t.Parallel()
	r := &kgo.Record{Topic: "play-events", Timestamp: time.UnixMilli(1)}
	(&omission{Cause: "too far"}).attach(r)
	sender := deadLetters{cfg: &Rules{DeadLetterTopic: func(string) string { return "dlq" }, Rules: &handling.Rules{}}}
	for form := completeForm; form <= shortForm; form++ {
		sent := map[string]string{}
		for _, h := range sender.record(r, handling.Outcome{Err: errPlayed}, form).Headers {
			sent[h.Key] = string(h.Value)
		}
		require.Equal(t, "too far", sent[deadletter.Unread])
		require.NotContains(t, sent, deadletter.OriginalDigest)
	}
}

// No record is too large for its dead-letter topic, whatever of it is large: what Kafka
// refuses is sent without value, and then without what else is large. A partition used to
// wait for ever for a dead letter with a large key.
func TestDeadLetterIsShortened(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 20_000)
	for name, tt := range map[string]struct {
		record *kgo.Record
		sends  string
		want   map[string]string
		kept   []string // headers of the original
	}{
		"as it is":             {&kgo.Record{Key: []byte(large), Value: []byte(large)}, "", nil, nil},
		"a large value":        {&kgo.Record{Key: []byte("k"), Value: []byte(large)}, "l", map[string]string{deadletter.ValueOmitted: "20000"}, nil},
		"a large key":          {&kgo.Record{Key: []byte(large), Value: []byte("v")}, "ll", map[string]string{deadletter.ValueOmitted: "1", deadletter.KeyOmitted: "20000"}, nil},
		"a large header":       {&kgo.Record{Headers: []kgo.RecordHeader{header("a", large), header("b", "small")}}, "ll", map[string]string{deadletter.HeadersOmitted: "1"}, []string{"b"}},
		"many headers":         {&kgo.Record{Headers: []kgo.RecordHeader{header("a", large[:5000]), header("b", large[:5000]), header("c", large[:3000])}}, "ll", map[string]string{deadletter.HeadersOmitted: "1"}, []string{"a", "c"}},
		"refused all the same": {&kgo.Record{Key: []byte(large), Value: []byte(large)}, "lllll", map[string]string{deadletter.ValueOmitted: "20000", deadletter.KeyOmitted: "20000"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newPartitionFixture(t, Rules{})
				s.sends = tt.sends
				tt.record.Topic = "play-events"
				from := originOf(tt.record, kafka.TopicID{})
				it := newRecordItem(tt.record, replay{}, &from)
				defer time.AfterFunc(time.Minute, s.worker.finish).Stop() // rather than to wait for ever
				_ = s.worker.sendToDLQ(&it, handling.Outcome{Class: "handler", Err: errPlayed})
				s.worker.abandon()
				require.Len(t, s.records, 1, "the partition waits")
				sent := map[string]string{}
				for _, h := range s.records[0].Headers {
					sent[h.Key] = string(h.Value)
				}
				for _, name := range []string{deadletter.ValueOmitted, deadletter.KeyOmitted, deadletter.HeadersOmitted} {
					require.Equal(t, tt.want[name], sent[name], name)
				}
				for _, name := range []string{"a", "b", "c"} {
					_, ok := sent[name]
					require.Equal(t, strings.Contains(strings.Join(tt.kept, " "), name), ok, name)
				}
				require.Equal(t, tt.sends != "", sent[deadletter.OriginalDigest] != "")
			})
		})
	}
}
