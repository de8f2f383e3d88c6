package faults

import (
	"context"
	"math/rand/v2"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/absent"
	"github.com/outboxgo/outbox/internal/testenv"
)

// ongoing is a disturbance that has begun.
type ongoing struct {
	ready func() bool // whether it can end, see recordMuch; nil: always
	end   func()
}

// lasting is a disturbance that goes on while others begin and end.
type lasting struct {
	step
	ongoing
	until time.Time
}

// isDue says whether it has lasted for as long as it was to.
func (l lasting) isDue() bool { return time.Now().After(l.until) && (l.ready == nil || l.ready()) }

// besides are the disturbances that last while others happen. None of them may delay a healthy event.
func besides() []disturbance {
	return []disturbance{
		{
			what: "a third of all partitions accept nothing", kind: "partitions", times: 1,
			min: 10 * time.Second, max: 2 * time.Minute, lasting: (*suite).blockThird,
		},
		{
			what: "operators leave transactions open", kind: "operators", times: 1,
			min: 8 * time.Second, max: time.Minute, lasting: (*suite).operate,
		},
		{
			what: "record very much in one transaction", kind: "bulk", times: 1,
			min: 4 * time.Second, max: time.Minute, lasting: (*suite).recordMuch,
		},
	}
}

// beginLasting begins a disturbance that lasts. Of each kind there is only one at a time.
func (s *suite) beginLasting(t *testing.T, p step) {
	t.Helper()
	s.endThose(t, func(l lasting) bool { return l.kind == p.kind })
	from := time.Now()
	is := p.lasting(s, t, p)
	end := is.end
	is.end = sync.OnceFunc(func() {
		end()
		s.steady.beside = append(s.steady.beside, span{from, time.Now(), p.what})
	})
	t.Cleanup(is.end)
	s.lasting = append(s.lasting, lasting{p, is, from.Add(p.lasts)})
}

// endDue ends what has lasted for as long as it was to.
func (s *suite) endDue(t *testing.T) {
	t.Helper()
	s.endThose(t, lasting.isDue)
}

// endAll waits until everything has lasted for as long as it was to, and ends it.
func (s *suite) endAll(t *testing.T) {
	t.Helper()
	for len(s.lasting) > 0 && !t.Failed() {
		s.sleep(t, 100*time.Millisecond)
		s.endDue(t)
	}
	s.endThose(t, func(lasting) bool { return true })
}

func (s *suite) endThose(t *testing.T, which func(lasting) bool) {
	t.Helper()
	s.lasting = slices.DeleteFunc(s.lasting, func(l lasting) bool {
		over := which(l)
		if over {
			t.Logf("%5.1f s: end: %s", time.Since(s.start).Seconds(), l.what)
			l.end()
		}
		return over
	})
}

// blockable is a setting of topics whose partitions can be made to accept nothing. With one replica it asks for
// no more.
var blockable = []string{"min.insync.replicas", "2"}

// blockThird makes every third partition of all topics accept nothing.
func (s *suite) blockThird(t *testing.T, _ step) ongoing {
	t.Helper()
	return ongoing{end: s.block(t, func(partition int32) bool { return partition%3 == 0 })}
}

// block makes some partitions of all topics accept nothing. The topic that comes and goes may be another one
// when that ends: then there is nothing to end.
func (s *suite) block(t *testing.T, which func(partition int32) bool) (end func()) {
	t.Helper()
	some := func(count int32) (chosen []int32) {
		for n := range count {
			if which(n) {
				chosen = append(chosen, n)
			}
		}
		return chosen
	}
	topics := map[string][]int32{s.topic: some(stayingPartitions), s.steady.topic: some(stayingPartitions), s.topics.Fleeting(): some(fleetingPartitions)}
	each := func(do func(ctx context.Context, brokers []string, topic string, partitions []int32) error) {
		ctx, cancel := context.WithTimeout(s.ctx, testenv.Patience)
		defer cancel()
		for topic, chosen := range topics {
			require.NoError(t, do(ctx, s.brokers, topic, chosen))
		}
	}
	each(absent.Block)
	return func() { each(absent.Unblock) }
}

// operate lets operators of both databases leave transactions open. One partition accepts nothing
// meanwhile, so that there are events to work on. A key of which an operator has locked a row waits for the
// operator, so they spare the keys that are measured: an event of such a key has a row after a send that seemed to get
// no answer.
func (s *suite) operate(t *testing.T, p step) ongoing {
	t.Helper()
	unblock := func() {}
	if !*faultExactly { // which a bad partition stops
		unblock = s.block(t, func(partition int32) bool { return partition == 1 })
	}
	beside := newOperators(s.steady.site)
	beside.spared = s.steady.healthyKeys()
	first, second := newOperators(s.site).keepOpen(t, p.chance), beside.keepOpen(t, p.chance+1)
	return ongoing{end: func() {
		first()
		second()
		unblock()
	}}
}

// writes are the disturbances of the way to PostgreSQL that let relays read, and cut them off when they write.
func writes(server string) (all []disturbance) {
	for _, one := range []struct {
		what, kind string
		answered   bool
	}{
		{"cut the way to " + server + " of half of the writes, between reads and writes", "writes", false},
		{"cut the way to " + server + " in front of the answers to half of the writes", "answers", true},
	} {
		var before int64 // writes that were cut
		all = append(all, disturbance{
			what: one.what, kind: one.kind, times: 1, min: time.Second, max: 3 * lease, outage: true,
			begin: func(s *suite, _ *testing.T, p step) {
				before = s.cutWrites.Load()
				s.toPostgres.Set(s.cutAtWrites(p, one.answered))
			},
			end: func(s *suite, t *testing.T, _ step) {
				// A machine may be so slow that no relay wrote in the time of the step.
				cut := s.await(t, stall, func() bool { return s.cutWrites.Load() > before })
				s.toPostgres.Set(proxy.Fault{})
				require.True(t, cut, "no statement of a relay was known as a write for %v", stall)
			},
		})
	}
	return all
}

// writing matches the statements that move the cursor, and those that save the results of retries. It does not match
// the poll, which may write a row of outbox_cursor in a statement that reads.
var writing = regexp.MustCompile(`(?m)^INSERT INTO \S*outbox_cursor|(UPDATE|DELETE FROM) \S*outbox_failed`)

// cutAtWrites is a fault that cuts the connections of half of the statements that write.
func (s *suite) cutAtWrites(p step, answered bool) proxy.Fault {
	var mu sync.Mutex
	rng := rand.New(rand.NewPCG(p.chance, 0))
	return proxy.Fault{Statements: &proxy.Statements{Answered: answered, Cut: func(sql string) bool {
		if !writing.MatchString(sql) {
			return false
		}
		mu.Lock()
		defer mu.Unlock()
		if rng.IntN(2) == 0 {
			return false
		}
		s.cutWrites.Add(1)
		return true
	}}}
}
