package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// verifyJSON is the output of outbox verify --json.
type verifyJSON struct {
	Events        int64             `json:"events"`
	FirstID       int64             `json:"first_id"`
	LastID        int64             `json:"last_id"`
	Records       int64             `json:"records"`
	Found         map[string]int64  `json:"found"`
	Findings      []discrepancyJSON `json:"findings"`
	NotSent       map[string]int64  `json:"not_sent"`
	Expired       int64             `json:"expired"`
	Older         int64             `json:"older"`
	Released      int64             `json:"released"`
	Foreign       int64             `json:"foreign"`
	Replayed      int64             `json:"replayed"`
	FirstAt       *time.Time        `json:"first_at"`
	LastAt        *time.Time        `json:"last_at"`
	PhantomsSince *time.Time        `json:"phantoms_since"`
	Seconds       float64           `json:"seconds"`
	Since         *time.Time        `json:"since"`
	Until         *time.Time        `json:"until"`
}

// What a relay has sent is right. An event that is sent again is a finding unless that is allowed, and one whose record
// is missing is lost.
func TestVerifyCommand(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	testenv.CreateTopic(t, d.brokers, d.topic, 3)
	d.record(t, "a", "b", "a")
	stop := d.relay(t)
	d.received(t, "a", "b")
	require.Eventually(t, func() bool { return strings.Contains(d.ok(t, "verify"), "3 events (ids 1 to 3, recorded 2") }, testenv.Patience, 10*time.Millisecond)
	stop()
	require.Contains(t, d.ok(t, "verify"), "lost 0  phantom 0  inverted 0  repeated 0")
	a := d.call(t, "replay", "--key", "b", "--yes", "--reason", "why")
	require.Equal(t, exitOK, a.code, a.err)
	var out verifyJSON
	d.json(t, &out, exitProblems, "verify")
	require.Equal(t, map[string]int64{"lost": 0, "phantom": 0, "inverted": 0, "repeated": 1}, out.Found)
	require.Len(t, out.Findings, 1)
	require.EqualValues(t, 2, out.Findings[0].OutboxID)
	require.EqualValues(t, 4, out.Records)
	d.json(t, &out, exitOK, "verify", "--allow-repeats", "--limit", "0", "--since", "1h")
	require.Empty(t, out.Findings)
	require.EqualValues(t, 1, out.Found["repeated"])

	d.record(t, "c")
	require.Contains(t, d.ok(t, "verify", "--allow-repeats"), "1 events that the relay has not come to")
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT relay, 0, pg_current_snapshot(), 4, system_identifier, epoch FROM {s}.outbox_cursor ORDER BY id DESC LIMIT 1`)
	a = d.call(t, "verify", "--after", "3")
	require.Equal(t, exitProblems, a.code, a.err)
	require.Regexp(t, `lost +\S+ +4 +`+d.topic+` +the relay has passed it, and no record has it`, a.out)
	a = d.call(t, "verify", "--relay", "other")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "no row in outbox_cursor")
}

// A recorded history is judged without a database.
func TestVerifyHistory(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "history.jsonl")
	require.NoError(t, os.WriteFile(path, []byte(`
{"event": {"id": "o-1", "position": 1, "key": "Order 17", "topic": "orders"}}
{"event": {"id": "o-2", "position": 2, "key": "Order 17", "topic": "orders"}}
{"record": {"id": "o-2", "topic": "orders", "partition": 0, "offset": 0}}
{"record": {"id": "o-1", "topic": "orders", "partition": 0, "offset": 1}}
`), 0o600))
	d := &commandFixture{}
	a := d.call(t, "verify", "--history", path)
	require.Equal(t, exitProblems, a.code, a.err)
	require.Regexp(t, `inverted +o-1 +1 +orders/0/1 +Order 17 +event 2 of its key came before it, at offset 0`, a.out)
	require.Contains(t, a.out, "2 events, 2 records, in ")
	now := time.Now()
	d.change = func(e *env) { e.now = func() time.Time { now = now.Add(time.Minute); return now } }
	a = d.call(t, "verify", "--history", path)
	require.Contains(t, a.err, "events compared 0 of 4\n", "the progress")
	a = d.call(t, "verify", "--history", path, "--json")
	require.Empty(t, a.err)
	a = d.call(t, "verify", "--history", path+"x")
	require.Equal(t, exitError, a.code)
}
