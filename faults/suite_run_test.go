package faults

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/stretchr/testify/require"
)

// stall is how long events may take to flow again behind a disturbance before
// the relays are said to hang. It takes them seconds; the machine may be busy.
const stall = 2 * time.Minute

// run does a step and waits until events flow again. One that lasts has only begun then.
func (s *suite) run(t *testing.T, p step) {
	t.Helper()
	s.endDue(t)
	t.Logf("%5.1f s: %s", time.Since(s.start).Seconds(), s.describe(p))
	if p.lasting != nil {
		s.beginLasting(t, p)
		return
	}
	if p.outage {
		s.watch.pause()
	}
	began := &span{from: time.Now(), what: p.what}
	if p.slowAnswers {
		s.slow = append(s.slow, began)
	}
	p.begin(s, t, p)
	s.sleep(t, p.lasts/2)
	others := p.others
	if p.kill {
		victim := s.leader(p)
		s.kill(victim)
		others = others || s.ways[victim] == s.apart
	}
	s.sleep(t, p.lasts/2)
	if others && !s.flows(t, "in the middle of: "+s.describe(p)) {
		return
	}
	if p.end != nil {
		p.end(s, t, p)
	}
	began.to = time.Now()
	if p.outage {
		s.watch.resume()
	}
	if !s.flows(t, "behind: "+s.describe(p)) {
		return
	}
	s.replace(t)
	s.sleep(t, p.calm)
}

// flows waits until events flow. If they do not, it fails the test and returns false.
func (s *suite) flows(t *testing.T, when string) bool {
	t.Helper()
	enough := s.watch.arrived() + 2*batch // what was on its way proves nothing
	so := s.await(t, stall, func() bool { return s.watch.arrived() > enough })
	if !so {
		t.Errorf("nothing has arrived for %v %s", stall, when)
	}
	return so
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

// unlockLeader has PostgreSQL free the lock by which others would know that the leader is gone.
func (s *suite) unlockLeader(t *testing.T, _ step) {
	t.Helper()
	_, err := s.db.Exec(s.ctx, `SELECT pg_terminate_backend(pid) FROM `+leaderLocks)
	require.NoError(t, err)
}

func (s *suite) disconnectLeader(t *testing.T, _ step) {
	t.Helper()
	_, err := s.db.Exec(s.ctx, `
		SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		 WHERE application_name IN (SELECT application_name FROM pg_stat_activity JOIN `+leaderLocks+` USING (pid))`)
	require.NoError(t, err)
}

// leaderLocks are the locks of relays that lead in this database. Operators, who have locks too, have the name of this
// session.
const leaderLocks = `(
	SELECT l.pid FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
	 WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
	   AND a.application_name <> current_setting('application_name')) AS held`

// freezeUnlocked freezes the leader so that it cannot notice that another one takes over.
func (s *suite) freezeUnlocked(t *testing.T, p step) {
	t.Helper()
	s.freezeLeader(t, p)
	s.unlockLeader(t, p)
}

func (s *suite) unlockWithoutKafka(t *testing.T, p step) {
	t.Helper()
	s.toKafka.Set(proxy.Fault{HoldUp: true})
	s.unlockLeader(t, p)
}

// terminate has PostgreSQL end sessions.
func (s *suite) terminate(t *testing.T, where string, args ...any) {
	t.Helper()
	_, err := s.db.Exec(s.ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE `+where, args...)
	require.NoError(t, err)
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
	s.steady.excuse()
	require.NoError(t, s.server.Kill())
}

func (s *suite) restartPostgres(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.server.Restart(s.ctx))
	s.steady.excuseEnds()
}

func (s *suite) killKafka(t *testing.T, _ step) {
	t.Helper()
	s.steady.excuse()
	require.NoError(t, s.kafka.Kill())
	s.kafkaKills++
}

func (s *suite) restartKafka(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.kafka.Restart(s.ctx))
	s.steady.excuseEnds()
}

func (s *suite) deleteTopic(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.topics.Delete(s.ctx))
}

func (s *suite) createTopic(t *testing.T, _ step) {
	t.Helper()
	require.NoError(t, s.topics.Create(s.ctx))
}

// leader returns the relay that holds the lease, or the step's own if none does or PostgreSQL is
// unavailable.
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
