package faults

import (
	"testing"
	"time"

	"github.com/outboxgo/outbox/faults/internal/proxy"
)

// companion is what else befalls a relay that alone does not reach Kafka. do happens
// when something may be on the way that fails.
type companion struct {
	what, kind string
	do         func(*suite, *testing.T, step, *worker)
	others     bool // see disturbance
}

// The disturbances of this list make Kafka unavailable for the leader alone: its records arrive
// after others have taken over and sent the same, or never.
func apart(companions ...companion) (all []disturbance) {
	for _, failing := range []struct {
		what  string
		fault proxy.Fault
	}{
		{"hold what the leader alone sends to Kafka", proxy.Fault{HoldUp: true}},
		{"hold what Kafka answers the leader alone", proxy.Fault{HoldDown: true}},
		{"cut the way to Kafka of the leader alone", proxy.Fault{Cut: true}},
	} {
		for _, c := range companions {
			all = append(all, disturbance{
				what: failing.what + c.what, kind: c.kind, times: 1, min: time.Second, max: 2 * lease, outage: true, others: c.others,
				begin: func(s *suite, t *testing.T, p step) { s.separate(t, p, failing.fault, c) },
				end:   (*suite).rejoin,
			})
		}
	}
	return all
}

// separate has the way to Kafka fail for the leader alone.
func (s *suite) separate(t *testing.T, p step, fault proxy.Fault, also companion) {
	t.Helper()
	w := s.leader(p)
	s.apart = s.ways[w]
	s.apart.toKafka.Set(fault)
	s.sleep(t, p.delay) // so that it may have something on its way
	also.do(s, t, p, w)
}

// rejoin ends what separate has begun. Whether the relay goes on before what was held does is left to chance.
func (s *suite) rejoin(t *testing.T, p step) {
	t.Helper()
	if p.chance%2 == 0 {
		s.thaw(t, p)
	}
	if p.reset {
		s.apart.toKafka.Reset()
	}
	s.apart.toKafka.Set(proxy.Fault{})
	s.apart.toPostgres.Set(proxy.Fault{})
	s.apart = ways{}
	s.thaw(t, p)
}

// disconnect breaks all connections of a relay with PostgreSQL.
func (s *suite) disconnect(t *testing.T, _ step, w *worker) {
	t.Helper()
	s.terminate(t, `application_name = $1`, s.ways[w].name)
}

func (s *suite) freezeAndUnlock(t *testing.T, p step, w *worker) {
	t.Helper()
	w.freeze(t)
	s.unlockLeader(t, p)
}

func (s *suite) cutFromPostgres(_ *testing.T, _ step, w *worker) {
	s.ways[w].toPostgres.Set(proxy.Fault{Cut: true})
}
