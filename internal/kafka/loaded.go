package kafka

import (
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Loaded are the topics whose partitions a client has. While the client loads those of a topic, it makes batches of the
// records that wait for them one by one. In a flush it already sends the first of these batches. If Kafka rejects that
// batch, the client fails what is in batches, and sends what is not: later events of a key would be written before
// earlier ones. So a flush waits for the partitions. Loaded belongs to one goroutine.
type Loaded map[string]bool

// Missing returns the topics of records that are not among them. Records with an error do not count.
func (l Loaded) Missing(records []kgo.Record, errs []error) (topics []string) {
	last := ""
	var seen map[string]bool
	for i := range records {
		topic := records[i].Topic
		if topic == last || errs[i] != nil {
			continue
		}
		if last = topic; l[topic] || seen[topic] {
			continue
		}
		if seen == nil {
			seen = map[string]bool{}
		}
		seen[topic] = true
		topics = append(topics, topic)
	}
	return topics
}

// Note adds those of the topics whose partitions the client has meanwhile.
func (l Loaded) Note(client *kgo.Client, topics []string) {
	for _, topic := range topics {
		if hasLoaded(client, topic) {
			l[topic] = true
		}
	}
}

// maxLoad bounds the wait for the partitions of a topic: the records of other topics wait, too.
const maxLoad = time.Second

// AwaitLoaded waits until a client that has records of topics has made batches of them, or done is closed.
func AwaitLoaded(done <-chan struct{}, client *kgo.Client, topics []string) {
	until := time.Now().Add(maxLoad)
	for _, topic := range topics {
		for !hasLoaded(client, topic) && time.Now().Before(until) {
			select {
			case <-done:
				return
			case <-time.After(time.Millisecond):
			}
		}
	}
}

// hasLoaded reports whether a client has the partitions of a topic. The client stores them after it has made batches of
// the records that waited. A partition without a leader has an epoch.
func hasLoaded(client *kgo.Client, topic string) bool {
	leader, epoch, _ := client.PartitionLeader(topic, 0) // the error is that of what is not loaded
	return leader >= 0 || epoch >= 0
}
