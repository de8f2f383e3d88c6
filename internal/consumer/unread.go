package consumer

import (
	"context"
	"maps"
	"time"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/wait"
)

// A broker may reject the fetches of one partition or topic and answer those of others: the right to read is gone, or
// a batch is damaged. The client would fetch such a partition again at once, without end. So it is paused for
// refetchPause after each failure. The outage of its topic lasts until a broker has answered a fetch of each such
// partition.

// refetchPause is how long a partition whose fetch has failed is not fetched.
const refetchPause = time.Second

// outageFetchingTopic and the name of a topic are the name of an outage in the log.
const outageFetchingTopic = "fetching topic "

// fetchFails notes that a fetch has failed: of a partition, of a whole topic, or if none is named, of everything.
func (m *membership) fetchFails(began time.Time, at kafka.Partition, err error) {
	if at.Topic == "" {
		m.outages.Report(outageFetching, began, err)
		return
	}
	if !m.addUnread(at, err) {
		return // it is not fetched any more
	}
	m.outages.Report(outageFetchingTopic+at.Topic, began, err)
	if at != at.WholeTopic() && m.workerOf(at) == nil {
		m.endUnread(at.Topic)
	}
}

// addUnread notes and pauses a partition whose fetch has failed. It returns false if the partition is not assigned.
func (m *membership) addUnread(at kafka.Partition, err error) (added bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if at != at.WholeTopic() {
		if m.workers[at] == nil {
			return false
		}
		m.pauseFetching(at) // here: once it was revoked and assigned again, nothing would resume it
	}
	if m.unread == nil {
		m.unread = map[kafka.Partition]error{}
	}
	m.unread[at] = err
	return true
}

// endUnread ends the outage of a topic if no partition is left whose fetch has failed: others have them now.
func (m *membership) endUnread(topic string) {
	if m.outages.Failing() && !m.hasUnread(topic) {
		m.outages.Abandon(outageFetchingTopic+topic, "this process has none of the partitions any more whose fetches have failed")
	}
}

// hasUnread reports whether fetches of a topic have failed, and none has been answered since.
func (m *membership) hasUnread(topic string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for at := range m.unread {
		if at.Topic == topic {
			return true
		}
	}
	return false
}

// fetchWorks notes that a broker has answered a fetch of a partition.
func (m *membership) fetchWorks(at kafka.Partition) {
	if !m.outages.Failing() {
		return
	}
	m.mu.Lock()
	delete(m.unread, at)
	delete(m.unread, at.WholeTopic())
	m.mu.Unlock()
	if !m.hasUnread(at.Topic) {
		m.outages.Report(outageFetchingTopic+at.Topic, time.Now(), nil)
	}
}

// refetch has the client fetch partitions again whose fetches have failed, until ctx is cancelled.
func (m *membership) refetch(ctx context.Context) {
	for ctx.Err() == nil {
		wait.Sleep(ctx, refetchPause)
		m.mu.Lock()
		unread := maps.Clone(m.unread)
		m.mu.Unlock()
		for at := range unread {
			m.resumeStalled(at)
		}
		round, cancel := context.WithTimeout(ctx, probeTimeout)
		for at, err := range unread {
			m.probe(round, at, err)
		}
		cancel()
	}
}

// probe sends a fetch of its own, because the client returns no answers without records. It does so only where a broker
// has rejected the last one: whether records can be decoded, only the client says.
func (m *membership) probe(ctx context.Context, at kafka.Partition, failed error) {
	client, err := m.second.get()
	if err != nil || !kafka.IsAnswer(failed) {
		return
	}
	if at == at.WholeTopic() {
		if bad, err := kafka.CheckTopics(ctx, client, []string{at.Topic}); err == nil && bad[at.Topic] == nil {
			m.fetchWorks(at)
		}
		return
	}
	if w := m.workerOf(at); w != nil && w.hasBegun() {
		if _, err := kafka.NewReader(client).Raw(ctx, at, m.starts.TopicID(at.Topic), w.nextRead()); err == nil {
			m.fetchWorks(at)
		}
	}
}

// probeTimeout bounds the waits for the answers to the probes of all partitions, which are fetched again after that.
const probeTimeout = 5 * time.Second
