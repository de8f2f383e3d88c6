package faults

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// stall is how long events may take to flow again behind a disturbance before
// the relays are said to hang. It takes them seconds; the machine may be busy.
const stall = 2 * time.Minute

// run does a step and waits until events flow again.
func (s *suite) run(t *testing.T, p step) {
	t.Helper()
	t.Logf("%5.1f s: %s", time.Since(s.start).Seconds(), s.describe(p))
	if p.outage {
		s.watch.pause()
	}
	p.begin(s, t, p)
	s.sleep(t, p.lasts/2)
	if p.kill {
		s.killLeader(t, p)
	}
	s.sleep(t, p.lasts/2)
	if p.end != nil {
		p.end(s, t, p)
	}
	if p.outage {
		s.watch.resume()
	}
	enough := s.watch.arrived() + 2*batch // what was on its way proves nothing
	if !s.await(t, stall, func() bool { return s.watch.arrived() > enough }) {
		t.Errorf("nothing has arrived for %v behind: %s", stall, s.describe(p))
		return
	}
	s.replace(t)
	s.sleep(t, p.calm)
}

// describe tells a step, and how far we are.
func (s *suite) describe(p step) string {
	text := p.what
	if p.lasts > 0 {
		text += " for " + p.lasts.Round(time.Millisecond).String()
	}
	if p.kill {
		text += ", and kill the leader meanwhile"
	}
	return text + " (" + strconv.Itoa(s.watch.arrived()) + " events, " + strconv.Itoa(s.kills) + " kills so far)"
}

func (s *suite) killLeader(_ *testing.T, p step) { s.kill(s.leader(p)) }
func (s *suite) killAny(_ *testing.T, p step)    { s.kill(s.workers[p.relay]) }

func (s *suite) killAll(t *testing.T, _ step) {
	t.Helper()
	for len(s.workers) > 0 {
		s.kill(s.workers[0])
	}
	s.replace(t)
}

func (s *suite) freezeLeader(t *testing.T, p step) {
	t.Helper()
	s.leader(p).freeze(t)
}

func (s *suite) freezeAny(t *testing.T, p step) {
	t.Helper()
	s.workers[p.relay].freeze(t)
}

func (s *suite) thaw(t *testing.T, _ step) {
	t.Helper()
	for _, w := range s.workers {
		w.thaw(t)
	}
}

func (s *suite) killPostgres(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.server.Kill())
}

func (s *suite) restartPostgres(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.server.Restart(s.ctx))
}

func (s *suite) killKafka(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.kafka.Kill())
}

func (s *suite) restartKafka(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.kafka.Restart(s.ctx))
}

func (s *suite) deleteTopic(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.topics.Delete(s.ctx))
}

func (s *suite) createTopic(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.topics.Create(s.ctx))
}

// leader returns the relay that holds the lease, or the step's own where nobody
// does or PostgreSQL is away.
func (s *suite) leader(p step) *worker {
	ctx, cancel := context.WithTimeout(s.ctx, time.Second)
	defer cancel()
	var pid int
	err := s.db.QueryRow(ctx, `
		SELECT split_part(holder, '/', 2)::int FROM outbox_lease WHERE expires_at > clock_timestamp()`).Scan(&pid)
	if err == nil {
		for _, w := range s.workers {
			if w.cmd.Process.Pid == pid {
				return w
			}
		}
	}
	return s.workers[p.relay]
}
