package kafka

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Checks of a partitioner ask it about this many keys, topics of this many partitions,
// and each key this often.
const (
	probedKeys       = 16
	probedPartitions = 64
	probesOfAKey     = 24
)

// checkPartitioner returns an error if p does not send all records of a key to one
// partition, whatever else the records hold, whichever client asks, and whatever was
// asked before. A key whose records are scattered has no order.
func checkPartitioner(p kgo.Partitioner) (err error) {
	if p == nil {
		return errors.New("the partitioner is nil")
	}
	// A client asks from a goroutine where a panic would end the process.
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("%s panics: %v", partitionerName(p), v)
		}
	}()
	for k := range probedKeys {
		key := fmt.Appendf(nil, "key-%d", k)
		if why := scatters(p, key); why != "" {
			return fmt.Errorf("%s %s, so the events of a key lose their order; use one that hashes the key, such as kgo.StickyKeyPartitioner",
				partitionerName(p), why)
		}
	}
	return nil
}

// scatters says how a partitioner scatters the records of a key, or returns "".
func scatters(p kgo.Partitioner, key []byte) string {
	const topic = "outbox-events"
	same, first := p.ForTopic(topic), -1
	for n := range probesOfAKey {
		asked := same
		if n%3 == 2 {
			asked = p.ForTopic(topic) // from the other client
		}
		r := &kgo.Record{Topic: topic, Key: key, Partition: Unassigned}
		if !asked.RequiresConsistency(r) {
			return "takes another partition for a key while one is unavailable"
		}
		if n == 0 {
			first = choose(asked, r, n)
			continue
		}
		if choose(asked, r, n) != first {
			return "chooses the partition without regard to the key"
		}
		r.Partition = int32(n % probedPartitions)
		if choose(asked, r, n) != first {
			return "follows the field Partition of a record, which is not set"
		}
		r.Value = fmt.Appendf(nil, "value %d", n)
		r.Headers = []kgo.RecordHeader{{Key: "id", Value: r.Value}}
		if choose(asked, r, n) != first {
			return "chooses the partition by more than the key"
		}
		disturb(asked, n)
	}
	return ""
}

// choose asks for the partition of a record as a client does. n varies the number of buffered
// records.
func choose(p kgo.TopicPartitioner, r *kgo.Record, n int) int {
	if by, ok := p.(kgo.TopicBackupPartitioner); ok {
		return by.PartitionByBackup(r, probedPartitions, &backups{rest: probedPartitions, seed: n})
	}
	return p.Partition(r, probedPartitions)
}

// disturb brings a partitioner into another state: other keys, and a new batch.
func disturb(p kgo.TopicPartitioner, n int) {
	choose(p, &kgo.Record{Key: fmt.Appendf(nil, "another-%d", n), Value: make([]byte, 100_000), Partition: Unassigned}, n)
	if on, ok := p.(kgo.TopicPartitionerOnNewBatch); ok && n%2 == 1 {
		on.OnNewBatch()
	}
}

// backups yields the number of records that are buffered for each partition. It differs
// from partition to partition, and with the seed.
type backups struct{ rest, seed int }

func (b *backups) Next() (int, int64) {
	if b.rest == 0 {
		panic("Next is called too often")
	}
	b.rest--
	return b.rest, int64((b.rest*7 + b.seed*13) % probedPartitions)
}

func (b *backups) Rem() int { return b.rest }

// partitionerName returns the name of the function of kgo that makes a partitioner, or
// the partitioner's type.
func partitionerName(p kgo.Partitioner) string {
	for name, known := range map[string]kgo.Partitioner{
		"kgo.RoundRobinPartitioner":   kgo.RoundRobinPartitioner(),
		"kgo.StickyPartitioner":       kgo.StickyPartitioner(),
		"kgo.LeastBackupPartitioner":  kgo.LeastBackupPartitioner(),
		"kgo.UniformBytesPartitioner": kgo.UniformBytesPartitioner(1, false, false, nil),
		"kgo.StickyKeyPartitioner":    kgo.StickyKeyPartitioner(nil),
		// One that reads the field Partition is the same.
		"kgo.BasicConsistentPartitioner or kgo.ManualPartitioner": kgo.ManualPartitioner(),
	} {
		if reflect.TypeOf(p) == reflect.TypeOf(known) {
			return name
		}
	}
	return fmt.Sprintf("%T", p)
}
