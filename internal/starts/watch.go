package starts

import (
	"context"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

const (
	// WatchInterval is how long new partitions and topics, and topics that were created
	// again, may remain unnoticed. The client itself looks every five minutes.
	WatchInterval = 10 * time.Second
	// mostStalls is how often a partition may be unknown to its broker, although the
	// topic is there, before another client tries.
	mostStalls = 3
)

// watch compares the topics with what the client knows until ctx is cancelled.
func (m *Member) watch(ctx context.Context) {
	partitions := map[string]int{} // of topics, when they were compared last
	for ctx.Err() == nil {
		began := time.Now()
		if found, err := m.describe(ctx, m.cfg.Topics); err == nil { // else fetching fails too
			m.compare(began, found, partitions)
		}
		wait.Await(ctx, ctx, m.stalled, WatchInterval)
	}
}

// compare makes the client look for partitions and topics that are new.
func (m *Member) compare(began time.Time, found map[string]topicInfo, partitions map[string]int) {
	for name, t := range found {
		if before, ok := partitions[name]; ok && before < len(t.partitions) {
			m.client.ForceMetadataRefresh()
		}
		partitions[name] = len(t.partitions)
		if len(t.partitions) == 0 && m.saw(name) {
			m.cfg.Outages.Report(outageTopic+name, began, kerr.UnknownTopicOrPartition)
			continue
		}
		if len(t.partitions) > 0 && m.isThere(name, began) {
			m.cfg.Outages.Report(outageTopic+name, began, nil)
			m.resume(name)
		}
	}
}

// Missing notes that Kafka has refused something because of a topic: it does not know the
// topic, or does not let us see it. The topic is looked at soon.
func (m *Member) Missing(topic string, err error) {
	now := time.Now()
	m.cfg.Outages.Report(outageTopic+topic, now, err)
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, known := m.missing[topic]; !known {
		wait.Signal(m.stalled)
	}
	m.missing[topic] = now
}

// isThere notes that a topic was found by a look that began at a time. It returns false if it
// was missing after that.
func (m *Member) isThere(topic string, began time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.missing[topic].After(began) {
		return false
	}
	delete(m.missing, topic)
	return true
}

// SawTopics reports whether this client has seen any of its topics.
func (m *Member) SawTopics() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.ids) > 0
}

// saw reports whether this client has seen a topic.
func (m *Member) saw(topic string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.ids[topic]
	return ok
}

// Stall keeps the client from asking for a partition whose topic its broker does not
// know, which it would do without a pause, until the topic is found again.
func (m *Member) Stall(at kafka.Partition) {
	m.cfg.Pause(at)
	m.mu.Lock()
	m.stalls[at]++
	m.mu.Unlock()
	wait.Signal(m.stalled)
}

// resume tries the partitions of a topic again that is there, or, if that did not help
// before, has another client try.
func (m *Member) resume(topic string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.omitted[topic] {
		m.endOutdated("topic is there again, a new client reads it", topic)
	}
	for at, times := range m.stalls {
		if at.Topic != topic {
			continue
		}
		if times > mostStalls {
			m.endOutdated("brokers do not know a topic that is there, a new client tries", topic)
		}
		m.cfg.Resume(at)
	}
}
