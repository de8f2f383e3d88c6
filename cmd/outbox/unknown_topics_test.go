package main

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outboxgo/outbox/internal/testenv"
)

// recordUnknown records an event for each of n topics that Kafka does not have, each of a type of its own, as a writer
// does without a Recorder.
func (d *commandFixture) recordUnknown(t testing.TB, n int) {
	t.Helper()
	d.exec(t, `INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at)
		SELECT gen_random_uuid(), 'test.thing.' || i, 'test', 'Thing', i, '{}', 'application/json', 'unknown-' || i, now()
		  FROM pg_catalog.generate_series(1, $1::int) AS i`, n)
}

// A writer records events for thousands of topics that Kafka does not have. The log and the metrics of the relay do not
// grow with them, and name the topic that works.
func TestThousandsOfUnknownTopics(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newShop(t)
	d.brokers = d.withFakeKafka(t, kfake.SeedTopics(1, d.topic)).ListenAddrs()
	const unknown = 3_000
	d.recordUnknown(t, unknown)
	p := d.startRelay(t)
	require.Eventually(t, func() bool { return d.statuses(t)["waiting"] == unknown }, testenv.Patience, testenv.Patience/100,
		"the events of unknown topics do not wait")
	d.record(t, "good")
	d.received(t, "good")
	good := fmt.Sprintf(`messaging_destination_name="%s"`, d.topic)
	var metrics string
	require.Eventually(t, func() bool {
		_, metrics = get(t, p.address(), "/metrics", nil)
		return strings.Contains(metrics, good)
	}, testenv.Patience, testenv.Patience/100, "the topic that works is not named")
	code, _ := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
	lines, named := strings.Count(p.log.String(), "\n"), strings.Count(p.log.String(), "unknown-")
	t.Logf("%d lines of log, which name unknown topics %d times; %d lines of metrics", lines, named, strings.Count(metrics, "\n"))
	require.Less(t, lines, 200)
	require.Positive(t, named)
	require.Less(t, strings.Count(metrics, "\n"), 2_000)
	require.Contains(t, metrics, `messaging_destination_name="_other"`)
	promtool(t, metrics)
}
