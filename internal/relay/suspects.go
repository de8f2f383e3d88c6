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

// Partitions often turn bad together, with a broker that has gone. To find out that one is bad costs the other events
// of its send [patience]. So in the spreading time after a partition turned bad, those of other topics that have not
// accepted an event within lately are suspects. All partitions that turn bad together cost about a second at most.
const (
	spreading = 5 * time.Second
	lately    = time.Second
)

// Avoid returns the entry of a partition or of its topic. A partition is a suspect, and gets an entry, if it has not
// accepted an event since another one of its topic became bad, or lately, while one of another topic has just turned
// bad: an event for it could delay the others as long as the first. The next probe tries it.
func (r *BadPartitions) Avoid(at kafka.Partition) (badPartition, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	b := r.bad[at.Topic]
	if b == nil && at.Number != kafka.Unassigned {
		name := at.Name()
		if b = r.bad[name]; b == nil && r.isSuspect(at, name) {
			b = r.suspect(name)
		}
	}
	if b == nil {
		return badPartition{}, false
	}
	return *b, true
}

// isSuspect reports whether a partition without an entry is a suspect. The caller holds mu.
func (r *BadPartitions) isSuspect(at kafka.Partition, name string) bool {
	proven, failing := r.proven[at.Topic]
	if failing {
		return !proven[name]
	}
	return r.spreads() && !r.lately.has(at)
}

// spreads reports whether other partitions than those of bad topics may be suspects. The caller holds mu.
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

// Answered records the partitions of the records without an error: these are no suspects for a while.
func (r *BadPartitions) Answered(records []kgo.Record, errs []error) { r.lately.add(records, errs) }

// acceptTimes has when partitions have accepted an event last. It is safe for concurrent use.
type acceptTimes struct {
	from time.Time

	mu sync.Mutex
	of map[string][]time.Duration // by topic and number of the partition, since from; 0: never
}

func newAcceptTimes() acceptTimes {
	return acceptTimes{from: time.Now(), of: map[string][]time.Duration{}}
}

func (a *acceptTimes) add(records []kgo.Record, errs []error) {
	now := time.Since(a.from)
	a.mu.Lock()
	defer a.mu.Unlock()
	topic, times := "", []time.Duration(nil) // of the last record; mostly, consecutive records are of one topic
	for i := range records {
		r := &records[i]
		if errs[i] != nil || r.Partition < 0 {
			continue
		}
		if r.Topic != topic || int(r.Partition) >= len(times) {
			topic, times = r.Topic, a.timesOf(r.Topic, int(r.Partition)+1)
		}
		times[r.Partition] = now
	}
}

// timesOf returns the times of at least the first partitions of a topic. The caller holds mu.
func (a *acceptTimes) timesOf(topic string, partitions int) []time.Duration {
	times := a.of[topic]
	if len(times) >= partitions {
		return times
	}
	if len(a.of) >= kafka.MaxTopics {
		clear(a.of)
	}
	times = slices.Grow(times, partitions-len(times))[:partitions]
	a.of[topic] = times
	return times
}

// has reports whether a partition has accepted an event lately.
func (a *acceptTimes) has(at kafka.Partition) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	times := a.of[at.Topic]
	return int(at.Number) < len(times) && times[at.Number] > 0 && time.Since(a.from)-times[at.Number] <= lately
}
