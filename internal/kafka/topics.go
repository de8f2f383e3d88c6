package kafka

import (
	"context"
	"errors"
	"iter"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// ErrNoLeader is the outcome of an event whose partition has no leader.
var ErrNoLeader = errors.New("partition has no leader")

// answerTimeout bounds a question to Kafka.
const answerTimeout = 2 * time.Second

// Topics knows what Kafka has answered about the topics to which a client sends. A client waits for
// a topic that it does not find, and delays all records that it was given at the same time. So the
// sender asks Kafka about a topic first. Topics belongs to one goroutine.
type Topics struct {
	client      *kgo.Client
	creates     bool // the client creates missing topics
	partitioner kgo.Partitioner
	known       map[string]topic // those to which events can be sent
	maxAge      time.Duration    // of the metadata of a topic with a bad partition
}

// maxAge is how old the metadata of a topic may be, unless the client asks more often: the topic
// may get more partitions, and then keys move to other ones.
const maxAge = time.Minute

type topic struct {
	partitions  int
	partitioner kgo.TopicPartitioner
	learned     time.Time
}

// TopicsOf returns a Topics without metadata for a new client.
func TopicsOf(client *kgo.Client) *Topics {
	t := &Topics{client: client, known: map[string]topic{}, maxAge: maxAge}
	if age, ok := client.OptValue(kgo.MetadataMaxAge).(time.Duration); ok {
		t.maxAge = min(age, maxAge)
	}
	t.creates, _ = client.OptValue(kgo.AllowAutoTopicCreation).(bool)
	t.partitioner, _ = client.OptValue(kgo.RecordPartitioner).(kgo.Partitioner)
	return t
}

// Learn asks Kafka about those of some topics that are not known, all in one request. It
// returns the errors of topics that are missing, or that the client may not see. If no
// broker answers, it learns nothing.
func (t *Topics) Learn(ctx context.Context, names iter.Seq[string]) (bad map[string]error) {
	return t.learn(ctx, t.unknown(names))
}

// Refresh asks Kafka about those of some topics whose metadata is missing or old.
func (t *Topics) Refresh(ctx context.Context, names []string) {
	t.learn(ctx, slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		known, ok := t.known[name]
		return ok && time.Since(known.learned) < t.maxAge
	}))
}

func (t *Topics) learn(ctx context.Context, unknown []string) (bad map[string]error) {
	if len(unknown) == 0 {
		return nil
	}
	answers, err := ask(ctx, t.client, unknown)
	if err != nil {
		return nil // sending returns the error
	}
	bad = map[string]error{}
	for _, answer := range answers {
		if err := kerr.ErrorForCode(answer.ErrorCode); err == nil {
			t.add(*answer.Topic, len(answer.Partitions))
		} else if IsTopicOutage(err) && (!t.creates || !errors.Is(err, kerr.UnknownTopicOrPartition)) {
			bad[*answer.Topic] = err
		}
	}
	return bad
}

// unknown returns the topics that are not known, each once.
func (t *Topics) unknown(names iter.Seq[string]) (unknown []string) {
	last, seen := "", map[string]bool(nil)
	for name := range names {
		if name == last { // mostly, consecutive events are of one topic
			continue
		}
		last = name
		if _, known := t.known[name]; known || name == "" || seen[name] {
			continue
		}
		if seen == nil {
			seen = map[string]bool{}
		}
		seen[name] = true
		unknown = append(unknown, name)
	}
	return unknown
}

func (t *Topics) add(name string, partitions int) {
	if len(t.known) >= MaxTopics {
		clear(t.known)
	}
	if known, ok := t.known[name]; ok && known.partitions != partitions {
		t.client.ForceMetadataRefresh() // so that it goes by the same number
	}
	t.known[name] = topic{partitions: partitions, partitioner: t.partitioner.ForTopic(name), learned: time.Now()}
}

// Forget makes Learn ask about a topic again, because a record of it has failed.
func (t *Topics) Forget(name string) { delete(t.known, name) }

// Partition predicts the partition to which a record with a key goes. It returns
// Unassigned if the topic is not known.
func (t *Topics) Partition(name string, key []byte) Partition {
	known, ok := t.known[name]
	if !ok || known.partitions == 0 || len(key) == 0 {
		return Partition{name, Unassigned}
	}
	r := &kgo.Record{Topic: name, Key: key, Partition: Unassigned}
	var n int
	if by, ok := known.partitioner.(kgo.TopicBackupPartitioner); ok {
		n = by.PartitionByBackup(r, known.partitions, &emptyBackups{rest: known.partitions})
	} else {
		n = known.partitioner.Partition(r, known.partitions)
	}
	if n < 0 || n >= known.partitions {
		n = Unassigned
	}
	return Partition{name, int32(n)}
}

// emptyBackups says that nothing is buffered for any partition. For a record with a key
// it makes no difference.
type emptyBackups struct{ rest int }

func (b *emptyBackups) Next() (int, int64) { b.rest--; return b.rest, 0 }
func (b *emptyBackups) Rem() int           { return b.rest }

// Explain returns no error if Kafka works although records of topics have failed: a broker
// answers, and gives out a producer id. If so, the failures are those of topics and
// partitions, and causes has what Kafka says of these. The error names the brokers.
func Explain(ctx context.Context, client *kgo.Client, topics []string) (causes map[Partition]error, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	answers, err := firstAnswer(ctx, client, func(ctx context.Context, b *kgo.Broker) ([]kmsg.MetadataResponseTopic, error) {
		answers, err := askBroker(ctx, b, topics)
		if err != nil {
			return nil, err
		}
		return answers, askProducerID(ctx, b)
	})
	return causesOf(answers), err
}

// causesOf returns the errors of topics and partitions.
func causesOf(answers []kmsg.MetadataResponseTopic) map[Partition]error {
	causes := map[Partition]error{}
	for _, answer := range answers {
		if err := kerr.ErrorForCode(answer.ErrorCode); IsTopicOutage(err) {
			causes[Partition{*answer.Topic, Unassigned}] = err
		}
		for _, p := range answer.Partitions {
			if p.Leader < 0 || p.ErrorCode != 0 {
				causes[Partition{*answer.Topic, p.Partition}] = ErrNoLeader
			}
		}
	}
	return causes
}

// CheckTopics returns the error of each topic that is missing, or that the client may not describe.
// Its own error means that Kafka did not answer.
func CheckTopics(ctx context.Context, client *kgo.Client, topics []string) (bad map[string]error, err error) {
	answers, err := ask(ctx, client, topics)
	bad = map[string]error{}
	for _, answer := range answers {
		if err := kerr.ErrorForCode(answer.ErrorCode); IsTopicOutage(err) {
			bad[*answer.Topic] = err
		}
	}
	return bad, err
}

// ask asks Kafka about topics. It creates none.
func ask(ctx context.Context, client *kgo.Client, names []string) ([]kmsg.MetadataResponseTopic, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	return firstAnswer(ctx, client, func(ctx context.Context, b *kgo.Broker) ([]kmsg.MetadataResponseTopic, error) {
		return askBroker(ctx, b, names)
	})
}

func askBroker(ctx context.Context, b *kgo.Broker, names []string) ([]kmsg.MetadataResponseTopic, error) {
	response, err := b.Request(ctx, metadataRequest(names...))
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(response.(*kmsg.MetadataResponse).Topics, func(answer kmsg.MetadataResponseTopic) bool {
		return answer.Topic == nil
	}), nil
}
