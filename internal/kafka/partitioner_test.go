package kafka

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// partitionBy is a partitioner of a host.
type partitionBy func(r *kgo.Record, n int) int

func (p partitionBy) ForTopic(string) kgo.TopicPartitioner { return p }
func (p partitionBy) RequiresConsistency(*kgo.Record) bool { return true }
func (p partitionBy) Partition(r *kgo.Record, n int) int   { return p(r, n) }

func byHash(b []byte, n int) int {
	h := fnv.New32a()
	_, _ = h.Write(b)
	return int(h.Sum32() % uint32(n))
}

// onePerClient is a partitioner that begins anew for each client.
type onePerClient struct{}

func (onePerClient) ForTopic(string) kgo.TopicPartitioner {
	salt := fmt.Append(nil, rand.Int())
	return partitionBy(func(r *kgo.Record, n int) int { return byHash(append(salt, r.Key...), n) })
}

// eachInTurn gives a key the next partition after each new batch.
type eachInTurn struct{ batches int }

func (*eachInTurn) ForTopic(string) kgo.TopicPartitioner { return &eachInTurn{} }
func (*eachInTurn) RequiresConsistency(*kgo.Record) bool { return true }
func (p *eachInTurn) Partition(_ *kgo.Record, n int) int { return p.batches % n }
func (p *eachInTurn) OnNewBatch()                        { p.batches++ }

var partitionerTests = []struct {
	name        string
	partitioner kgo.Partitioner
	want        []string // parts of the error; none: it is taken
}{
	{"the default of franz-go", kgo.UniformBytesPartitioner(64<<10, true, true, nil), nil},
	{"by key, another batch from time to time", kgo.StickyKeyPartitioner(nil), nil},
	{"by key, as Sarama does", kgo.StickyKeyPartitioner(kgo.SaramaCompatHasher(func(b []byte) uint32 { return uint32(byHash(b, 1<<31)) })), nil},
	{"a function of the key", kgo.BasicConsistentPartitioner(func(string) func(*kgo.Record, int) int {
		return func(r *kgo.Record, n int) int { return byHash(r.Key, n) }
	}), nil},
	{"the host's own, by key", partitionBy(func(r *kgo.Record, n int) int { return byHash(r.Key, n) }), nil},
	{"one partition for all", partitionBy(func(*kgo.Record, int) int { return 0 }), nil},
	{"one that there may not be", partitionBy(func(*kgo.Record, int) int { return 1000 }), nil},

	{"in turns", kgo.RoundRobinPartitioner(), []string{"kgo.RoundRobinPartitioner", "lose their order"}},
	{"one until the batch is full", kgo.StickyPartitioner(), []string{"kgo.StickyPartitioner"}},
	{"the one with the fewest records", kgo.LeastBackupPartitioner(), []string{"kgo.LeastBackupPartitioner"}},
	{"one for so many bytes, without regard to keys", kgo.UniformBytesPartitioner(64<<10, true, false, nil), []string{"kgo.UniformBytesPartitioner"}},
	{"the partition that the record names", kgo.ManualPartitioner(), []string{"kgo.ManualPartitioner", "field Partition"}},
	{"the same, by the host", partitionBy(func(r *kgo.Record, n int) int { return max(0, int(r.Partition)) % n }), []string{"kafka.partitionBy", "field Partition"}},
	{"at random", partitionBy(func(_ *kgo.Record, n int) int { return rand.IntN(n) }), []string{"without regard to the key"}},
	{"by value", partitionBy(func(r *kgo.Record, n int) int { return byHash(r.Value, n) }), []string{"by more than the key"}},
	{"by a header", partitionBy(func(r *kgo.Record, n int) int { return len(r.Headers) % n }), []string{"by more than the key"}},
	{"another for each client", onePerClient{}, []string{"kafka.onePerClient"}},
	{"another after each batch", &eachInTurn{}, []string{"*kafka.eachInTurn"}},
	{"it panics", partitionBy(func(r *kgo.Record, _ int) int { return int(r.Value[0]) }), []string{"kafka.partitionBy panics: runtime error: index out of range"}},
	{"none", nil, []string{"is nil"}},
}

func TestPartitioners(t *testing.T) {
	t.Parallel()
	for _, tt := range partitionerTests {
		t.Run(tt.name, func(t *testing.T) {
			err := CheckProducerOpts([]kgo.Opt{kgo.RecordPartitioner(tt.partitioner)})
			if tt.want == nil {
				require.NoError(t, err)
				return
			}
			for _, part := range append([]string{"kafka option RecordPartitioner: "}, tt.want...) {
				require.ErrorContains(t, err, part)
			}
		})
	}
}
