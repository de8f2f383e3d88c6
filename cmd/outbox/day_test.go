package main

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// Status and doctor report events that wait behind a missing topic, and dead deliveries, as
// problems, although nothing is pending.
func TestStatusSeesWhatWaits(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newShop(t)
	d.relay(t)()
	d.exec(t, `UPDATE {s}.outbox_lease SET holder = 'host/1', expires_at = now() + interval '1 h'`)
	require.Equal(t, exitOK, d.call(t, "status", "--check", "--open-for", "1h").code)
	d.fail(t, outbox.StatusWaiting, "topic")
	d.fail(t, outbox.StatusParked, "topic", "topic")
	d.deliver(t, "k", "DEAD", "PARKED")
	d.exec(t, `UPDATE {s}.outbox_failed SET created_at = now() - interval '12 min', next_retry_at = now() + interval '1 h'`)
	d.exec(t, `UPDATE {s}.event_delivery SET recorded_at = now() - interval '7 min', held = status = 'DEAD'`)

	a := d.call(t, "status", "--check", "--open-for", "1h")
	require.Equal(t, exitProblems, a.code)
	for _, want := range []string{"relay default: 3 events have waited for longer than 5m00s, the oldest for 12m", "group stats: 1 event has waited for longer than 5m00s, the oldest for 7m",
		"group stats: 1 delivery is dead", "group stats: 1 key is held"} {
		require.Contains(t, strings.Join(strings.Fields(a.out), " "), want)
	}
	var doc statusJSON
	d.json(t, &doc, exitOK, "status", "--open-for", "1h")
	require.Zero(t, doc.Relays[0].Pending)
	stale, err := d.inspector(t).Stale(background, defaultMaxAge)
	require.NoError(t, err)
	require.Len(t, doc.Stale, len(stale))
	sum := map[string]int{}
	for i, s := range stale {
		require.Equal(t, []any{s.Relay, s.Group, s.Status, s.Type, s.Events}, []any{doc.Stale[i].Relay, doc.Stale[i].Group, doc.Stale[i].Status, doc.Stale[i].Type, doc.Stale[i].Events})
		sum[s.Status] += s.Events
	}
	require.Equal(t, map[string]int{"waiting": 1, "parked": 3}, sum)
	ages := regexp.MustCompile(`oldest for [0-9ms]+`) // which go on
	var found []string
	for _, f := range d.findings(t, "--only", "relay.backlog,delivery.stale,delivery.dead") {
		found = append(found, ages.ReplaceAllString(f.What, "oldest"))
	}
	var problems []string
	for _, p := range doc.Problems {
		if p.ID == "relay.backlog" || p.ID == "delivery.stale" || p.ID == "delivery.dead" {
			problems = append(problems, ages.ReplaceAllString(p.What, "oldest"))
		}
	}
	require.Equal(t, problems, found, "the doctor finds what status does")
}

// alertLog is an Alerter that keeps all alerts.
type alertLog struct{ testenv.Kept[outbox.Alert] }

func (l *alertLog) Alert(_ context.Context, a outbox.Alert) error {
	l.Add(a)
	return nil
}

// first returns the first alert of a kind, once there is one.
func (l *alertLog) first(t testing.TB, kind outbox.AlertKind) outbox.Alert {
	t.Helper()
	return l.Await(t, func(a outbox.Alert) bool { return a.Kind == kind }, string(kind))
}

// This is a day of an operator. An alert arrives. The operator looks at the dead events, fixes a payload,
// retries all events of a class after a dry run, and resolves the rest with a note. The audit names the
// operator.
func TestOperatorsDay(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.fail(t, outbox.StatusDead, "a", "b", "c")
	d.deliver(t, "k1", "DEAD")
	d.deliver(t, "k2", "DEAD")
	d.exec(t, `UPDATE {s}.outbox_failed SET error_class = 'invalid_record' WHERE aggregate_id = 'c'`)
	alerts := &alertLog{}
	monitor, err := outboxops.NewMonitor(d.db, outboxops.MonitorConfig{Schema: d.schema, Alerts: outbox.AlertConfig{Alerter: alerts, Interval: 20 * time.Millisecond, DeadThreshold: 5}})
	require.NoError(t, err)
	testenv.Run(t, monitor.Run)

	alert := alerts.first(t, outbox.AlertManyDead)
	alerted := 0
	for _, c := range alert.Counts {
		alerted += c.Events
	}
	require.Contains(t, d.ok(t, "failures", "count"), fmt.Sprintf("%d in all, %[1]d unresolved", alerted), "the alert and the command line agree")

	text := d.ok(t, "failures", "list", "--status", "dead", "--class", "invalid_record")
	event := strings.Fields(strings.Split(text, "\n")[1])[0]
	require.Equal(t, d.firstFailed(t, "c"), event)
	require.Contains(t, d.ok(t, "failures", "show", event), `"key": 1`)
	d.stdin = `{"key": "one"}`
	d.ok(t, "failures", "edit", event, "--payload", "-", "--reason", "a key is text")
	var one failureJSON
	d.json(t, &one, exitOK, "failures", "show", event)
	require.JSONEq(t, `{"key": "one"}`, string(one.Payload))
	require.NotEqual(t, "dead", one.Status)

	dry := []string{"failures", "retry", "--class", "message_too_large", "--status", "dead"}
	require.Contains(t, d.ok(t, append(dry, "--dry-run")...), "would retry 2 failures")
	require.Equal(t, 2, d.statuses(t)["dead"], "a dry run changes nothing")
	require.Equal(t, "retried 2 failures\n", d.ok(t, append(dry, "--yes", "--reason", "the limit was raised")...))
	require.Contains(t, d.ok(t, "failures", "resolve", "--status", "dead"), "would resolve 2 failures")
	require.Equal(t, "group stats, action COUNTED: 2\nresolved 2 failures\n", d.ok(t, "failures", "resolve", "--status", "dead", "--yes", "--reason", "sold out, see OPS-7"))

	var audit struct {
		Audit []auditJSON
		More  bool
	}
	d.json(t, &audit, exitOK, "audit", "--operator", "kim")
	done := map[string]int{}
	for _, a := range audit.Audit {
		require.Equal(t, "kim", a.Operator)
		done[a.Action+": "+a.Reason]++
	}
	require.Equal(t, map[string]int{"edit: a key is text": 1, "retry: the limit was raised": 2, "resolve: sold out, see OPS-7": 2}, done)
	var resolved failuresDoc
	d.json(t, &resolved, exitOK, "failures", "list", "--status", "resolved")
	for _, f := range resolved.Failures {
		require.Equal(t, []string{"kim", "sold out, see OPS-7"}, []string{f.ResolvedBy, f.Resolution})
	}
	require.Len(t, resolved.Failures, 2)

	d.relay(t)
	require.Eventually(t, func() bool { return len(d.statuses(t)) == 0 }, testenv.Patience, 10*time.Millisecond, "what was retried is sent")
	require.Contains(t, d.ok(t, "failures", "count"), "0 in all, 0 unresolved")
}
