package kafka

import (
	"fmt"
	"iter"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Partition is one partition of a topic, or a topic as a whole.
type Partition struct {
	Topic  string
	Number int32 // Unassigned: the topic
}

// Unassigned is the partition of a record before the client has chosen one.
const Unassigned = -1

// PartitionOf returns the partition of a record.
func PartitionOf(r *kgo.Record) Partition { return Partition{r.Topic, r.Partition} }

// Headers yields the names and values of a record's headers.
func Headers(r *kgo.Record) iter.Seq2[string, []byte] {
	return func(yield func(string, []byte) bool) {
		for _, h := range r.Headers {
			if !yield(h.Key, h.Value) {
				return
			}
		}
	}
}

// WholeTopic returns the topic of p.
func (p Partition) WholeTopic() Partition { return Partition{p.Topic, Unassigned} }

// Only returns p as a map of topics and partitions, as franz-go takes them.
func (p Partition) Only() map[string][]int32 { return map[string][]int32{p.Topic: {p.Number}} }

// Name returns "topic/number", or "topic".
func (p Partition) Name() string {
	if p.Number == Unassigned {
		return p.Topic
	}
	return fmt.Sprintf("%s/%d", p.Topic, p.Number)
}

// String returns "partition topic/number", or "topic topic".
func (p Partition) String() string {
	if p.Number == Unassigned {
		return "topic " + p.Topic
	}
	return "partition " + p.Name()
}
