package kafka

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// Limits has the max.message.bytes of topics, as far as the brokers return it, and the
// limit of the client. It belongs to one goroutine.
//
// The limit is one of batches, after compression, and a broker rejects a batch as a
// whole. Only the broker can decide whether a record is too large, so a record above the
// limit is sent, but no later event of its key together with it: those would be written
// before the rejection arrives. And records are not sent together if they could make a
// batch above the limit: the broker would reject it and accept the next, smaller batch,
// so the records of the first would be written after those of the second.
type Limits struct {
	client int // ProducerBatchMaxBytes
	known  map[string]limit
}

type limit struct {
	bytes int // 0: unknown
	until time.Time
}

// MaxTopics bounds the memory for topics. No service has so many.
const MaxTopics = 10_000

const (
	limitsFresh   = time.Minute
	limitsRetry   = 5 * time.Second // after no answer
	limitsTimeout = 2 * time.Second
	// minAskedBytes is how many bytes must go to a topic before its limit is asked for:
	// hardly any topic has a lower limit, and single events are mostly smaller.
	minAskedBytes = 1000
)

// ReadClient reads the limit of a client. It is slow, so it is not done for each send.
func (l *Limits) ReadClient(client *kgo.Client) {
	most, _ := client.OptValue(kgo.ProducerBatchMaxBytes).(int32) // it always has one
	l.client = int(most)
}

// Learn asks the brokers for the limits of topics to which records are sent, if they
// matter and are not known.
func (l *Limits) Learn(ctx context.Context, client *kgo.Client, records []kgo.Record) {
	var topics []string
	var sums sums
	for i := range records {
		r := &records[i]
		before, sum := sums.add(r)
		if before < minAskedBytes && sum >= minAskedBytes && time.Now().After(l.known[r.Topic].until) {
			topics = append(topics, r.Topic)
		}
	}
	if len(topics) == 0 {
		return
	}
	if l.known == nil || len(l.known) > MaxTopics {
		l.known = map[string]limit{}
	}
	limits, err := askLimits(ctx, client, topics)
	until := time.Now().Add(limitsFresh)
	if err != nil {
		until = time.Now().Add(limitsRetry)
	}
	for _, topic := range topics {
		l.known[topic] = limit{bytes: limits[topic], until: until}
	}
}

// Exceeds reports whether a record may be too large for its topic.
func (l *Limits) Exceeds(r *kgo.Record) bool {
	size, most := batchOverhead+recordSize(r), l.known[r.Topic].bytes
	return size >= minAskedBytes && (size > l.client || most > 0 && size > most)
}

// OfClient returns a function that reports whether a record may be too large for the client, which then does not send
// it. Any goroutine may call it.
func (l *Limits) OfClient() func(*kgo.Record) bool {
	most := l.client
	return func(r *kgo.Record) bool { return batchOverhead+recordSize(r) > most }
}

// Fitting returns how many records, from the first on, can be sent together without a
// batch above the limit of its topic. Records with an error do not count.
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

// narrow reports whether a topic has a lower limit than the client, which is rare.
func (l *Limits) narrow() bool {
	for _, known := range l.known {
		if known.bytes > 0 && known.bytes < l.client {
			return true
		}
	}
	return false
}

// sums adds up the sizes of records by topic. Mostly, consecutive records are of one
// topic.
type sums struct {
	of    map[string]*int
	topic string
	sum   *int // of topic
}

// add returns the sum of the record's topic before the record and with it.
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

// batchOverhead is the size of a batch without its records, in bytes.
const batchOverhead = 61

// recordSize returns the size of a record in a batch, at most, without compression.
func recordSize(r *kgo.Record) int {
	const overhead, fieldOverhead = 30, 10
	return overhead + len(r.Headers)*fieldOverhead + userSize(r)
}

// userSize returns the bytes of a record that are the user's, as clients count them.
func userSize(r *kgo.Record) int {
	n := len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += len(h.Key) + len(h.Value)
	}
	return n
}

// askLimits asks the brokers. If they do not answer, or if the client may not ask, a limit
// is unknown, and only sending shows which records the broker rejects.
func askLimits(ctx context.Context, client *kgo.Client, topics []string) (map[string]int, error) {
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	const setting = "max.message.bytes"
	response, err := firstAnswer(ctx, client, func(ctx context.Context, b *kgo.Broker) (kmsg.Response, error) {
		return b.Request(ctx, SettingsRequest(topics, setting)) // the client writes into a request
	})
	if err != nil {
		return nil, fmt.Errorf("describe topics: %w", err)
	}
	limits := map[string]int{}
	for _, resource := range response.(*kmsg.DescribeConfigsResponse).Resources {
		if n, err := strconv.Atoi(SettingsOf(resource)[setting]); err == nil {
			limits[resource.ResourceName] = n
		}
	}
	return limits, nil
}

// IsCompacted reports whether a topic is compacted, as far as the client may know.
func IsCompacted(ctx context.Context, client *kgo.Client, topic string) bool {
	ctx, cancel := context.WithTimeout(ctx, limitsTimeout)
	defer cancel()
	response, err := SettingsRequest([]string{topic}, CleanupPolicy).RequestWith(ctx, client)
	return err == nil && len(response.Resources) == 1 && Compacts(SettingsOf(response.Resources[0]))
}

// CleanupPolicy is the setting of a topic that says which records Kafka removes.
const CleanupPolicy = "cleanup.policy"

// Compacts reports whether a topic with these settings keeps only the last record of each key.
func Compacts(settings map[string]string) bool {
	return strings.Contains(settings[CleanupPolicy], "compact")
}

// SettingsRequest returns the request for settings of topics.
func SettingsRequest(topics []string, names ...string) *kmsg.DescribeConfigsRequest {
	request := kmsg.NewPtrDescribeConfigsRequest()
	for _, topic := range topics {
		resource := kmsg.NewDescribeConfigsRequestResource()
		resource.ResourceType, resource.ResourceName = kmsg.ConfigResourceTypeTopic, topic
		resource.ConfigNames = names
		request.Resources = append(request.Resources, resource)
	}
	return request
}

// SettingsOf returns the settings of a topic by their names. Those that the client may not read are missing.
func SettingsOf(r kmsg.DescribeConfigsResponseResource) map[string]string {
	settings := map[string]string{}
	for _, c := range r.Configs {
		if c.Value != nil {
			settings[c.Name] = *c.Value
		}
	}
	return settings
}
