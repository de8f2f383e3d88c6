package outbox

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

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
		"a large value":        {&kgo.Record{Key: []byte("k"), Value: []byte(large)}, "l", map[string]string{DeadLetterValueOmitted: "20000"}, nil},
		"a large key":          {&kgo.Record{Key: []byte(large), Value: []byte("v")}, "ll", map[string]string{DeadLetterValueOmitted: "1", DeadLetterKeyOmitted: "20000"}, nil},
		"a large header":       {&kgo.Record{Headers: []kgo.RecordHeader{header("a", large), header("b", "small")}}, "ll", map[string]string{DeadLetterHeadersOmitted: "1"}, []string{"b"}},
		"many headers":         {&kgo.Record{Headers: []kgo.RecordHeader{header("a", large[:5000]), header("b", large[:5000]), header("c", large[:3000])}}, "ll", map[string]string{DeadLetterHeadersOmitted: "1"}, []string{"a", "c"}},
		"refused all the same": {&kgo.Record{Key: []byte(large), Value: []byte(large)}, "lllll", map[string]string{DeadLetterValueOmitted: "20000", DeadLetterKeyOmitted: "20000"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newPartitionFixture(t, ConsumerConfig{})
				s.sends = tt.sends
				tt.record.Topic = "play-events"
				defer time.AfterFunc(time.Minute, s.worker.finish).Stop() // rather than to wait for ever
				_ = s.worker.sendToDLQ(&recordItem{record: tt.record}, givenUp{class: "handler", err: errPlayed})
				s.worker.abandon()
				require.Len(t, s.records, 1, "the partition waits")
				sent := map[string]string{}
				for _, h := range s.records[0].Headers {
					sent[h.Key] = string(h.Value)
				}
				for _, name := range []string{DeadLetterValueOmitted, DeadLetterKeyOmitted, DeadLetterHeadersOmitted} {
					require.Equal(t, tt.want[name], sent[name], name)
				}
				for _, name := range []string{"a", "b", "c"} {
					_, ok := sent[name]
					require.Equal(t, strings.Contains(strings.Join(tt.kept, " "), name), ok, name)
				}
				require.Equal(t, tt.sends != "", sent[DeadLetterDigest] != "")
			})
		})
	}
}
