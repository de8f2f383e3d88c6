package testenv

import (
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// NotLeader is the answer of a broker that leads no partition.
func NotLeader(r *kmsg.ProduceRequest) *kmsg.ProduceResponse {
	return Rejected(r, kerr.NotLeaderForPartition)
}

// Rejected is the answer to a request of which a broker writes no record.
func Rejected(r *kmsg.ProduceRequest, err *kerr.Error) *kmsg.ProduceResponse {
	answer := r.ResponseKind().(*kmsg.ProduceResponse)
	for _, asked := range r.Topics {
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic, topic.TopicID = asked.Topic, asked.TopicID
		for _, p := range asked.Partitions {
			partition := kmsg.NewProduceResponseTopicPartition()
			partition.Partition, partition.ErrorCode = p.Partition, err.Code
			topic.Partitions = append(topic.Partitions, partition)
		}
		answer.Topics = append(answer.Topics, topic)
	}
	return answer
}

// PausingPartitioner returns a partitioner by keys that pauses before the tenth record of each topic with a prefix:
// meanwhile the client may send those before.
func PausingPartitioner(prefix string) kgo.Partitioner {
	return pausing{kgo.StickyKeyPartitioner(nil), prefix}
}

type pausing struct {
	kgo.Partitioner

	prefix string
}

// ForTopic implements [kgo.Partitioner].
func (p pausing) ForTopic(topic string) kgo.TopicPartitioner {
	return &pausingTopic{TopicPartitioner: p.Partitioner.ForTopic(topic), pauses: strings.HasPrefix(topic, p.prefix)}
}

type pausingTopic struct {
	kgo.TopicPartitioner

	pauses bool
	n      int
}

// Partition implements [kgo.TopicPartitioner].
func (p *pausingTopic) Partition(r *kgo.Record, n int) int {
	if p.n++; p.pauses && p.n == 10 {
		<-time.After(500 * time.Millisecond)
	}
	return p.TopicPartitioner.Partition(r, n)
}
