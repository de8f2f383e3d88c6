package faults

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What a claim may say at a time, in an outage of Kafka that lasted from 100 s to 130 s.
func TestClaimsAreCompared(t *testing.T) {
	t.Parallel()
	start := time.Now()
	at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
	h := &truth{facts: []*fact{
		{kind: dependencyGone, effects: []effect{{role: roleWorker, breaker: notifyAction}}, from: at(0), began: at(0), ends: at(1), over: at(1)},
		{kind: kafkaCut, effects: kafkaEffects(false, "unreachable"), from: at(100), began: at(100), ends: at(130), over: at(130)},
	}}
	seen, healed := (sendFails + viewsTrickle + viewsSlack).Seconds(), (breakerCloses + viewsSlack).Seconds()
	for name, tt := range map[string]struct {
		c     claim
		at    float64
		wrong bool
	}{
		"works before":             {claim{role: roleLeader, says: saysWorks}, 99, false},
		"works, not seen yet":      {claim{role: roleLeader, says: saysWorks}, 99.9 + seen, false},
		"works, in the outage":     {claim{role: roleLeader, says: saysWorks}, 100.1 + seen, true},
		"works, a standby":         {claim{role: roleStandby, says: saysWorks}, 100.1 + seen, false},
		"works, by an older row":   {claim{role: roleLeader, says: saysWorks, lag: time.Second}, 100.1 + seen, false},
		"works afterwards":         {claim{role: roleLeader, says: saysWorks}, 130.1, false},
		"works, not in Kafka":      {claim{role: roleWorker, says: saysWorks}, 129, false},
		"well in the outage":       {claim{role: rolePage, says: saysWell}, 120, true},
		"fails before":             {claim{role: roleLeader, says: saysFails}, 99, true},
		"fails":                    {claim{role: roleLeader, says: saysFails}, 129, false},
		"fails, not seen yet":      {claim{role: roleLeader, says: saysFails}, 129.9 + healed, false},
		"fails afterwards":         {claim{role: roleLeader, says: saysFails}, 130.1 + healed, true},
		"outage":                   {claim{role: roleLeader, says: saysOutage, what: "Kafka", class: "unreachable", since: at(101)}, 110, false},
		"outage of another class":  {claim{role: roleLeader, says: saysOutage, what: "Kafka", class: "refused_login", since: at(101)}, 110, true},
		"outage of something else": {claim{role: roleLeader, says: saysOutage, what: "PostgreSQL", class: "unreachable", since: at(101)}, 110, true},
		"outage since too early":   {claim{role: roleLeader, says: saysOutage, what: "Kafka", class: "unreachable", since: at(98)}, 110, true},
		"breaker":                  {claim{role: roleLeader, says: saysBreaker, what: roleLeader}, 110, false},
		"breaker of an action":     {claim{role: roleWorker, says: saysBreaker, what: notifyAction}, 110, true},
		"ready":                    {claim{role: roleLeader, says: saysReady}, 120, false},
		"not ready":                {claim{role: roleLeader, says: saysUnready}, 120, true},
		"not ready, not yet again": {claim{role: roleLeader, says: saysUnready}, 132, false},
	} {
		tt.c.asked, tt.c.got = at(tt.at), at(tt.at)
		require.Equal(t, tt.wrong, h.compare(tt.c).wrong(), "%s: %+v", name, h.compare(tt.c))
	}
}

// What each view says.
func TestViewsAreRead(t *testing.T) {
	t.Parallel()
	since := time.Date(2026, time.November, 27, 12, 3, 4, 0, time.UTC)
	texts := func(all []claim) (texts []string) {
		for _, c := range all {
			texts = append(texts, c.String())
		}
		return texts
	}
	const state = `"state": {"works": false, "breaker": "open", "outages": [{"what": "Kafka", "class": "no_answer", "since": "2026-11-27T12:03:04Z"}]}`
	const member = `"works": false, "breakers": [{"action": "NOTIFIED", "state": "open"}], "outages": [{"what": "PostgreSQL", "class": "read_only", "since": "2026-11-27T12:03:04Z"}]`
	all, err := statusClaims([]byte(`{"relays": [{"name": "default", ` + state + `}, {"name": "unknown", "state": null}],
		"groups": [{"group": "readers", "members": [{"as": "consumer", "works": true, "outages": null}, {"as": "consumer", "works": null}]},
		{"group": "workers", "members": [{"as": "worker", ` + member + `}]}]}`))
	require.NoError(t, err)
	require.Equal(t, []string{
		"relay default: does not work", "relay default: outage Kafka (no_answer) since 12:03:04.000", "relay default: breaker is not closed leader",
		"consumer readers: works",
		"worker workers: does not work", "worker workers: outage PostgreSQL (read_only) since 12:03:04.000", "worker workers: breaker is not closed NOTIFIED",
	}, texts(all))
	require.True(t, all[1].since.Equal(since))
	require.Equal(t, []string{"page: all is well"}, texts(pageClaims(`<p class="notice good"><strong>All is well</strong>`)))
	require.Equal(t, []string{"relay default: outage Kafka (no_answer)", "consumer readers: outage topic a-b (unavailable)"}, texts(pageClaims(
		`<li class="notice bad"><strong>Problem</strong> <span>Relay default: Kafka has not answered since 12:03:04 UTC (no answer: dial tcp).</span></li>
		<li class="notice warn"><span>Consumer group readers, process a: topic a-b has been failing since 12:03:04 UTC (unavailable)</span></li>
		<li class="notice warn"><span>Relay default: 3 events are dead.</span></li>`)))
	require.Equal(t, []string{"relay default in relay 1: does not work", "relay default in relay 1: not ready", "relay default: does not work", "relay default: breaker is not closed leader",
		"relay default: outage topic orders (refused_rights)"}, texts(metricClaims("relay 1", `
outbox_relay_leader{outbox_relay_name="default"} 1
outbox_relay_works{outbox_relay_name="default"} 0
outbox_relay_ready{outbox_relay_name="default"} 0
outbox_relay_state{outbox_relay_name="default",outbox_state="works"} 0
outbox_relay_state{outbox_relay_name="default",outbox_state="not_working"} 1
outbox_relay_state{outbox_relay_name="other",outbox_state="unknown"} 1
outbox_relay_breaker_state{outbox_relay_name="default",outbox_state="closed"} 0
outbox_relay_breaker_state{outbox_relay_name="other",outbox_state="unknown"} 1
outbox_relay_breaker_state{outbox_relay_name="default",outbox_state="half-open"} 1
outbox_outage_age_seconds{outbox_relay_name="default",outbox_outage="topic orders",error_type="refused_rights"} 12.5
`)))
}

// The same seed gives the same plan, which has each kind of outage and none that another one forbids.
func TestViewsPlan(t *testing.T) {
	t.Parallel()
	kinds := viewsKinds()
	steps := viewsPlan(3, 20*time.Minute, longViews, kinds)
	again := viewsPlan(3, 20*time.Minute, longViews, kinds)
	require.Len(t, again, len(steps))
	count := map[string]int{}
	for i, s := range steps {
		require.Equal(t, []any{s.name, s.at, s.lasts}, []any{again[i].name, again[i].at, again[i].lasts})
		require.GreaterOrEqual(t, s.lasts, longViews.shortest)
		require.LessOrEqual(t, s.lasts, longViews.longest)
		count[s.name]++
	}
	require.Len(t, count, len(kinds))
}
