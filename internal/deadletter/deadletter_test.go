package deadletter

import (
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// What Origin writes is read back, also where the name of a topic has dashes and numbers.
func TestOrigin(t *testing.T) {
	t.Parallel()
	for _, topic := range []string{"orders", "a-1-2", "-"} {
		at, offset, err := parseOrigin(Origin(topic, 3, 41))
		require.NoError(t, err)
		require.Equal(t, kafka.Partition{Topic: topic, Number: 3}, at)
		require.EqualValues(t, 41, offset)
	}
	for _, text := range []string{"", "orders", "orders-1", "orders-1-", "-1-2", "orders-1-x", "orders-2147483648-1", "orders-1-9223372036854775808"} {
		_, _, err := parseOrigin(text)
		require.Error(t, err, text)
	}
}

// The names are the same for every decoder.
func TestIsOwn(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]bool{
		"dlq_error": true, "DLQ_error": true, "dlq_": true, "replay_of": true, "Replay_Group": true, "replay_action": true, "replay_from": true,
		"": false, "d": false, "dlq": false, "delta": false, "r": false, "replay_": false, "replay_count": false, "ce_id": false, "replayxof": false,
	} {
		require.Equal(t, want, IsOwn(name), name)
	}
}

// A digest says what a record is: none of its parts can pass for another, and what was
// added on its way to a dead-letter topic and back does not count.
func TestDigest(t *testing.T) {
	t.Parallel()
	h := func(key, value string) kgo.RecordHeader { return kgo.RecordHeader{Key: key, Value: []byte(value)} }
	seen := map[string]int{}
	for i, r := range []*kgo.Record{
		{}, {Key: []byte{}}, {Value: []byte{}}, {Key: []byte("a")}, {Value: []byte("a")}, {Key: []byte("ab")}, {Key: []byte("a"), Value: []byte("b")},
		{Headers: []kgo.RecordHeader{h("a", "b")}}, {Headers: []kgo.RecordHeader{h("ab", "")}}, {Headers: []kgo.RecordHeader{h("a", ""), h("b", "")}},
	} {
		digest := Digest(r)
		require.NotContains(t, seen, digest, "%d", i)
		seen[digest] = i
		r.Headers = append(r.Headers, h(ReplayOf, "x"), h(Group, "y"))
		require.Equal(t, digest, Digest(r))
	}
}
