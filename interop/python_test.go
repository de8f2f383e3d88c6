package interop

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// comparing reads what is expected from its input, a line for each record of a topic, and ends with what differs.
const comparing = `
import sys
import confluent_kafka

brokers, topic, lines = sys.argv[1], sys.argv[2], [json.loads(line) for line in sys.stdin]
consumer = confluent_kafka.Consumer({"bootstrap.servers": brokers, "group.id": "python", "enable.auto.commit": False})
consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
for number, want in enumerate(lines):
    record = consumer.poll(60)
    assert record is not None and record.error() is None, record and record.error()
    assert is_for(record, "mine") and is_for(record, "any")
    event, headers = event_of(record), {name: value.decode() for name, value in record.headers()}
    data = event.pop("data")
    wanted = json.loads(want["data"]) if want["json"] else base64.b64decode(want["data"])
    assert data == wanted and type(data) is type(wanted), (number, data, wanted)
    assert event == want["event"], (number, event, want["event"])
    assert record.key().decode() == want["key"], (number, record.key())
    for name, value in want["headers"].items():
        assert headers[name] == value, (number, name, headers[name])
consumer.close()

class Replay:
    def headers(self):
        return [("ce_id", b"1"), ("replay_group", b"mine")]

assert is_for(Replay(), "mine") and not is_for(Replay(), "any")
print(len(lines))
`

// What the Python program of docs/records.md finds in records of both modes is what was recorded.
func TestPythonReads(t *testing.T) {
	t.Parallel()
	snippet := blocks(t, "records.md", "python")[0]
	for _, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			brokers := testenv.RealBrokers(t)
			db, schema := testenv.Schema(t)
			require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
			topic := newTopic(t, brokers)
			var input strings.Builder
			for _, tt := range relayTests {
				f := tt.withDefaults()
				require.NoError(t, json.NewEncoder(&input).Encode(expected(f, record(t, db, schema, topic, f))))
			}
			relay(t, db, brokers, outbox.RelayConfig{Schema: schema, Mode: m.mode})
			out := python(t, nil, "", "confluent_kafka", snippet+comparing, input.String(), strings.Join(brokers, ","), topic)
			require.Equal(t, len(relayTests), atoi(t, out))
		})
	}
}

// expectation is what a reader should find in a record.
type expectation struct {
	Event   map[string]string `json:"event"`
	Key     string            `json:"key"`
	Headers map[string]string `json:"headers"`
	JSON    bool              `json:"json"`
	Data    any               `json:"data"` // text of JSON, or bytes
}

func expected(f fact, id string) expectation {
	e := expectation{Key: f.key, Headers: map[string]string{}, Data: []byte(f.data), Event: map[string]string{
		"specversion": "1.0", "id": id, "source": f.source, "type": f.eventType, "subject": f.aggregate, "aggregatetype": f.aggregateType,
		"time": f.at.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano), "datacontenttype": f.contentType,
	}}
	maps.Copy(e.Headers, f.headers)
	if f.correlation != "" {
		e.Event["correlationid"] = f.correlation
	}
	if f.traceID != "" {
		e.Event["traceid"] = f.traceID
	}
	maps.Copy(e.Event, f.attributes)
	if f.trace != "" {
		e.Event["traceparent"], e.Headers["traceparent"] = f.trace, f.trace
	}
	media, _, _ := strings.Cut(f.contentType, ";")
	if strings.HasSuffix(media, "json") {
		e.JSON, e.Data = true, f.data
	}
	return e
}

// Consumers in other languages know the headers of dead letters and replays by these names, so they stay, and
// docs/records.md has them all.
func TestHeaderNamesStay(t *testing.T) {
	t.Parallel()
	page := document(t, "records.md")
	for have, want := range map[string]string{
		outbox.DeadLetterOriginalTopic: "dlq_original_topic", outbox.DeadLetterOriginalPartition: "dlq_original_partition",
		outbox.DeadLetterOriginalOffset: "dlq_original_offset", outbox.DeadLetterOriginalTimestamp: "dlq_original_timestamp",
		outbox.DeadLetterGroup: "dlq_group", outbox.DeadLetterAction: "dlq_action", outbox.DeadLetterError: "dlq_error",
		outbox.DeadLetterClass: "dlq_error_class", outbox.DeadLetterAttempts: "dlq_attempts", outbox.DeadLetterFailedAt: "dlq_failed_at",
		outbox.DeadLetterValueOmitted: "dlq_value_omitted", outbox.DeadLetterKeyOmitted: "dlq_key_omitted",
		outbox.DeadLetterHeadersOmitted: "dlq_headers_omitted", outbox.DeadLetterDigest: "dlq_digest", outbox.DeadLetterEditedFrom: "dlq_edited_from",
		outbox.ReplayGroup: "replay_group", outbox.ReplayAction: "replay_action", outbox.ReplayOf: "replay_of", outbox.ReplayFrom: "replay_from",
	} {
		require.Equal(t, want, have)
		require.Contains(t, page, "`"+want+"`")
	}
}
