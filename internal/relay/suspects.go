package relay

import (
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/kafka"
)

// errSuspect is the error of a suspect.
var errSuspect = errors.New("not tried yet, because another partition accepts nothing")

// Partitions often turn bad together, with a broker that has gone, and to find out that one is bad costs the other
// events of its send [patience]. So partitions of other topics are suspects, too, in the spreading time after a
// partition turned bad, if they have not accepted an event under this lease. Those that have are tried: after a short
// outage of Kafka, or of the relay, all events would otherwise go through outbox_failed.
const spreading = 5 * time.Second

// Probe is called when suspects are probed from now on. Until then there are none, because nothing would show that
// they are good: who takes over from a process that is gone must not retry before the lease of that process has
// expired.
func (r *BadPartitions) Probe() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.probed = true
}

// Avoid returns the entry of a partition or of its topic. A partition is a suspect, and gets an entry, if it has not
// accepted an event since another one of its topic became bad, or at all, while one of another topic has just turned
// bad: an event for it could delay the others as long as the first. The next probe tries it.
func (r *BadPartitions) Avoid(at kafka.Partition) (badPartition, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.bad[at.Topic]
	if (b == nil || b.suspect && !r.probed) && at.Number != kafka.Unassigned {
		name := at.Name()
		if b = r.bad[name]; b == nil && r.isSuspect(at, name) {
			b = r.suspect(name)
		}
	}
	if b == nil || b.suspect && !r.probed {
		return badPartition{}, false
	}
	return *b, true
}

// isSuspect reports whether a partition without an entry is a suspect. The caller holds mu.
func (r *BadPartitions) isSuspect(at kafka.Partition, name string) bool {
	proven, failing := r.proven[at.Topic]
	switch {
	case !r.probed:
		return false
	case failing:
		return !proven[name]
	}
	return r.spreads() && !r.used.has(at)
}

// spreads reports whether partitions of topics without bad ones may be suspects. The caller holds mu.
func (r *BadPartitions) spreads() bool { return len(r.proven) > 0 && time.Since(r.failed) < spreading }

// suspect adds an entry for a suspect. The caller holds mu.
func (r *BadPartitions) suspect(name string) *badPartition {
	b := &badPartition{
		BadPartition: cursor.BadPartition{Name: name, Class: kafka.UnavailableClass(errSuspect), Err: errSuspect},
		since:        time.Now(), elsewhere: true, suspect: true,
	}
	r.bad[name] = b
	r.changed()
	return b
}

// Spreads reports whether a partition of any topic may be a suspect.
func (r *BadPartitions) Spreads() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.spreads()
}

// Sent records the partitions of the records without an error.
func (r *BadPartitions) Sent(records []kgo.Record, errs []error) { r.used.add(records, errs) }

// usedPartitions are those that have accepted an event. It is safe for concurrent use.
type usedPartitions struct {
	mu sync.Mutex
	of map[string][]bool // by topic and number of the partition
}

func (u *usedPartitions) add(records []kgo.Record, errs []error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	topic, used := "", []bool(nil) // of the last record; mostly, consecutive records are of one topic
	for i := range records {
		r := &records[i]
		if errs[i] != nil || r.Partition < 0 {
			continue
		}
		if r.Topic != topic || int(r.Partition) >= len(used) {
			topic, used = r.Topic, u.ofTopic(r.Topic, int(r.Partition)+1)
		}
		used[r.Partition] = true
	}
}

// ofTopic returns at least the first partitions of a topic. The caller holds mu.
func (u *usedPartitions) ofTopic(topic string, partitions int) []bool {
	used := u.of[topic]
	if len(used) >= partitions {
		return used
	}
	if len(u.of) >= kafka.MaxTopics {
		clear(u.of)
	}
	used = slices.Grow(used, partitions-len(used))[:partitions]
	u.of[topic] = used
	return used
}

func (u *usedPartitions) has(at kafka.Partition) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	used := u.of[at.Topic]
	return int(at.Number) < len(used) && used[at.Number]
}
