package outboxdlq_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/outboxdlq"
)

// Whatever a record of a dead-letter topic says, it is a dead letter whose position, numbers and times can be used, or
// an error that names the header.
func FuzzDeadLetter(f *testing.F) {
	f.Add("orders", "0", "17", "2026-02-03T04:05:06.789Z", "statistics", "4", "2026-02-03T04:05:06.789Z", "1234", "dlq_error", "boom")
	f.Add("a-1-2", "2147483647", "9223372036854775807", "9999-12-31T23:59:59-23:59", "\xff", "0", "0000-01-01T00:00:00+23:59", "1", "replay_of", "t-0-1")
	f.Add("..", "+1", "-1", "yesterday", "", "1e3", "", "", "DLQ_GROUP", "x")
	f.Fuzz(func(t *testing.T, topic, partition, offset, timestamp, group, attempts, failedAt, omitted, name, value string) {
		r := &kgo.Record{Topic: "orders.dlq"}
		given := map[string]string{}
		for _, h := range [][2]string{{outbox.DeadLetterOriginalTopic, topic}, {outbox.DeadLetterOriginalPartition, partition},
			{outbox.DeadLetterOriginalOffset, offset}, {outbox.DeadLetterOriginalTimestamp, timestamp}, {outbox.DeadLetterGroup, group},
			{outbox.DeadLetterAttempts, attempts}, {outbox.DeadLetterFailedAt, failedAt}, {outbox.DeadLetterValueOmitted, omitted}, {name, value}} {
			if given[h[0]] = h[1]; h[1] != "" {
				r.Headers = append(r.Headers, kgo.RecordHeader{Key: h[0], Value: []byte(h[1])})
			}
		}
		d, err := outboxdlq.Decode(r)
		if err != nil {
			var field *outbox.FieldError
			require.ErrorAs(t, err, &field)
			require.True(t, strings.HasPrefix(field.Field, deadletter.Prefix), field.Field)
			require.Less(t, len(err.Error()), 2_000)
			require.Equal(t, outboxdlq.DeadLetter{Record: r}, d)
			return
		}
		require.NoError(t, check.Topic(d.OriginalTopic))
		require.NotEmpty(t, d.Group)
		require.True(t, d.OriginalPartition >= 0 && d.OriginalOffset >= 0 && d.Attempts >= 0 && d.ValueOmitted >= 0 && d.KeyOmitted >= 0 && d.HeadersOmitted >= 0)
		for _, at := range []time.Time{d.OriginalTimestamp, d.FailedAt} {
			_, err := json.Marshal(at.UTC())
			require.NoError(t, err, "lists show it in JSON")
		}
		if name == outbox.DeadLetterOriginalTopic && value != "" {
			topic = value
		}
		require.Equal(t, topic, d.OriginalTopic)
		origin := deadletter.Origin(d.OriginalTopic, d.OriginalPartition, d.OriginalOffset)
		require.Equal(t, d.OriginalTopic, deadletter.TopicOf(origin))
	})
}
