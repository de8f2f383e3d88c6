package faults

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// pause is how long slow handlers take.
	pause = time.Second
	// maxStop is the default of StopTimeout, and what a busy machine may add.
	maxStop = 6 * time.Second
)

// stopAllSlow stops all members when each has more slow events than it can handle until
// it has to be back. Should they happen to be through with all of them, it does so again.
func (g *group) stopAllSlow(t *testing.T, _ incident) {
	t.Helper()
	g.awaitHandled(t)
	for handled := g.doneOrParked(t); handled == g.shop.actions; handled = g.doneOrParked(t) {
		g.replace(t)
		g.shop.pause = pause
		g.shop.sell(t, 18*members)
		g.shop.pause = 0
		require.True(t, g.await(t, testenv.Patience, func() bool { return g.doneOrParked(t) > handled }), "nothing is handled")
		g.stop(t, g.workers...)
	}
}

// createTopic deletes the topic and creates it again, with as many partitions as it had at
// first. What it had is handled or parked by then. All that the shop sends from now on must be.
func (g *group) createTopic(t *testing.T, _ incident) {
	t.Helper()
	g.awaitHandled(t)
	g.gone = append(g.gone, g.ends(t, g.spec.Topic))
	request := kmsg.NewPtrDeleteTopicsRequest()
	request.TopicNames = []string{g.spec.Topic} // which field counts depends on the version
	request.Topics = []kmsg.DeleteTopicsRequestTopic{{Topic: &g.spec.Topic}}
	response, err := request.RequestWith(g.ctx, g.client)
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Topics[0].ErrorCode))
	testenv.CreateTopic(t, g.spec.Brokers, g.spec.Topic, partitions)
	g.shop.number++
	g.connect(t)
}

// createTopicUnseen does so while no member runs. They are started when the topic has
// events again.
func (g *group) createTopicUnseen(t *testing.T, p incident) {
	t.Helper()
	g.awaitHandled(t)
	g.stop(t, g.workers...)
	g.createTopic(t, p)
}

// loseCommits kills PostgreSQL so that it comes back without the last transactions of
// members, whose offsets Kafka has. Members notice an outage and go on behind what is
// lost. Then they are stopped, and an operator rewinds the group to a time from which on
// PostgreSQL may have lost something.
func (g *group) loseCommits(t *testing.T, _ incident) {
	t.Helper()
	// A commit that waits for the disk, as that of a parked event, keeps those before it too. 26 of 75 crashes lost
	// nothing.
	const tries = 20
	g.awaitHandled(t)
	_, err := g.db.Exec(g.ctx, `CHECKPOINT`)
	require.NoError(t, err)
	kept, lost, first := time.Now(), 0, g.shop.events+1
	for range tries {
		if lost = g.crashPostgres(t, kept); lost > 0 {
			break
		}
	}
	require.Positive(t, lost, "PostgreSQL was meant to lose what it had committed")
	g.lost += lost
	g.repeated = append(g.repeated, eventRange{first, g.shop.events})
	done := g.done(t)
	g.shop.sell(t, 50)
	require.True(t, g.await(t, testenv.Patience, func() bool { return g.done(t) > done }), "members do not go on")
	g.stop(t, g.workers...)
	g.rewind(t, kept)
}

// crashPostgres has events handled, kills PostgreSQL, and starts it again. It returns how
// many of the actions that were done since a time are lost. Members do others as soon as
// PostgreSQL is back, so that no number of actions says it.
func (g *group) crashPostgres(t *testing.T, since time.Time) (lost int) {
	t.Helper()
	done := g.done(t)
	g.shop.sell(t, 200)
	require.True(t, g.await(t, testenv.Patience, func() bool { return g.done(t) > done+100 }), "members do not go on")
	before := g.doneSince(t, since)
	require.NoError(t, g.server.Kill())
	require.NoError(t, g.server.Restart(g.ctx))
	g.db.Reset()
	require.True(t, g.await(t, testenv.Patience, func() bool { return g.db.Ping(g.ctx) == nil }), "PostgreSQL does not come back")
	after := g.doneSince(t, since)
	for action := range before {
		if !after[action] {
			lost++
		}
	}
	t.Logf("%5.1f s: PostgreSQL has lost %d of %d actions, and has %d", time.Since(g.start).Seconds(), lost, len(before), len(after))
	return lost
}

// doneSince returns the actions that were done since a time.
func (g *group) doneSince(t *testing.T, since time.Time) map[string]bool {
	t.Helper()
	rows, err := g.db.Query(g.ctx, `SELECT aggregate_type || ' ' || aggregate_id || ' ' || action FROM event_handled WHERE handled_at >= $1`, since)
	require.NoError(t, err)
	actions, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	done := make(map[string]bool, len(actions))
	for _, action := range actions {
		done[action] = true
	}
	return done
}

// rewind rewinds the group. Kafka may take members that were killed before for alive.
func (g *group) rewind(t *testing.T, to time.Time) {
	t.Helper()
	var report outboxops.RewindReport
	rewound := func() bool {
		var err error
		report, err = outboxops.Rewind(g.ctx, g.db, []kgo.Opt{kgo.SeedBrokers(g.spec.Brokers...)}, outboxops.RewindConfig{Group: g.spec.Group, Time: to,
			Audit: outboxops.AuditInfo{Operator: "the test", Reason: "PostgreSQL has lost transactions"}})
		require.True(t, err == nil || errors.Is(err, outboxops.ErrGroupActive), "%v", err)
		return err == nil
	}
	require.True(t, g.await(t, testenv.Patience, rewound), "members that are gone are still in the group")
	require.Greater(t, report.Records, report.Noted, "what is lost was meant to be repeated")
	g.rewound += report.Records
	t.Logf("%5.1f s: rewound by %d records, of which %d are noted", time.Since(g.start).Seconds(), report.Records, report.Noted)
}
