package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// ErrNoLeader is the outcome of an event whose partition has no leader, while
// another partition of the topics in the same send has one.
var ErrNoLeader = errors.New("partition has no leader")

// MarkLeaderless wraps in [ErrNoLeader] the failures whose partition has no leader. It
// asks Kafka only if every record of a send failed, because that looks like an outage
// of Kafka, which all events have to wait for. If Kafka does not answer, or no
// partition has a leader, it is an outage of Kafka, and nothing is marked.
func MarkLeaderless(ctx context.Context, client *kgo.Client, records []kgo.Record, errs []error) {
	asked := map[string]bool{}
	for i := range records {
		if errs[i] == nil {
			return
		}
		if records[i].Partition != Unassigned {
			asked[records[i].Topic] = true
		}
	}
	if len(asked) == 0 {
		return
	}
	leaders := askLeaders(ctx, client, asked)
	for i := range records {
		if led, known := leaders[PartitionOf(&records[i])]; known && !led && RejectionClass(errs[i]) == "" {
			errs[i] = fmt.Errorf("%w: %w", ErrNoLeader, errs[i])
		}
	}
}

// AnswerTimeout bounds a request for metadata.
const AnswerTimeout = 2 * time.Second

// askLeaders returns which partitions of topics have a leader. It returns nil if
// none has.
func askLeaders(ctx context.Context, client *kgo.Client, topics map[string]bool) map[Partition]bool {
	ctx, cancel := context.WithTimeout(ctx, AnswerTimeout)
	defer cancel()
	response, err := Metadata(ctx, client, slices.Collect(maps.Keys(topics))...)
	if err != nil {
		return nil
	}
	leaders, some := map[Partition]bool{}, false
	for _, t := range response.Topics {
		if t.Topic == nil {
			continue
		}
		for _, p := range t.Partitions {
			led := p.Leader >= 0 && p.ErrorCode == 0
			leaders[Partition{*t.Topic, p.Partition}] = led
			some = some || led
		}
	}
	if !some {
		return nil
	}
	return leaders
}
