package starts

import (
	"context"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

const (
	// watchInterval is how often new partitions and recreated topics are looked for. The client itself
	// looks every five minutes.
	watchInterval = 10 * time.Second
	// MissingInterval is how often topics are looked for that do not exist yet.
	MissingInterval = time.Second
	// MissingPatience is how long a topic may be missing without a warning: the service may create it
	// while the consumer starts.
	MissingPatience = 5 * time.Second
	// mostStalls is how often a broker may not know a partition of an existing topic before a new
	// client tries.
	mostStalls = 3
)

// watch compares the topics with what the client knows until ctx is cancelled.
func (m *Member) watch(ctx context.Context) {
	warned := map[string]bool{}
	for start := time.Now(); ctx.Err() == nil; {
		began, interval := time.Now(), MissingInterval
		if found, err := m.describe(ctx, m.cfg.Topics); err == nil { // else fetching fails too
			m.compare(began, found)
			if !m.findMissing(found, time.Since(start), warned) {
				interval = watchInterval
			}
		}
		wait.Await(ctx, ctx, m.stalled, interval)
	}
}

// findMissing reports whether topics do not exist, and warns of each once if that lasts.
func (m *Member) findMissing(found map[string]topicInfo, lasts time.Duration, warned map[string]bool) (missing bool) {
	for name, t := range found {
		if len(t.partitions) > 0 || m.saw(name) {
			continue
		}
		missing = true
		if lasts > MissingPatience && !warned[name] {
			warned[name] = true
			m.cfg.Log.Warn("outbox: topic does not exist, it will be read from its beginning", "topic", name)
		}
	}
	return missing
}

// compare refreshes the client's metadata if topics have partitions that it does not know, reports topics that have
// gone, and resumes topics that exist again.
func (m *Member) compare(began time.Time, found map[string]topicInfo) {
	for name, t := range found {
		if slices.ContainsFunc(t.partitions, func(p int32) bool { return !m.knows(name, p) }) {
			m.client.ForceMetadataRefresh()
		}
		if len(t.partitions) == 0 && m.saw(name) {
			m.cfg.Outages.Report(outageTopic+name, began, kerr.UnknownTopicOrPartition)
			continue
		}
		if len(t.partitions) > 0 && m.isThere(name, began) {
			if !m.awaits(name) {
				m.cfg.Outages.Report(outageTopic+name, began, nil)
			}
			m.resume(name)
		}
	}
}

// knows reports whether the client has metadata of a partition.
func (m *Member) knows(topic string, partition int32) bool {
	leader, epoch, _ := m.client.PartitionLeader(topic, partition)
	return leader >= 0 || epoch >= 0
}

// Missing notes that Kafka has refused a request because a topic does not exist or may not be
// described. It wakes watch, which describes the topic again.
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

// isThere notes that a topic exists, by an answer to a request of the time began. It returns false if
// the topic was missing after that.
func (m *Member) isThere(topic string, began time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.missing[topic].After(began) {
		return false
	}
	delete(m.missing, topic)
	return true
}

// MayCommit reports whether offsets of a topic may be committed. They must not while the topic is missing, or after it
// was replaced: brokers before Kafka 4.1 know it by its name, and would take the offsets for those of the new topic.
func (m *Member) MayCommit(topic string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, missing := m.missing[topic]
	return !missing && !m.replaced[topic]
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

// Stall pauses fetching of a partition whose broker does not know its topic, until the topic is found
// again. The client would otherwise retry without a pause.
func (m *Member) Stall(at kafka.Partition) {
	m.cfg.Pause(at)
	m.mu.Lock()
	m.stalls[at]++
	m.missing[at.Topic] = time.Now()
	m.mu.Unlock()
	wait.Signal(m.stalled)
}

// resume resumes fetching of stalled partitions of a topic that exists. After mostStalls a new client
// takes over.
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
