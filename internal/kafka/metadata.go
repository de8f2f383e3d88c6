package kafka

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Metadata asks Kafka for the partitions of topics. It creates no topic.
func Metadata(ctx context.Context, client *kgo.Client, topics ...string) (*kmsg.MetadataResponse, error) {
	return metadataRequest(topics...).RequestWith(ctx, client)
}

func metadataRequest(topics ...string) *kmsg.MetadataRequest {
	request := kmsg.NewPtrMetadataRequest()
	for _, name := range topics {
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = &name
		request.Topics = append(request.Topics, topic)
	}
	return request
}
