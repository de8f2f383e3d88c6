package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// errNoLeader is the outcome of an event whose partition has no leader, while
// another one of the topics that the send was for has.
var errNoLeader = errors.New("partition has no leader")

// partition is one of a topic.
type partition struct {
	topic  string
	number int32
}

func partitionOf(r *kgo.Record) partition { return partition{r.Topic, r.Partition} }

// only is the partition as franz-go names several.
func (p partition) only() map[string][]int32 { return map[string][]int32{p.topic: {p.number}} }

func (p partition) String() string { return fmt.Sprintf("partition %s/%d", p.topic, p.number) }

// blameLeaders marks the failures for which a partition without a leader is to
// blame. It asks when nothing of a send got through, because that looks like an
// outage of Kafka, which everybody has to wait for. Where Kafka does not answer,
// or no partition has a leader, it is one.
func blameLeaders(ctx context.Context, client *kgo.Client, records []kgo.Record, errs []error) {
	asked := map[string]bool{}
	for i := range records {
		if errs[i] == nil {
			return
		}
		if records[i].Partition != unassigned {
			asked[records[i].Topic] = true
		}
	}
	if len(asked) == 0 {
		return
	}
	leaders := askLeaders(ctx, client, asked)
	for i := range records {
		if led, known := leaders[partitionOf(&records[i])]; known && !led && refusalClass(errs[i]) == "" {
			errs[i] = fmt.Errorf("%w: %w", errNoLeader, errs[i])
		}
	}
}

const leadersTimeout = 2 * time.Second

// askLeaders returns which partitions of topics have a leader. It returns nil if
// none has.
func askLeaders(ctx context.Context, client *kgo.Client, topics map[string]bool) map[partition]bool {
	ctx, cancel := context.WithTimeout(ctx, leadersTimeout)
	defer cancel()
	request := kmsg.NewPtrMetadataRequest()
	for topic := range topics {
		one := kmsg.NewMetadataRequestTopic()
		one.Topic = &topic
		request.Topics = append(request.Topics, one)
	}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil
	}
	leaders, some := map[partition]bool{}, false
	for _, t := range response.Topics {
		if t.Topic == nil {
			continue
		}
		for _, p := range t.Partitions {
			led := p.Leader >= 0 && p.ErrorCode == 0
			leaders[partition{*t.Topic, p.Partition}] = led
			some = some || led
		}
	}
	if !some {
		return nil
	}
	return leaders
}
