package testenv

import (
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// NotLeader is the answer of a broker that leads no partition.
func NotLeader(r *kmsg.ProduceRequest) *kmsg.ProduceResponse {
	answer := r.ResponseKind().(*kmsg.ProduceResponse)
	for _, asked := range r.Topics {
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic, topic.TopicID = asked.Topic, asked.TopicID
		for _, p := range asked.Partitions {
			partition := kmsg.NewProduceResponseTopicPartition()
			partition.Partition, partition.ErrorCode = p.Partition, kerr.NotLeaderForPartition.Code
			topic.Partitions = append(topic.Partitions, partition)
		}
		answer.Topics = append(answer.Topics, topic)
	}
	return answer
}
