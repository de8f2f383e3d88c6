package faults

import (
	"encoding/json"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/oracle"
)

// marks are the records of one sender, in the order in which they were made. As a hook of the
// sender's clients it learns when Kafka accepts them.
type marks struct {
	mu  sync.Mutex
	all []*mark
	ids map[string]*mark
}

// mark is one record. Its fields are read and written under the lock of its marks.
type mark struct {
	made      time.Time // an event's: when its transaction begins
	certain   bool      // its transaction has committed
	accepted  time.Time // zero: not yet
	partition int32     // that has accepted it, or is to
}

func newMarks() *marks { return &marks{ids: map[string]*mark{}} }

// begin adds a record that is about to be made.
func (m *marks) begin(id string) { m.beginIn(id, 0) }

// beginIn is begin for a record whose partition is known ahead.
func (m *marks) beginIn(id string, partition int32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.add(id, &mark{made: time.Now(), partition: partition})
}

func (m *marks) add(id string, one *mark) {
	m.all = append(m.all, one)
	m.ids[id] = one
}

// confirm says that a record is made, and so must be accepted.
func (m *marks) confirm(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ids[id].certain = true
}

// OnProduceRecordUnbuffered implements kgo.HookProduceRecordUnbuffered. The first acknowledgment
// of a record counts.
func (m *marks) OnProduceRecordUnbuffered(r *kgo.Record, err error) {
	var e oracle.Event
	if err != nil || json.Unmarshal(r.Value, &e) != nil { // not one of ours
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if one := m.ids[e.ID]; one != nil && one.accepted.IsZero() {
		one.accepted, one.partition = time.Now(), r.Partition
	}
}

// between calls f for each record that was made in a time.
func (m *marks) between(from, to time.Time, f func(*mark)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	first := sort.Search(len(m.all), func(i int) bool { return !m.all[i].made.Before(from) })
	for _, one := range m.all[first:] {
		if one.made.After(to) {
			return
		}
		f(one)
	}
}

// partitions returns those that have accepted records shortly before a moment.
func (m *marks) partitions(before time.Time) (all []int32) {
	m.between(before.Add(-20*time.Second), before, func(one *mark) {
		if !one.accepted.IsZero() && one.accepted.Before(before) && !slices.Contains(all, one.partition) {
			all = append(all, one.partition)
		}
	})
	slices.Sort(all)
	return all
}

// first returns how long after a moment each partition has accepted the first record that was
// made after it.
func (m *marks) first(since time.Time) map[int32]time.Duration {
	first := map[int32]time.Duration{}
	m.between(since, time.Now(), func(one *mark) {
		took := one.accepted.Sub(since)
		if known, is := first[one.partition]; !one.accepted.IsZero() && (!is || took < known) {
			first[one.partition] = took
		}
	})
	return first
}

// longest returns the longest time that a record of a time has waited until it was accepted, and
// how many certainly wait.
func (m *marks) longest(from, to time.Time) (longest time.Duration, open int) {
	m.between(from, to, func(one *mark) {
		switch {
		case !one.accepted.IsZero():
			longest = max(longest, one.accepted.Sub(one.made))
		case one.certain:
			longest = max(longest, time.Since(one.made))
			open++
		}
	})
	return longest, open
}

// acceptedBetween returns how many of the records of a time were accepted in it.
func (m *marks) acceptedBetween(from, to time.Time) (n int) {
	m.between(from, to, func(one *mark) {
		if !one.accepted.IsZero() && one.accepted.Before(to) {
			n++
		}
	})
	return n
}

// recovery is how long after a fault all partitions accepted something that was made after it.
type recovery struct {
	what         string
	plain, relay time.Duration // in the slowest partition
	// behind is how much later the relay's events were accepted than the plain producer's records,
	// in the partition where that is most.
	behind    time.Duration
	partition int32
	// The longest time from when a record was made to when it was accepted.
	plainWait, relayWait time.Duration
}

// waitBehind is how much longer an event has waited than any record of the plain producer.
func (r recovery) waitBehind() time.Duration { return max(0, r.relayWait-r.plainWait) }

// String tells it in one line.
func (r recovery) String() string {
	text := fmt.Sprintf("%s: recovery: plain %.1f s, relay %.1f s", r.what, r.plain.Seconds(), r.relay.Seconds())
	if r.behind > 0 {
		text += fmt.Sprintf(", at most %.1f s behind, in partition %d", r.behind.Seconds(), r.partition)
	}
	return text + fmt.Sprintf("; longest wait: plain %.1f s, relay %.1f s", r.plainWait.Seconds(), r.relayWait.Seconds())
}

// measure waits until both senders have recovered from a fault, and keeps how long it took. A
// sender that does not is an error, which does not end the test.
func (s *brokersSite) measure(t *testing.T, since time.Time, what string) {
	t.Helper()
	senders := []*marks{s.plain, s.events}
	names := []string{"the plain producer", "the relay"}
	recovered := make([]map[int32]time.Duration, len(senders))
	for i, sender := range senders {
		partitions := sender.partitions(since)
		var missing []string
		s.await(t, stall, func() bool {
			recovered[i], missing = sender.first(since), nil
			for _, p := range partitions {
				if _, is := recovered[i][p]; !is {
					missing = append(missing, fmt.Sprint(p))
				}
			}
			return len(missing) == 0
		})
		for _, p := range partitions {
			if _, is := recovered[i][p]; !is {
				recovered[i][p] = time.Since(since)
			}
		}
		if len(missing) > 0 {
			t.Errorf("%s: %s has not recovered within %v in partitions %s", what, names[i], stall, strings.Join(missing, ", "))
		}
	}
	r := newRecovery(what, recovered[0], recovered[1])
	s.awaitAccepted(t, since, &r)
	s.recoveries = append(s.recoveries, r)
	s.logf(t, "%s", r)
}

// newRecovery compares how long each partition took.
func newRecovery(what string, plain, relay map[int32]time.Duration) recovery {
	r := recovery{what: what}
	for p, took := range relay {
		r.relay = max(r.relay, took)
		if base, is := plain[p]; is && took-base > r.behind {
			r.behind, r.partition = took-base, p
		}
	}
	for _, took := range plain {
		r.plain = max(r.plain, took)
	}
	return r
}

// awaitAccepted waits until everything is accepted that was made from the fault until now, and
// sets the longest waits.
func (s *brokersSite) awaitAccepted(t *testing.T, since time.Time, r *recovery) {
	t.Helper()
	until := time.Now()
	var openPlain, openRelay int
	if !s.await(t, stall, func() bool {
		r.plainWait, openPlain = s.plain.longest(since, until)
		r.relayWait, openRelay = s.events.longest(since, until)
		return openPlain+openRelay == 0
	}) {
		t.Errorf("%s: %d records and %d events are not accepted %v later", r.what, openPlain, openRelay, stall)
	}
}

// arrivals are the events of the topic as they are read.
type arrivals struct {
	mu  sync.Mutex
	all []arrival
}

// arrival is one record. The broker has stamped it when it was written.
type arrival struct {
	event     oracle.Event
	partition int32
	written   time.Time
}

// decode is that of a reader.
func (a *arrivals) decode(r *kgo.Record) (e oracle.Event, err error) {
	err = json.Unmarshal(r.Value, &e)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, arrival{e, r.Partition, r.Timestamp})
	return e, err
}

// inOrder returns all events in the order in which they were written, as they are and with each
// key alone in its partition.
func (a *arrivals) inOrder() (all, inPartitions []oracle.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	sorted := slices.Clone(a.all)
	slices.SortStableFunc(sorted, func(a, b arrival) int { return a.written.Compare(b.written) })
	for _, one := range sorted {
		all = append(all, one.event)
		one.event.Key = fmt.Sprint(one.event.Key, "/", one.partition)
		inPartitions = append(inPartitions, one.event)
	}
	return all, inPartitions
}
