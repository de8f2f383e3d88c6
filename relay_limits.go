package outbox

import (
	"context"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// limits knows the max.message.bytes of topics, as far as the brokers tell, and
// what the client takes. It belongs to one goroutine.
//
// A record above the limit of its topic is not refused here, because the limit is
// one of compressed batches, and only the broker knows. But no later event of its
// key goes out with it: when the refusal comes, they would be there already.
type limits struct {
	client int // ProducerBatchMaxBytes
	known  map[string]limit
}

type limit struct {
	bytes int // 0: unknown
	until time.Time
}

const (
	limitsFresh   = time.Minute
	limitsTimeout = 2 * time.Second
	// limitsWorth is the size from which on a record is worth asking for: no
	// sensible topic has a lower limit, and most events are never asked about.
	limitsWorth = 1000
)

// of learns the limit of a client, whose options are slow to ask for.
func (l *limits) of(client *kgo.Client) {
	most, _ := client.OptValue(kgo.ProducerBatchMaxBytes).(int32) // it always has one
	l.client = int(most)
}

// exceeds reports whether a record may be too large for its topic.
func (l *limits) exceeds(ctx context.Context, client *kgo.Client, r *kgo.Record) bool {
	size := recordSize(r)
	if size < limitsWorth {
		return false
	}
	if size > l.client {
		return true
	}
	known, ok := l.known[r.Topic]
	if !ok || time.Now().After(known.until) {
		if l.known == nil || len(l.known) > maxTopics {
			l.known = map[string]limit{}
		}
		known = limit{bytes: askLimit(ctx, client, r.Topic), until: time.Now().Add(limitsFresh)}
		l.known[r.Topic] = known
	}
	return known.bytes > 0 && size > known.bytes
}

// recordSize is what a record needs in a batch of its own, without compression.
func recordSize(r *kgo.Record) int {
	const batchOverhead, fieldOverhead = 61 + 30, 10
	n := batchOverhead + len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += fieldOverhead + len(h.Key) + len(h.Value)
	}
	return n
}

// askLimit asks the brokers. Where they do not answer, or not to us, the limit is
// unknown, and what they refuse is found out by sending.
func askLimit(ctx context.Context, client *kgo.Client, topic string) int {
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	request := kmsg.NewPtrDescribeConfigsRequest()
	resource := kmsg.NewDescribeConfigsRequestResource()
	resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeTopic, topic
	resource.ConfigNames = []string{"max.message.bytes"}
	request.Resources = append(request.Resources, resource)
	response, err := request.RequestWith(ctx, client)
	if err != nil || len(response.Resources) == 0 {
		return 0
	}
	for _, c := range response.Resources[0].Configs {
		if c.Name == "max.message.bytes" && c.Value != nil {
			n, err := strconv.Atoi(*c.Value)
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}
