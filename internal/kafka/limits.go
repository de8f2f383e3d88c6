package kafka

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Limits knows the max.message.bytes of topics, as far as the brokers tell, and
// what the client takes. It belongs to one goroutine.
//
// The limit is one of batches, after compression, and a broker refuses a batch as a
// whole. So a record above the limit is not refused here, because only the broker
// knows; but no later event of its key goes out with it: when the refusal comes, they
// would be there already. And records are not handed over together if they could
// make a batch above the limit: it would be refused, and the next one, which is
// smaller, be there before what is sent again.
type Limits struct {
	client int // ProducerBatchMaxBytes
	known  map[string]limit
}

type limit struct {
	bytes int // 0: unknown
	until time.Time
}

// MaxTopics bounds what is remembered about topics: far more than a service has.
const MaxTopics = 10_000

const (
	limitsFresh   = time.Minute
	limitsRetry   = 5 * time.Second // after no answer
	limitsTimeout = 2 * time.Second
	// limitsWorth is how many bytes for a topic are worth asking for: no sensible one
	// has a lower limit, and events that come alone are mostly not asked about.
	limitsWorth = 1000
)

// ReadClient learns the limit of a client, whose options are slow to ask for.
func (l *Limits) ReadClient(client *kgo.Client) {
	most, _ := client.OptValue(kgo.ProducerBatchMaxBytes).(int32) // it always has one
	l.client = int(most)
}

// Learn asks for the limits of the topics to which records go, where they matter and
// are not known.
func (l *Limits) Learn(ctx context.Context, client *kgo.Client, records []kgo.Record) {
	var topics []string
	var sums sums
	for i := range records {
		r := &records[i]
		before, sum := sums.add(r)
		if before < limitsWorth && sum >= limitsWorth && time.Now().After(l.known[r.Topic].until) {
			topics = append(topics, r.Topic)
		}
	}
	if len(topics) == 0 {
		return
	}
	if l.known == nil || len(l.known) > MaxTopics {
		l.known = map[string]limit{}
	}
	told, err := askLimits(ctx, client, topics)
	until := time.Now().Add(limitsFresh)
	if err != nil {
		until = time.Now().Add(limitsRetry)
	}
	for _, topic := range topics {
		l.known[topic] = limit{bytes: told[topic], until: until}
	}
}

// Exceeds reports whether a record may be too large for its topic.
func (l *Limits) Exceeds(r *kgo.Record) bool {
	size, most := batchOverhead+recordSize(r), l.known[r.Topic].bytes
	return size >= limitsWorth && (size > l.client || most > 0 && size > most)
}

// Fitting returns how many records, from the first on, no topic can refuse for being
// in one batch. Those with an error stay behind.
func (l *Limits) Fitting(records []kgo.Record, errs []error) int {
	if !l.narrow() {
		return len(records)
	}
	var sums sums
	for i := range records {
		r := &records[i]
		most := l.known[r.Topic].bytes
		if errs[i] != nil || most == 0 || most >= l.client {
			continue
		}
		if before, sum := sums.add(r); before > 0 && batchOverhead+sum > most {
			return i
		}
	}
	return len(records)
}

// narrow reports whether a topic takes less than the client, which is rare.
func (l *Limits) narrow() bool {
	for _, known := range l.known {
		if known.bytes > 0 && known.bytes < l.client {
			return true
		}
	}
	return false
}

// sums adds up the sizes of records by topic. Most come in runs of one topic.
type sums struct {
	of    map[string]*int
	topic string
	sum   *int // of topic
}

// add returns what the record's topic had before, and has now.
func (s *sums) add(r *kgo.Record) (before, now int) {
	if s.sum == nil || s.topic != r.Topic {
		if s.of == nil {
			s.of = map[string]*int{}
		}
		s.topic, s.sum = r.Topic, s.of[r.Topic]
		if s.sum == nil {
			s.sum = new(int)
			s.of[r.Topic] = s.sum
		}
	}
	before = *s.sum
	*s.sum += recordSize(r)
	return before, *s.sum
}

// batchOverhead is what a batch needs beside its records, in bytes.
const batchOverhead = 61

// recordSize is what a record needs in a batch at most, without compression.
func recordSize(r *kgo.Record) int {
	const overhead, fieldOverhead = 30, 10
	n := overhead + len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += fieldOverhead + len(h.Key) + len(h.Value)
	}
	return n
}

// askLimits asks the brokers. Where they do not answer, or not to us, a limit is
// unknown, and what they refuse is found out by sending.
func askLimits(ctx context.Context, client *kgo.Client, topics []string) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	request := kmsg.NewPtrDescribeConfigsRequest()
	for _, topic := range topics {
		resource := kmsg.NewDescribeConfigsRequestResource()
		resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeTopic, topic
		resource.ConfigNames = []string{"max.message.bytes"}
		request.Resources = append(request.Resources, resource)
	}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("describe topics: %w", err)
	}
	told := map[string]int{}
	for _, resource := range response.Resources {
		for _, c := range resource.Configs {
			if c.Name != "max.message.bytes" || c.Value == nil {
				continue
			}
			if n, err := strconv.Atoi(*c.Value); err == nil {
				told[resource.ResourceName] = n
			}
		}
	}
	return told, nil
}
