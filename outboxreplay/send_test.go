package outboxreplay_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxreplay"
)

// Kafka rejects a request, which has a part of the events. No later event of their key is in the topic before them,
// whether it accepts all of them alone or not, and also if the client learns of the topic while it is to send them.
func TestRejectedInManyBatches(t *testing.T) {
	t.Parallel()
	const n = 300
	for name, tt := range map[string]struct{ request, bad int }{
		"the first":                          {1, 0},
		"the first, and one of its events":   {1, 50},
		"a later one":                        {2, 0},
		"a later one, and one of its events": {2, 150},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			topic := "replay-" + uuid.NewString()
			cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, topic))
			require.NoError(t, err)
			t.Cleanup(cluster.Close)
			f := fixtureOf(t, topic, cluster.ListenAddrs())
			sales := make([]sale, n)
			for i := range sales {
				sales[i] = sale{Product: "a", Number: i + 1, Filler: strings.Repeat("x", 10_000)}
			}
			f.record(t, sales...)
			requests := 0 // only the goroutine of the cluster
			cluster.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
				cluster.KeepControl()
				requests++
				has := bytes.Contains(r.(*kmsg.ProduceRequest).Topics[0].Partitions[0].Records, fmt.Appendf(nil, `"Number": %d,`, tt.bad))
				if requests != tt.request && !has {
					return nil, nil, false
				}
				return testenv.Rejected(r.(*kmsg.ProduceRequest), kerr.InvalidRecord), nil, true
			})
			run := func(after int64) (outboxreplay.Report, error) {
				opts := append(testenv.KafkaOpts(f.brokers), kgo.ProducerBatchCompression(kgo.NoCompression()), kgo.RecordPartitioner(testenv.PausingPartitioner(topic)))
				return outboxreplay.Run(background, f.db, opts, outboxreplay.Config{Source: f.recorded(t), Rate: 10_000, Schema: f.schema, Audit: audit, Filter: outboxarchive.Filter{After: after}})
			}
			report, err := run(0)
			want := n
			if tt.bad > 0 {
				require.ErrorIs(t, err, kerr.InvalidRecord)
				require.Equal(t, tt.bad-1, report.Sent)
				require.EqualValues(t, tt.bad-1, report.Next)
				want--
				_, err = run(int64(tt.bad))
			}
			require.NoError(t, err)
			last := 0
			for _, r := range f.records(t, topic, want)["a"] {
				require.Greater(t, numberOf(t, r), last)
				last = numberOf(t, r)
			}
		})
	}
}
