package consumer

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/kafka"
)

// A record comes back from the row in which it was parked as it was, whatever is in it. A row of another writer is a
// record, or an error that names the delivery.
func FuzzParked(f *testing.F) {
	f.Add([]byte("k"), []byte("v"), "ce_id", []byte("1"), int64(1_000), []byte(`{"key":null,"time":0,"epoch":0,"missing":{"value":5,"digest":"x"}}`))
	f.Add([]byte(nil), []byte(nil), "\xff", []byte(nil), int64(-1), []byte(`{"key":"a","topic_id":"AAAA","headers":[{"name":null},null]}`))
	f.Add([]byte{}, []byte{}, "", []byte{}, int64(1)<<62, []byte(`{"headers":[{"name":"Y2VfaWQ=","value":"MQ=="}],"missing":[1]}`))
	f.Fuzz(func(t *testing.T, key, value []byte, name string, header []byte, at int64, row []byte) {
		r := &kgo.Record{Topic: "orders", Partition: 3, Offset: 17, Key: key, Value: value, Timestamp: time.UnixMilli(at), LeaderEpoch: 7,
			Headers: []kgo.RecordHeader{{Key: name, Value: header}}}
		id := kafka.TopicID{1, 2}
		d := &delivery.Delivery{Stream: "orders", Partition: 3, Position: 17, Payload: value, Record: parkedRecordOf(r, id)}
		if d.ID = 5; value == nil {
			d.Payload = []byte{} // the column is never NULL
		}
		got, topicID, err := recordOfDelivery(d)
		require.NoError(t, err)
		require.Equal(t, id, topicID)
		require.Equal(t, r, got)

		d.Record = row
		got, _, err = recordOfDelivery(d)
		if err != nil {
			require.ErrorContains(t, err, "delivery 5")
			require.Less(t, len(err.Error()), 1_000+len(row))
			require.Nil(t, got)
			return
		}
		require.True(t, json.Valid(row))
		if missing := omissionOf(got); missing != nil {
			require.NotEmpty(t, missing.Error())
			missing.headers()
		}
		again, _, err := recordOfDelivery(&delivery.Delivery{Stream: "orders", Partition: 3, Position: 17, Payload: value, Record: parkedRecordOf(got, id)})
		require.NoError(t, err)
		require.Equal(t, got.Key, again.Key)
		require.Equal(t, got.Headers, again.Headers)
		require.Equal(t, got.Timestamp.UnixMilli(), again.Timestamp.UnixMilli())
	})
}
