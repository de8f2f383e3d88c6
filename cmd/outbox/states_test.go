package main

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// foundOne requires one finding with an id and a text, among others, and returns it.
func (d *commandFixture) foundOne(t testing.TB, id, severity, what string, args ...string) (found finding) {
	t.Helper()
	n := 0
	all := d.findings(t, args...)
	for _, f := range all {
		if f.ID == id && strings.Contains(f.What, what) {
			found = f
			n++
		}
	}
	require.Equal(t, 1, n, "%v", all)
	require.Equal(t, severity, found.Severity)
	return found
}

// Status, doctor and consumers say what leaders have said, with since when, and what is not known.
func TestStatesOfRelays(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, state, state_at, kafka_at)
		VALUES ('default', 'host/1/x', 7, now() + interval '1 h', '{"epoch": 7, "works": true}', now(), now())`)
	require.Regexp(t, `(?m)^RELAY +LEADER +LEASE +STATE +SINCE +PENDING`, d.ok(t, "status"))
	require.Regexp(t, `(?m)^default +host/1/x +\S+( \S+)? +works +- +0 `, d.ok(t, "status", "--check"))

	d.exec(t, `UPDATE {s}.outbox_lease SET state_at = now() - interval '4 s', kafka_at = now() - interval '70 s', state = jsonb_build_object('epoch', 7, 'works', false, 'reasons',
		'["the circuit breaker is open"]'::jsonb, 'breakers', '[{"state": "open", "since": "2026-01-02T12:03:09Z"}]'::jsonb, 'outages', jsonb_build_array(jsonb_build_object(
		'what', 'Kafka', 'class', 'unreachable', 'since', now() - interval '60 s', 'error', 'dial tcp 10.0.0.7:9092: refused')))`)
	text := d.call(t, "status", "--check")
	require.Equal(t, exitProblems, text.code)
	require.Regexp(t, `(?m)^default +host/1/x +\S+( \S+)? +unreachable +[1-9]m`, text.out)
	require.Regexp(t, `ERROR   relay default: Kafka has not answered since [-0-9 :]+ UTC \(unreachable:`, text.out)
	require.Contains(t, strings.Join(strings.Fields(text.out), " "), "ERROR relay default: the circuit breaker is open, since 2026-01-02 12:03:09 UTC")
	var status statusJSON
	require.NoError(t, json.Unmarshal([]byte(d.ok(t, "status", "--json")), &status))
	require.Equal(t, "unreachable", status.Relays[0].State.Outages[0].Class)
	require.Equal(t, "open", status.Relays[0].State.Breaker)
	require.False(t, status.Relays[0].State.Works)
	f := d.foundOne(t, "relay.outage", severityError, "Kafka has not answered since")
	require.Regexp(t, `^host/1/x, which leads, said so \S+ ago\. Kafka last answered it [1-9]m\d*s? ago\.`, f.Means)
	f = d.foundOne(t, "kafka.connect", severityError, "Kafka does not answer at 127.0.0.1:1", "--kafka", "127.0.0.1:1", "--only", "kafka,relay")
	require.Contains(t, f.Means, "from here")
	require.Contains(t, f.Means, "By the rows, relay default said ", "what the doctor sees, and what the leader saw")

	d.exec(t, `UPDATE {s}.outbox_lease SET state = '{"epoch": 7, "works": true, "outages": [{"what": "topic orders", "class": "unknown_topic", "since": "2026-01-02T12:03:00Z", "error": "x"}]}'`)
	d.foundOne(t, "relay.outage", severityWarning, "topic orders has been failing since 2026-01-02 12:03:00 UTC (unknown topic: x)")

	d.exec(t, `UPDATE {s}.outbox_lease SET epoch = 8`)
	require.Regexp(t, `(?m)^default +host/1/x +\S+( \S+)? +unknown +- +0 `, d.ok(t, "status", "--check"))
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) SELECT 'default', 0, pg_current_snapshot(), 0, 1, 8`)
	d.record(t, "a")
	require.Regexp(t, `NOTE    relay default: events are pending, and it is unknown`, d.ok(t, "status", "--check"), "it may have taken the lease just now")
	d.foundOne(t, "relay.unknown", severityWarning, "host/1/x leads, and has not said yet", "--max-age", "1ms", "--only", "relay")
	require.Contains(t, d.ok(t, "status", "--json"), `"state": null`)
	d.exec(t, `UPDATE {s}.outbox_lease SET expires_at = now() - interval '2 min'`)
	require.Regexp(t, `(?m)^default +none +- +unknown +[2-9]m`, d.ok(t, "status"))
	require.Regexp(t, `ERROR   relay default: no process leads, its state is unknown since`, d.ok(t, "status"))
}

// Groups are shown with what their live members have said, and the commands work whatever a role has stored.
func TestStatesOfGroups(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	require.Equal(t, "No consumer group has begun to read.\n", d.ok(t, "consumers"))
	d.exec(t, `INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes)
		SELECT 'mail', 'host/' || n, false, now(), '1 h', '{}' FROM generate_series(10, 29) AS n`)
	text := d.ok(t, "consumers")
	require.Contains(t, text, "No consumer group has saved a position in Kafka.")
	require.NotContains(t, text, "begun to read")
	require.Regexp(t, `(?m)^GROUP +RUN +STATE +SINCE`, text)
	require.Regexp(t, `(?m)^mail +20 +works +- `, text)
	d.exec(t, `UPDATE {s}.event_member SET state = jsonb_build_object('breakers', jsonb_build_array(jsonb_build_object('action', 'CALL', 'state', 'open', 'since', now() - interval '90 s')))
		WHERE member IN ('host/11', 'host/12', 'host/13')`)
	require.Regexp(t, `(?m)^mail +20 +breaker open 3/20 +[1-9]m`, d.ok(t, "status"))
	require.Regexp(t, `WARNING group mail: the breaker of action CALL is open, since`, d.ok(t, "status"))
	require.Equal(t, exitProblems, d.call(t, "status", "--check").code)
	d.exec(t, `UPDATE {s}.event_member SET works = false, reasons = '{"PostgreSQL has been failing for 7s: read only"}',
		state = '{"outages": [{"what": "PostgreSQL", "class": "read_only", "since": "2026-01-02T12:03:00Z", "error": "read only"}]}' WHERE member = 'host/14'`)
	d.foundOne(t, "delivery.outage", severityError, "group mail: PostgreSQL has been failing since 2026-01-02 12:03:00 UTC (read only: read only) at 1 of 20 members")
	for _, f := range d.findings(t) {
		require.NotEqual(t, "delivery.member", f.ID, "what is an outage is said once: %s", f.What)
	}
	require.Contains(t, d.ok(t, "status", "--json"), `"class": "read_only"`)
	d.exec(t, `UPDATE {s}.event_member SET renewed_at = now() - interval '4 h'`)
	require.Regexp(t, `(?m)^mail +0 +unknown +4h`, d.ok(t, "status"))

	for i, change := range testenv.PoisonedMembers {
		member := fmt.Sprint("poison", i)
		d.exec(t, `INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes) VALUES ('poison', '`+member+`', true, now(), '1 h', '{}')`)
		d.exec(t, `UPDATE {s}.event_member SET `+change+` WHERE member = '`+member+`'`)
		require.Zero(t, d.call(t, "status").code, change)
	}
	for _, command := range []string{"status", "consumers"} {
		d.ok(t, command)
		d.ok(t, command, "--json")
	}
	require.NotContains(t, d.call(t, "doctor", "--json").out, "doctor.relay")
}
