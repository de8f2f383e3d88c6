package relay

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
)

// badPartition is a topic or a partition that accepts nothing.
type badPartition struct {
	cursor.BadPartition
	since     time.Time // of the first failure; a suspect has none yet, and it is when it became one
	elsewhere bool      // another partition has accepted an event; until then it may be an outage of Kafka
	suspect   bool      // not tried: other partitions accept nothing
}

// BadPartitions remembers which topics and partitions accept nothing. Events for such a partition are not tried, so
// they delay no other events. It is safe for concurrent use.
//
// A partition or a whole topic is named as [kafka.Partition.Name] does: topic, or topic/number.
type BadPartitions struct {
	log     *outage.Logs
	failing atomic.Bool // there is a bad partition; saves the lock where there is none

	mu       sync.Mutex
	bad      map[string]*badPartition
	accepted map[string]time.Time       // when a partition that was bad was last good, for an hour
	claimed  map[string]bool            // partitions whose waiting events a retrier sends
	proven   map[string]map[string]bool // topics with bad partitions, and their partitions that have accepted an event since
	failed   time.Time                  // when a partition turned bad last
	probed   bool                       // suspects are probed
	swept    time.Time                  // when accepted was looked through last
	used     usedPartitions
}

// NewBadPartitions returns an empty registry. It reports to log each partition that becomes bad or good.
func NewBadPartitions(log *outage.Logs) *BadPartitions {
	return &BadPartitions{
		log: log, bad: map[string]*badPartition{}, accepted: map[string]time.Time{}, claimed: map[string]bool{},
		proven: map[string]map[string]bool{}, used: usedPartitions{of: map[string][]bool{}},
	}
}

// Failing reports whether there is a bad partition, or one whose recovery is not logged yet. While there is none, a
// success need not be reported.
func (r *BadPartitions) Failing() bool { return r.failing.Load() || r.log.Failing() }

// Load adds partitions for which events have waited since before the registry was made. It skips those that have
// accepted an event since. A suspect stays one, and a whole topic becomes one: in an outage of Kafka its partitions may
// not have been known.
func (r *BadPartitions) Load(loaded []cursor.BadPartition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range loaded {
		if b.Name == "" { // nothing in particular
			continue
		}
		if _, good := r.accepted[b.Name]; !good && r.bad[b.Name] == nil {
			suspect := b.Err != nil && b.Err.Error() == errSuspect.Error() || !strings.Contains(b.Name, "/")
			r.bad[b.Name] = &badPartition{BadPartition: b, since: time.Now(), elsewhere: suspect, suspect: suspect}
		}
	}
	r.changed()
}

// changed brings up to date what follows from the bad partitions. The caller holds mu.
func (r *BadPartitions) changed() {
	r.failing.Store(len(r.bad) > 0)
	proven := map[string]map[string]bool{}
	for name, b := range r.bad {
		if topic, _, partition := strings.Cut(name, "/"); partition && b.elsewhere && !b.suspect && proven[topic] == nil {
			if proven[topic] = r.proven[topic]; proven[topic] == nil {
				proven[topic] = map[string]bool{}
			}
		}
	}
	r.proven = proven
}

// Fail makes a partition bad. It ignores a try that began before the partition was last good, because several clients
// need not notice the end of an outage at the same time.
func (r *BadPartitions) Fail(at kafka.Partition, began time.Time, class string, err error) {
	r.log.Report(at.String(), began, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	name := at.Name()
	if began.Before(r.accepted[name]) {
		return
	}
	b := r.bad[name]
	if b == nil || b.suspect {
		b = &badPartition{BadPartition: cursor.BadPartition{Name: name}, since: time.Now(), elsewhere: b != nil}
		r.bad[name] = b
		if at != at.WholeTopic() {
			r.failed = b.since
		}
		r.changed() // looks at all, so not for each probe
	}
	b.Class, b.Err = class, err
	delete(r.proven[at.Topic], name)
}

// Accept records that a partition has accepted an event, in a try that began at a time. The partition and its topic are
// good now, and the failures of all other partitions are no outage of Kafka. Accept reports whether a bad partition has
// become good.
func (r *BadPartitions) Accept(at kafka.Partition, began time.Time) (recovered bool) {
	topic := at.WholeTopic()
	r.log.Report(topic.String(), began, nil)
	r.log.Report(at.String(), began, nil)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range []string{topic.Name(), at.Name()} {
		if r.bad[name] != nil {
			r.makeGood(name)
			recovered = true
		}
	}
	for _, b := range r.bad {
		b.elsewhere = true
	}
	r.changed()
	if proven := r.proven[at.Topic]; proven != nil {
		proven[at.Name()] = true
	}
	return recovered
}

// goodFor is how long it is remembered that a partition has become good: no try takes as long.
const goodFor = time.Hour

// makeGood removes a bad partition. The caller holds mu, and calls changed.
func (r *BadPartitions) makeGood(name string) {
	delete(r.bad, name)
	now := time.Now()
	r.accepted[name] = now
	if now.Sub(r.swept) > goodFor/60 { // thousands may become good at the same time
		maps.DeleteFunc(r.accepted, func(_ string, at time.Time) bool { return now.Sub(at) > goodFor })
		r.swept = now
	}
}

// Forget makes a partition good for which no event waits: no retry could show that it has recovered. The next event for
// it is tried.
func (r *BadPartitions) Forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.bad[name] != nil {
		r.makeGood(name)
		r.changed()
	}
}

// All returns the bad partitions and topics, sorted by name.
func (r *BadPartitions) All() (all []badPartition) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(r.bad)) {
		all = append(all, *r.bad[name])
	}
	return all
}

// Outages returns those of the reported outages that are of bad partitions and topics. The log remembers others: those
// of partitions for which nothing waits any more, and those of an earlier lease.
func (r *BadPartitions) Outages() []outage.Named {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(r.log.Current(), func(o outage.Named) bool {
		_, name, _ := strings.Cut(o.Name, " ") // see [kafka.Partition.String]
		return r.bad[name] == nil
	})
}

// Names returns the names of the suspects, or of the other bad partitions and topics.
func (r *BadPartitions) Names(suspects bool) (names []string) {
	for _, b := range r.All() {
		if b.suspect == suspects {
			names = append(names, b.Name)
		}
	}
	return names
}

// HaveTurnedBad reports whether a partition has turned bad within a time.
func (r *BadPartitions) HaveTurnedBad(within time.Duration) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range r.bad {
		if time.Since(b.since) < within {
			return true
		}
	}
	return false
}

// Topics returns the topics with bad partitions.
func (r *BadPartitions) Topics() (topics []string) {
	for _, b := range r.All() {
		if topic, _, partition := strings.Cut(b.Name, "/"); partition && !slices.Contains(topics, topic) {
			topics = append(topics, topic)
		}
	}
	return topics
}

// Claim reports whether the caller may send the events that wait for a partition, until [BadPartitions.Release]. Probes
// may claim bad partitions only, and other retries good ones only.
func (r *BadPartitions) Claim(name string, probe bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if bad := r.bad[name] != nil; r.claimed[name] || bad != probe {
		return false
	}
	r.claimed[name] = true
	return true
}

// Release ends a claim.
func (r *BadPartitions) Release(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.claimed, name)
}
