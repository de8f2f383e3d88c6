package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

// Of what waits and is dead, up to MaxCounted rows of a kind are read. If there are more, no number that is counted
// from them is shown as exact: neither by status nor by type, and in no sum.
func TestNumbersOfABoundedReadHaveAPlus(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	const owed = `
		INSERT INTO {s}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at,
		       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload, last_error_code, held)
		SELECT n, n, 0, 10, now(), now() - '1 h'::interval, now(), CASE WHEN $2::text = 'DEAD' THEN now() END,
		       now(), now() - '1 h'::interval, gen_random_uuid(), $2, 'stats', 'COUNT', $2 || '-events', CASE n % 2 WHEN 0 THEN 'even' ELSE 'odd' END, 's', 'a', 'k', 'application/json', '{}',
		       CASE n % 2 WHEN 1 THEN 'timeout' END, $2 = 'DEAD' AND n % 4 = 0
		  FROM generate_series(1, $1::bigint) AS n`
	d.exec(t, owed, outbox.MaxCounted+10, "PENDING")
	d.exec(t, owed, outbox.MaxCounted+10, "DEAD")

	shown := d.ok(t, "status")
	for _, line := range []string{
		"group stats: 10,000+ events have waited for longer than 5m00s, the oldest for 1h00m: 5,000+ waiting, 5,000+ failed",
		"group stats: action COUNT, topic PENDING-events: 5000 or more events are failed",
		"group stats: no process runs, and 10,000+ events wait",
		"group stats: 10,000+ deliveries are dead: 10,000+ of action COUNT, topic DEAD-events",
		"group stats: 2,500+ keys are held by dead deliveries",
	} {
		require.Contains(t, strings.Join(strings.Fields(shown), " "), line)
	}
	require.Regexp(t, `stats +0 +- +- +0 +5,000\+ +5,000\+ +0 +0 +10,000\+`, shown)

	type bounded struct {
		Status, Type string
		Events       int
		Failures     int
		More         bool
	}
	var status struct {
		Stale  []bounded
		Groups []struct{ Waiting []bounded }
	}
	require.NoError(t, json.Unmarshal([]byte(d.ok(t, "status", "--json")), &status))
	require.Len(t, status.Stale, 2)
	require.Len(t, status.Groups[0].Waiting, 3)
	for _, c := range append(status.Stale, status.Groups[0].Waiting...) {
		require.True(t, c.More, c)
	}
	var counted struct{ Counts []bounded }
	require.NoError(t, json.Unmarshal([]byte(d.ok(t, "failures", "count", "--status", "dead", "--json")), &counted))
	require.Equal(t, []bounded{{Status: outbox.StatusDead, Type: "even", Failures: 5000, More: true}, {Status: outbox.StatusDead, Type: "odd", Failures: 5000, More: true}}, counted.Counts)
	require.Contains(t, d.ok(t, "failures", "count", "--status", "dead"), "10,000+ in all, 10,000+ unresolved")
	require.Contains(t, d.ok(t, "consumers"), "2,500+")
}

// Keys that wait are counted together with those that are held, and shown without them.
func TestNumberOfParkedKeysHasAPlus(t *testing.T) {
	t.Parallel()
	found := failedFindings(outbox.RelayStatus{Name: "default", ParkedKeys: outbox.MaxCounted, HeldKeys: 7})
	require.Equal(t, "relay default: 7 keys are held", found[0].What)
	require.Equal(t, "relay default: 9,993+ keys are parked", found[1].What)
	one := []outbox.EventCount{{Status: outbox.StatusParked, Events: 1, Oldest: time.Now()}}
	require.Contains(t, staleText(one, time.Now(), limits{maxAge: time.Minute}), "1 event has waited for longer than 1m00s")
}

// The doctor reads up to 1,000 keys whose deliveries are all parked, and reports them by group.
func TestNumberOfHeadlessKeysHasAPlus(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.exec(t, `
		INSERT INTO {s}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at,
		       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload)
		SELECT n, n, 0, 10, now(), now(), now(), now(), now(), gen_random_uuid(), 'PARKED', CASE WHEN n <= 400 THEN 'mails' ELSE 'stats' END, 'A', 'orders',
		       'e', 's', 'a', 'k', 'application/json', '{}'
		  FROM generate_series(1, 1001) AS n`)
	keys := func() (said []string) {
		for _, f := range d.findings(t, "--only", "delivery") {
			if f.ID == "delivery.headless" {
				said = append(said, f.What)
			}
		}
		return said
	}
	require.Equal(t, []string{"group mails: all deliveries of 400+ keys are parked", "group stats: all deliveries of 600+ keys are parked"}, keys())
	d.exec(t, `DELETE FROM {s}.event_delivery WHERE position > 999`)
	require.Equal(t, []string{"group mails: all deliveries of 400 keys are parked", "group stats: all deliveries of 599 keys are parked"}, keys())
}
