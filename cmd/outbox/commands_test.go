package main

import (
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

type migrationsDoc struct {
	Schema     string          `json:"schema"`
	Applied    []migrationJSON `json:"applied"`
	Migrations []migrationJSON `json:"migrations"`
	Version    int             `json:"version"`
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	d := newCommandFixture(t)
	require.Contains(t, d.ok(t, "migrate", "status"), "pending")
	require.Equal(t, exitProblems, d.call(t, "migrate", "status", "--check").code)
	up := d.ok(t, "migrate", "up")
	require.True(t, strings.HasPrefix(up, "applied 0001_events_and_cursors.sql\n"))
	version := strings.Count(up, "applied ")
	at := fmt.Sprintf("schema %s is up to date: version %d\n", d.schema, version)
	require.True(t, strings.HasSuffix(up, at), up)
	require.Equal(t, at, d.ok(t, "migrate", "up"))
	require.Equal(t, "index for --aggregate: there\n"+at, d.call(t, "migrate", "up", "--aggregate-index").out)
	require.Contains(t, d.ok(t, "migrate", "status", "--check"), "0001_events_and_cursors.sql")
	var doc migrationsDoc
	d.json(t, &doc, exitOK, "migrate", "status")
	require.Equal(t, d.schema, doc.Schema)
	require.Equal(t, 1, doc.Migrations[0].Version)
	require.WithinDuration(t, time.Now(), *doc.Migrations[0].AppliedAt, testenv.Patience)
	doc = migrationsDoc{}
	d.json(t, &doc, exitOK, "migrate", "up")
	require.NotNil(t, doc.Applied)
	require.Empty(t, doc.Applied)
	require.Equal(t, version, doc.Version)
	d.exec(t, `INSERT INTO {s}.outbox_migration VALUES (1000, '1000_later.sql')`)
	a := d.call(t, "migrate", "up")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "ahead of this release")
	require.Equal(t, exitProblems, d.call(t, "migrate", "status", "--check").code)
}

// The printed statements make the tables.
func TestMigratePrint(t *testing.T) {
	t.Parallel()
	d := newCommandFixture(t)
	sql := d.ok(t, "migrate", "print")
	conn, err := d.db.Acquire(background)
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(background, sql, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	_, err = conn.Exec(background, "RESET search_path")
	require.NoError(t, err)
	have, err := things(background, &env{db: d.db, globals: globals{schema: d.schema}})
	require.NoError(t, err)
	require.Empty(t, compare(expected(), have))
	var doc struct {
		Migrations []struct{ Name, SQL string } `json:"migrations"`
	}
	d.json(t, &doc, exitOK, "migrate", "print", "--from", "1")
	require.Contains(t, doc.Migrations[0].SQL, "CREATE TABLE outbox")
}

// The statements in a document make the tables in the schema of --schema, also if each has a session of its own.
func TestMigratePrintJSON(t *testing.T) {
	t.Parallel()
	d := newCommandFixture(t)
	var doc struct {
		Migrations []struct{ Name, SQL string } `json:"migrations"`
	}
	d.json(t, &doc, exitOK, "migrate", "print")
	for _, m := range doc.Migrations {
		require.True(t, strings.HasPrefix(m.SQL, "-- +goose Up\n"), "other tools read this line")
		conn, err := pgx.Connect(background, d.url(""))
		require.NoError(t, err)
		_, err = conn.Exec(background, m.SQL, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, conn.Close(background))
		require.NoError(t, err, m.Name)
	}
	have, err := things(background, &env{db: d.db, globals: globals{schema: d.schema}})
	require.NoError(t, err)
	require.Empty(t, compare(expected(), have))
}

func TestStatus(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	require.Contains(t, d.ok(t, "status"), "No relay has run here yet.")
	stop := d.relay(t)
	d.record(t, "a", "b")
	d.requireSent(t)
	var doc statusJSON
	d.json(t, &doc, exitOK, "status", "--check", "--open-for", "1h")
	require.Len(t, doc.Relays, 1)
	require.Equal(t, "default", doc.Relays[0].Name)
	require.NotEmpty(t, doc.Relays[0].Leader)
	require.NotNil(t, doc.Relays[0].MovedAt)
	require.Empty(t, doc.Problems)
	require.NotNil(t, doc.Transactions)
	require.Equal(t, d.schema, doc.Schema)
	require.NotContains(t, doc.Database, ":postgres@")

	stop()
	d.record(t, "c")
	d.fail(t, outbox.StatusDead, "dead")
	d.change = terminal
	a := d.call(t, "status", "--check", "--open-for", "1h", "--max-age", "1ns")
	require.Equal(t, exitProblems, a.code)
	require.Empty(t, a.err)
	requireNarrow(t, a.out)
	for _, want := range []string{"RELAY ", "none", "ERROR   relay default: no process leads", "WARNING relay default: 1 event is dead", "relay default: 1 event has waited"} {
		require.Contains(t, a.out, want)
	}
	d.change = nil
	tx, err := d.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(background) }()
	require.NoError(t, d.rec.Record(background, tx, happened{Key: "open", At: time.Now()}))
	require.Eventually(t, func() bool {
		doc = statusJSON{}
		d.json(t, &doc, exitOK, "status", "--open-for", "1ms")
		for _, o := range doc.Transactions {
			if o.Recording {
				return true
			}
		}
		return false
	}, testenv.Patience, 10*time.Millisecond)
}

// sendExactly writes a row of the mode exactly once, as a relay with a transaction under way does: its position is
// that of the row before.
func (d *commandFixture) sendExactly(t testing.TB, topic string, batch any) {
	t.Helper()
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch, cursor_topic, token, batch, confirmed)
		SELECT relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch, $1, 't', $2, id
		  FROM {s}.outbox_cursor WHERE relay = 'default' ORDER BY id DESC LIMIT 1`, topic, batch)
}

// Status names the cursor topic of a relay that sends exactly once, and the newest transaction that its newest row says
// is confirmed.
func TestStatusOfExactlyOnce(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.relay(t)()
	var doc statusJSON
	d.json(t, &doc, exitOK, "status")
	require.Empty(t, doc.Relays[0].CursorTopic)
	require.Zero(t, doc.Relays[0].Transaction)
	require.NotContains(t, d.ok(t, "status"), "exactly once")
	d.sendExactly(t, "cursors", nil)
	require.Contains(t, d.ok(t, "status"), "default: exactly once, cursor topic cursors, no transaction is confirmed yet\n")
	d.sendExactly(t, "cursors", 4711)
	require.Contains(t, d.ok(t, "status"), "default: exactly once, cursor topic cursors, transaction 4,711 is confirmed\n")
	doc = statusJSON{}
	d.json(t, &doc, exitOK, "status")
	require.Equal(t, "cursors", doc.Relays[0].CursorTopic)
	require.EqualValues(t, 4711, doc.Relays[0].Transaction)
}

// A command with --watch runs until it is interrupted, and then exits with 0.
func TestStatusWatch(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.relay(t)
	for _, tty := range []bool{false, true} {
		if d.change = nil; tty {
			d.change = terminal
		}
		ctx, cancel := context.WithCancel(background)
		var out, errs testenv.Buffer
		ended := make(chan int, 1)
		go func() { ended <- d.start(ctx, &out, &errs, "status", "--watch", "--every", "100ms") }()
		require.Eventually(t, func() bool { return strings.Count(out.String(), "RELAY ") >= 3 }, testenv.Patience, 10*time.Millisecond)
		cancel()
		require.Equal(t, exitOK, <-ended)
		require.Empty(t, errs.String())
		require.Equal(t, tty, strings.Contains(out.String(), "\x1b[2J"))
	}
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	var out, errs testenv.Buffer
	ended := make(chan int, 1)
	go func() { ended <- d.start(ctx, &out, &errs, "status", "--watch", "--every", "100ms", "--json") }()
	require.Eventually(t, func() bool { return strings.Count(out.String(), "\n") >= 2 }, testenv.Patience, 10*time.Millisecond)
	cancel()
	require.Equal(t, exitOK, <-ended)
	for line := range strings.Lines(out.String()) {
		unmarshal(t, line, new(statusJSON))
	}
}

// A status that is watched goes on after an error, with a line that says when it was. It ends if the tables are gone.
func TestStatusWatchGoesOn(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a transaction that is left open
	d := newCommandFixture(t).migrate(t)
	d.relay(t)()
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	var out, errs testenv.Buffer
	ended := make(chan int, 1)
	go func() { ended <- d.start(ctx, &out, &errs, "status", "--watch", "--every", "100ms", "--timeout", "1s") }()
	shown := func() int { return strings.Count(out.String(), "RELAY ") }
	require.Eventually(t, func() bool { return shown() > 0 }, testenv.Patience, 10*time.Millisecond)
	tx, err := d.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(background) }()
	_, err = tx.Exec(background, `LOCK TABLE `+pgx.Identifier{d.schema, "outbox_cursor"}.Sanitize())
	require.NoError(t, err)
	require.Eventually(t, func() bool { return strings.Count(errs.String(), "context deadline exceeded") > 1 || len(ended) > 0 }, testenv.Patience, 10*time.Millisecond)
	require.Empty(t, ended, errs.String())
	require.Regexp(t, `^outbox: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d: .*context deadline exceeded`, errs.String())
	require.NoError(t, tx.Rollback(background))
	before := shown()
	require.Eventually(t, func() bool { return shown() > before }, testenv.Patience, 10*time.Millisecond)
	d.exec(t, `ALTER TABLE {s}.outbox_cursor RENAME TO gone`)
	require.Equal(t, exitError, <-ended)
	require.Contains(t, errs.String(), "outbox migrate up")
}

// A group whose last process has ended is shown until its rows are deleted: of consumers, which have nothing that
// waits in PostgreSQL, and of workers.
func TestStoppedGroups(t *testing.T) {
	t.Parallel()
	d := newClinic(t)
	d.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
		SELECT name, 'orders', gen_random_uuid(), n, 0, 7 FROM unnest('{mail,search}'::text[]) AS name, generate_series(0, 2) AS n`)
	d.exec(t, `INSERT INTO {s}.event_subscription (consumer_group) VALUES ('stats')`)
	d.exec(t, `INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes) VALUES ('search', 'host/1', true, now(), '1 h', '{}')`)
	var doc statusJSON
	d.json(t, &doc, exitOK, "status", "--check")
	var names []string
	for _, g := range doc.Groups {
		names = append(names, fmt.Sprint(g.Group, " ", len(g.Members)))
	}
	require.Equal(t, []string{"mail 0", "search 1", "stats 0"}, names)
	require.Regexp(t, `(?m)^mail +0 +-`, d.ok(t, "status"))
	require.Regexp(t, `(?m)^mail +0 +-`, d.ok(t, "consumers", "--group", "mail"))
	require.NotContains(t, d.ok(t, "consumers", "--group", "mail"), "stats")
	f := d.requireFinding(t, "delivery.members", severityNote, "group mail: no process runs", "--only", "delivery.members")
	d.exec(t, `INSERT INTO {s}.consumer_handler (consumer_group, topic, action, event_type) VALUES ('mail', 'orders', 'SENT', 'e');
		INSERT INTO {s}.consumer_gap (consumer_group, topic, topic_id, partition, action, event_type, from_offset, opened_at)
		VALUES ('mail', 'orders', gen_random_uuid(), 0, 'SENT', 'e', 0, now() - interval '40 d')`)
	require.Len(t, d.findings(t, "--only", "delivery.gap"), 1)
	_, statements, _ := strings.Cut(f.Do, "delete its rows: ")
	d.exec(t, statements)
	require.Empty(t, d.findings(t, "--only", "delivery.gap"))
	d.exec(t, `DELETE FROM {s}.event_subscription`)
	require.Empty(t, d.findings(t, "--only", "delivery.members"))
	d.json(t, &doc, exitOK, "status")
	require.Len(t, doc.Groups, 1)
}

// tailing runs tail until the test ends, and returns its output.
func (d *commandFixture) tailing(t *testing.T, args ...string) (*testenv.Buffer, chan int) {
	t.Helper()
	ctx, cancel := context.WithCancel(background)
	var out, errs testenv.Buffer
	ended := make(chan int, 1)
	go func() { ended <- d.start(ctx, &out, &errs, append([]string{"tail"}, args...)...) }()
	t.Cleanup(cancel)
	return &out, ended
}

func TestTail(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	plain, _ := d.tailing(t, "--payload")
	lines, ended := d.tailing(t, "--json", "--aggregate", "Thing/mine", "--type", "test.thing.happened.v1", "--topic", d.topic, "--key", "mine", "--limit", "2")
	byKey, _ := d.tailing(t, "--json", "--key", "mine")
	nothing, _ := d.tailing(t, "--topic", "nowhere")
	require.Eventually(t, func() bool { // it shows events that are recorded after its start
		d.record(t, "other", "mine")
		return strings.Count(lines.String(), "\n") == 2
	}, testenv.Patience, 100*time.Millisecond)
	require.Equal(t, exitOK, <-ended)
	for line := range strings.Lines(lines.String()) {
		var event recordedJSON
		unmarshal(t, line, &event)
		require.Equal(t, "mine", event.AggregateID)
		require.Contains(t, string(event.Payload), `"Key":"mine"`)
		require.Equal(t, d.topic, event.Topic)
	}
	require.Eventually(t, func() bool {
		return strings.Contains(plain.String(), "test.thing.happened.v1  Thing/other  "+d.topic) && strings.Contains(plain.String(), `"Key": "mine"`)
	}, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return strings.Contains(byKey.String(), "mine") }, testenv.Patience, 10*time.Millisecond)
	require.NotContains(t, byKey.String(), "other")
	require.Empty(t, nothing.String())
}

type failuresDoc struct {
	Failures []failureJSON `json:"failures"`
	More     bool          `json:"more"`
	Next     string        `json:"next"`
}

// An empty list says whether resolved events are left out, and whether flags picked none.
func TestFailuresListIsEmpty(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	require.Equal(t, "Nothing has failed.\n", d.ok(t, "failures", "list"))
	d.fail(t, outbox.StatusResolved, "a")
	require.Equal(t, "Nothing is unresolved. Not shown: 1 resolved failure (--status resolved).\n", d.ok(t, "failures", "list"))
	require.Equal(t, "No failure matches these flags.\n", d.ok(t, "failures", "list", "--key", "b"))
	require.Equal(t, "No failure matches these flags.\n", d.ok(t, "failures", "list", "--status", "dead"))
}

func TestFailuresList(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	require.Contains(t, d.ok(t, "failures", "list"), "Nothing has failed")
	d.fail(t, outbox.StatusDead, "a", "b")
	d.fail(t, outbox.StatusParked, "c")
	d.fail(t, outbox.StatusResolved, "d")
	list := func(args ...string) (keys string) {
		var doc failuresDoc
		d.json(t, &doc, exitOK, append([]string{"failures", "list"}, args...)...)
		for _, f := range doc.Failures {
			keys += f.Key
		}
		if doc.More {
			keys += "+"
		}
		return keys
	}
	for args, want := range map[string]string{
		"": "cba", "--status dead": "ba", "--status dead,resolved": "dba", "--key a": "a", "--aggregate Thing/b": "b", "--aggregate Thing": "cba",
		"--aggregate Other": "", "--type test.thing.happened.v1": "cba", "--type x": "", "--topic " + d.topic: "cba", "--topic x": "",
		"--class message_too_large": "cba", "--class x": "", "--relay default": "cba", "--relay x": "", "--since 1h": "cba", "--until 1h": "",
		"--since 2020-01-01": "cba", "--limit 2": "cb+", "--limit 3": "cba", "--limit 1000": "cba",
	} {
		require.Equal(t, want, list(strings.Fields(args)...), args)
	}
	var doc failuresDoc
	d.json(t, &doc, exitOK, "failures", "list", "--limit", "1")
	require.Equal(t, doc.Failures[0].ID, doc.Next)
	require.Equal(t, "ba", list("--after", doc.Next))
	d.change = terminal
	text := d.ok(t, "failures", "list", "--limit", "2")
	requireNarrow(t, text)
	require.Contains(t, text, "There is more: --after ")
	require.NotContains(t, text, "\x1b")
	require.Contains(t, d.ok(t, "failures", "count"), "3 in all, 3 unresolved")
	var counts struct {
		Total, Unresolved int
		More              bool
		Counts            []struct {
			Kind, Relay, Status, Type, Class string
			Failures                         int
			More                             bool
			Oldest                           time.Time
		}
	}
	d.json(t, &counts, exitOK, "failures", "count")
	require.Equal(t, []int{3, 3}, []int{counts.Total, counts.Unresolved})
	require.Equal(t, 2, counts.Counts[0].Failures)
	require.Equal(t, "event", counts.Counts[0].Kind)
}

// firstFailed returns the id of the only failed event of a key.
func (d *commandFixture) firstFailed(t testing.TB, key string) string {
	t.Helper()
	var doc failuresDoc
	d.json(t, &doc, exitOK, "failures", "list", "--key", key, "--status", strings.Join(statuses, ","))
	require.Len(t, doc.Failures, 1)
	return doc.Failures[0].ID
}

func TestFailuresShow(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.fail(t, outbox.StatusDead, "a")
	id := d.firstFailed(t, "a")
	d.ok(t, "failures", "resolve", id, "--reason", "seen by hand", "--operator", "lee")
	var one failureJSON
	d.json(t, &one, exitOK, "failures", "show", id)
	require.JSONEq(t, `{"key": 1}`, string(one.Payload))
	require.Equal(t, map[string]string{"traceparent": "00-x"}, one.Headers)
	require.Equal(t, "lee", one.Audit[0].Operator)
	require.NotEmpty(t, one.Audit[0].Login)
	require.Equal(t, "resolve", one.Audit[0].Action)
	require.Equal(t, "seen by hand", one.Resolution)
	require.Contains(t, one.Error, "\x1b[31m", "JSON has it as it is")
	text := d.ok(t, "failures", "show", id)
	for _, want := range []string{"status     resolved", "aggregate  Thing/a", "error      too large·[31m", "traceparent: 00-x", `  "key": 1`, "resolve by lee (" + one.Audit[0].Login + "): seen by hand"} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, "\x1b")
	requireNarrow(t, text)
	text = d.ok(t, "failures", "show", id, "--no-payload")
	require.NotContains(t, text, `"key": 1`)
	require.NotContains(t, text, "traceparent")
	for _, id := range []string{"event-4711", "delivery-4711"} {
		a := d.call(t, "failures", "show", id)
		require.Equal(t, exitError, a.code)
		require.Equal(t, "outbox: failure "+id+": not found\n", a.err)
	}
	for _, id := range []string{"17", "0", "-1", "other-1", "event-", "event-0", "event"} {
		a := d.call(t, "failures", "show", "--", id)
		require.Equal(t, exitUsage, a.code, id)
		require.Contains(t, a.err, "is no id", id)
	}
}

type bulkDoc struct {
	Action   string         `json:"action"`
	Failures int            `json:"failures"`
	DryRun   bool           `json:"dry_run"`
	Topics   map[string]int `json:"topics"`
	Handlers []handlerJSON  `json:"handlers"`
}

func TestFailuresRetryAndResolveOne(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.fail(t, outbox.StatusDead, "a", "b")
	d.fail(t, outbox.StatusParked, "c")
	a, c := d.firstFailed(t, "a"), d.firstFailed(t, "c")
	require.Equal(t, "topic "+d.topic+": 1\nwould retry 1 failure\n", d.ok(t, "failures", "retry", a, "--dry-run"))
	require.Equal(t, "would retry 0 failures\n", d.ok(t, "failures", "retry", c, "--dry-run"), "it is parked")
	require.Equal(t, map[string]int{"dead": 2, "parked": 1}, d.statuses(t))
	require.Equal(t, "retried 1 failure\n", d.ok(t, "failures", "retry", a, "--reason", "x"))
	require.Equal(t, map[string]int{"dead": 1, "parked": 2}, d.statuses(t))
	rejected := d.call(t, "failures", "retry", c, "--reason", "x")
	require.Equal(t, exitError, rejected.code)
	require.Contains(t, rejected.err, "not possible in this status: it is parked")
	var doc bulkDoc
	d.json(t, &doc, exitOK, "failures", "resolve", a, "--reason", "x")
	require.Equal(t, bulkDoc{"resolve", 1, false, nil, nil}, doc)
	require.Equal(t, map[string]int{"dead": 1, "parked": 1, "resolved": 1}, d.statuses(t))
	var who string
	require.NoError(t, d.db.QueryRow(background, `SELECT string_agg(DISTINCT operator || ':' || reason, ',') FROM `+pgx.Identifier{d.schema, "outbox_audit"}.Sanitize()).Scan(&who))
	require.Equal(t, "kim:x", who, "the user of the system")
}

// Without --yes, the command only counts the failures that the flags pick.
func TestFailuresRetryAndResolveMany(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.fail(t, outbox.StatusDead, "a", "b", "c")
	d.fail(t, outbox.StatusParked, "d")
	d.exec(t, `UPDATE {s}.outbox_failed SET topic = 'elsewhere', parking_key = 'elsewhere/c' WHERE aggregate_id = 'c'`)
	require.Equal(t, "topic "+d.topic+": 2\ntopic elsewhere: 1\nwould retry 3 failures; --yes does it\n", d.ok(t, "failures", "retry", "--all"))
	require.Equal(t, "topic elsewhere: 1\nwould retry 1 failure; --yes does it\n", d.ok(t, "failures", "retry", "--topic", "elsewhere"))
	var dry bulkDoc
	d.json(t, &dry, exitOK, "failures", "retry", "--all")
	require.Equal(t, bulkDoc{"retry", 3, true, map[string]int{d.topic: 2, "elsewhere": 1}, []handlerJSON{}}, dry)
	require.Equal(t, "topic "+d.topic+": 1\nwould retry 1 failure; --yes does it\n", d.ok(t, "failures", "retry", "--until", "2100-01-01", "--key", "a"))
	require.Equal(t, "topic "+d.topic+": 1\nwould resolve 1 failure; --yes does it\n", d.ok(t, "failures", "resolve", "--key", "d", "--reason", "x"))
	require.Equal(t, "would resolve 0 failures\n", d.ok(t, "failures", "resolve", "--key", "nobody"))
	require.Equal(t, map[string]int{"dead": 3, "parked": 1}, d.statuses(t))
	require.Equal(t, "retried 1 failure\n", d.ok(t, "failures", "retry", "--key", "a", "--yes", "--reason", "x"))
	require.Equal(t, map[string]int{"dead": 2, "parked": 2}, d.statuses(t))
	var doc bulkDoc
	d.json(t, &doc, exitOK, "failures", "resolve", "--all", "--yes", "--reason", "x", "--rate", "100000")
	require.Equal(t, bulkDoc{"resolve", 4, false, nil, nil}, doc)
	require.Equal(t, map[string]int{"resolved": 4}, d.statuses(t))
}

// Ctrl-C ends a long run between two parts, and the command shows how much it has done.
func TestFailuresRetryIsInterrupted(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	var keys []string
	for i := range 300 {
		keys = append(keys, fmt.Sprint("k", i))
	}
	d.fail(t, outbox.StatusDead, keys...)
	ctx, cancel := context.WithCancel(background)
	var out, errs testenv.Buffer
	ended := make(chan int, 1)
	d.change = terminal
	go func() {
		ended <- d.start(ctx, &out, &errs, "failures", "retry", "--all", "--yes", "--reason", "x", "--rate", "10")
	}()
	require.Eventually(t, func() bool { return strings.Contains(errs.String(), "retried [") }, testenv.Patience, 5*time.Millisecond, "a bar")
	cancel()
	require.Equal(t, exitError, <-ended)
	require.Contains(t, errs.String(), "outbox: interrupted")
	done := d.statuses(t)["parked"]
	require.Positive(t, done)
	require.Less(t, done, 300)
	require.Contains(t, out.String(), fmt.Sprintf("retried %d failures", done))
}

func TestFailuresEditHoldRelease(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.fail(t, outbox.StatusDead, "a")
	id := d.firstFailed(t, "a")
	d.stdin = `{"key": 2}`
	require.Contains(t, d.ok(t, "failures", "edit", id, "--payload", "-", "--reason", "x"), "edited")
	require.Contains(t, d.ok(t, "failures", "show", id), `"key": 2`)
	file := filepath.Join(t.TempDir(), "payload")
	require.NoError(t, os.WriteFile(file, []byte("{"), 0o600))
	a := d.call(t, "failures", "edit", id, "--payload", file, "--reason", "x")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "no JSON")
	require.Equal(t, exitError, d.call(t, "failures", "edit", id, "--payload", file+"s", "--reason", "x").code)

	require.Equal(t, "hold: the key of "+id+"\n", d.ok(t, "failures", "hold", id, "--reason", "x"))
	require.Contains(t, d.ok(t, "failures", "list"), "parked,held")
	var doc struct{ Action, ID string }
	d.json(t, &doc, exitOK, "failures", "release", id, "--reason", "x")
	require.Equal(t, []string{"release", id}, []string{doc.Action, doc.ID})
	a = d.call(t, "failures", "release", id, "--reason", "x")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "its key is not held")
}

type dlqDoc struct {
	Topic       string           `json:"topic"`
	DeadLetters []deadLetterJSON `json:"dead_letters"`
	More        bool             `json:"more"`
}

type replayDoc struct {
	Topic  string `json:"topic"`
	DryRun bool   `json:"dry_run"`
	Read   int    `json:"read"`
	Sent   int    `json:"sent"`
	Failed []struct {
		Partition int32
		Offset    int64
		Error     string
	} `json:"failed"`
	Topics map[string]int  `json:"topics"`
	Absent []string        `json:"absent_groups"`
	Next   map[int32]int64 `json:"next"`
}

// deadLetter returns a record of a dead-letter topic.
func deadLetter(dlq, topic, key, group, action string, failedAt time.Time) *kgo.Record {
	r := &kgo.Record{Topic: dlq, Key: []byte(key), Value: []byte(`{"n": 1}`)}
	for _, h := range [][2]string{{outbox.DeadLetterOriginalTopic, topic}, {outbox.DeadLetterOriginalPartition, "0"}, {outbox.DeadLetterOriginalOffset, "1"},
		{outbox.DeadLetterGroup, group}, {outbox.DeadLetterAction, action}, {outbox.DeadLetterError, "boom"}, {outbox.DeadLetterClass, "handler"},
		{outbox.DeadLetterAttempts, "4"}, {outbox.DeadLetterFailedAt, failedAt.UTC().Format(time.RFC3339)}} {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: h[0], Value: []byte(h[1])})
	}
	return r
}

func TestDLQ(t *testing.T) {
	t.Parallel()
	d := (&commandFixture{vars: map[string]string{}}).withKafka(t)
	topic := "cli-" + uuid.NewString()
	dlq := outbox.DeadLetterTopic(topic)
	testenv.CreateTopic(t, d.brokers, topic, 1)
	testenv.CreateTopic(t, d.brokers, dlq, 1)
	client, err := kgo.NewClient(kgo.SeedBrokers(d.brokers...), kgo.MetadataMinAge(50*time.Millisecond), kgo.UnknownTopicRetries(-1))
	require.NoError(t, err)
	defer client.Close()
	now := time.Now()
	require.NoError(t, client.ProduceSync(background, deadLetter(dlq, topic, "a", "stats", "COUNT", now), deadLetter(dlq, topic, "b", "stats", "SUM", now.Add(-2*time.Hour)),
		&kgo.Record{Topic: dlq, Key: []byte("none")}, deadLetter(dlq, topic, "c", "mail", "SEND", now)).FirstErr())

	list := func(args ...string) (keys string) {
		var doc dlqDoc
		d.json(t, &doc, exitOK, append([]string{"dlq", "list", dlq}, args...)...)
		for _, l := range doc.DeadLetters {
			keys += l.Key[:1]
		}
		if doc.More {
			keys += "+"
		}
		return keys
	}
	for args, want := range map[string]string{"": "abnc", "--group stats": "abn", "--action SUM": "bn", "--class x": "n", "--key c": "nc",
		"--since 1h": "anc", "--until 1h": "bn", "--from 0:2": "nc", "--limit 2": "ab+", "--limit 4": "abnc"} {
		require.Equal(t, want, list(strings.Fields(args)...), args)
	}
	var doc dlqDoc
	d.json(t, &doc, exitOK, "dlq", "list", dlq, "--values", "--limit", "1")
	require.JSONEq(t, `{"n": 1}`, string(doc.DeadLetters[0].Value))
	d.change = terminal
	text := d.ok(t, "dlq", "list", dlq)
	requireNarrow(t, text)
	require.Contains(t, text, "boom")
	d.change = nil

	require.Contains(t, d.ok(t, "dlq", "replay", dlq, "--group", "stats"), "\ntopic "+topic+": 2\nread 4, would send 2; --yes does it (next: --from 0:4)")
	require.Contains(t, d.ok(t, "dlq", "replay", dlq, "--group", "stats"), "group stats has read nothing of the topic")
	// The topic in a dead letter is untrusted input. It is shown, and can be picked.
	require.NoError(t, client.ProduceSync(background, deadLetter(dlq, "other", "d", "stats", "COUNT", now)).FirstErr())
	require.Contains(t, d.ok(t, "dlq", "list", dlq), "other")
	require.Equal(t, "d", list("--topic", "other", "--from", "0:4"))
	require.Contains(t, d.ok(t, "dlq", "replay", dlq, "--group", "stats"), "one of another topic: other")
	both := d.ok(t, "dlq", "replay", dlq, "--group", "stats", "--to", topic+",other")
	require.Contains(t, both, "topic "+topic+": 2\ntopic other: 1\nread 5, would send 3; --yes does it (next")
	require.Contains(t, d.ok(t, "dlq", "replay", dlq, "--topic", "other", "--to", topic+",other"), "\ntopic other: 1\nread 5, would send 1; --yes")
	require.Contains(t, d.ok(t, "dlq", "replay", dlq, "--group", "stats", "--to", "other", "--topic", topic), "one of another topic")
	var report replayDoc
	d.json(t, &report, exitOK, "dlq", "replay", dlq, "--group", "stats")
	require.True(t, report.DryRun)
	require.Equal(t, map[int32]int64{0: 5}, report.Next)
	require.Equal(t, map[string]int{topic: 2}, report.Topics)
	require.Contains(t, d.ok(t, "dlq", "list", topic), "No dead letters", "nothing was sent")
	report = replayDoc{}
	shop := newShop(t) // what was sent is in its audit; only that needs a database
	d.vars["DATABASE_URL"], d.schema = shop.vars["DATABASE_URL"], shop.schema
	d.json(t, &report, exitOK, "dlq", "replay", dlq, "--group", "stats", "--yes", "--reason", "mended")
	require.Equal(t, 5, report.Read)
	require.Equal(t, 2, report.Sent)
	require.Equal(t, map[string]int{topic: 2}, report.Topics)
	require.Len(t, report.Failed, 2, "what is no dead letter, and one of another topic")
	var arrived dlqDoc
	d.json(t, &arrived, exitOK, "dlq", "list", topic)
	require.Len(t, arrived.DeadLetters, 2)

	a := d.call(t, "dlq", "list", "missing-"+dlq)
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "UNKNOWN_TOPIC_OR_PARTITION")
	a = d.call(t, "dlq", "replay", dlq, "--kafka", "127.0.0.1:1")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "connection refused")
	a = d.call(t, "dlq", "replay", "missing-"+dlq)
	require.Equal(t, exitError, a.code)
	require.Empty(t, a.out, "nothing was read")
}

// A group without members is set back to a time or an offset. Without --yes, the command only shows the
// effect.
func TestConsumerRewind(t *testing.T) {
	t.Parallel()
	d := newShop(t).withKafka(t)
	topic := "cli-" + uuid.NewString()
	group := "rewind-" + topic
	testenv.CreateTopic(t, d.brokers, topic, 1)
	client, err := kgo.NewClient(kgo.SeedBrokers(d.brokers...), kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic), kgo.DisableAutoCommit(),
		kgo.MetadataMinAge(50*time.Millisecond))
	require.NoError(t, err)
	for i := range 3 {
		require.NoError(t, client.ProduceSync(background, &kgo.Record{Topic: topic, Value: []byte("{}"), Headers: []kgo.RecordHeader{
			{Key: "ce_specversion", Value: []byte("1.0")}, {Key: "ce_id", Value: []byte(strconv.Itoa(i))}, {Key: "ce_source", Value: []byte("shop")},
			{Key: "ce_type", Value: []byte("shop.order.created.v1")}}}).FirstErr())
	}
	for last := int64(0); last < 2; { // a poll may bring fewer than all
		records := client.PollFetches(background).Records()
		require.NoError(t, client.CommitRecords(background, records...))
		last = records[len(records)-1].Offset
	}
	a := d.call(t, "consumer", "rewind", "--group", group, "--to", "1h")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "the consumer group has members")
	client.Close()
	require.Eventually(t, func() bool { return d.call(t, "consumer", "rewind", "--group", group, "--to", "1h").code == exitOK }, testenv.Patience, 100*time.Millisecond)

	_, err = d.db.Exec(background, `INSERT INTO `+pgx.Identifier{d.schema, "event_handled"}.Sanitize()+` (consumer_group, aggregate_type, aggregate_id, action, event_source)
		VALUES ($1, 'shop.order.created.v1', 'shop 1', 'COUNT', 'shop')`, group)
	require.NoError(t, err)
	type doc struct {
		Group                                      string
		Time                                       *time.Time
		OldestNote                                 *time.Time `json:"oldest_note"`
		DryRun                                     bool       `json:"dry_run"`
		Partitions                                 []rewoundJSON
		Records, Noted, Unnoted, Older, Unreadable int
	}
	var dry, done doc
	d.json(t, &dry, exitOK, "consumer", "rewind", "--group", group, "--to", "1", "--topic", topic)
	require.Equal(t, doc{Group: group, OldestNote: dry.OldestNote, DryRun: true, Partitions: []rewoundJSON{{Topic: topic, From: 3, To: 1}}, Records: 2, Noted: 1, Unnoted: dry.Unnoted, Older: 1 - dry.Unnoted}, dry)
	text := d.ok(t, "consumer", "rewind", "--group", group, "--to", "1", "--topic", topic)
	require.Contains(t, text, "2 records: 1 noted in event_handled, not repeated")
	require.Contains(t, text, "Nothing is changed yet; --yes does it.")
	require.Regexp(t, `use this time: --to 2\d\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z\n`, d.ok(t, "consumer", "rewind", "--group", group, "--to", "1h"))
	d.json(t, &done, exitOK, "consumer", "rewind", "--group", group, "--to", "1", "--topic", topic, "--yes", "--reason", "restored")
	require.False(t, done.DryRun)
	require.Contains(t, d.ok(t, "consumer", "rewind", "--group", group, "--to", "2", "--topic", topic), "is not further than that anywhere")
	for want, args := range map[string]string{"--group is missing": "--to 1h", "--to is missing": "--group g", "needs one --topic": "--group g --to 3", "want how long ago": "--to soon"} {
		a := d.call(t, append([]string{"consumer", "rewind"}, strings.Fields(args)...)...)
		require.Equal(t, exitUsage, a.code)
		require.Contains(t, a.err, want)
	}
}

// Without the name of a database, the command does not connect. Otherwise pgx would try the local database
// with the name of the user. libpq's variables also name a database.
func TestNoDatabase(t *testing.T) {
	t.Setenv("PGHOST", "127.0.0.1")
	t.Setenv("PGPORT", "1")
	d := &commandFixture{}
	a := d.call(t, "status")
	require.Equal(t, exitUsage, a.code)
	require.Contains(t, a.err, "which database? --database URL, or $DATABASE_URL")
	require.NotContains(t, a.err, "127.0.0.1")
	for name, value := range map[string]string{"DATABASE_URL": "postgres://127.0.0.1:1/nowhere", "PGHOST": "127.0.0.1"} {
		d.vars = map[string]string{name: value}
		a := d.call(t, "status")
		require.Equal(t, exitError, a.code)
		require.Contains(t, a.err, "connect to ")
	}
}

// An error names the flag or the variable that was given.
func TestErrorsNameWhatWasGiven(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ variable, value, args, want string }{
		{"DATABASE_URL", "nonsense://[", "status", "$DATABASE_URL: that is no URL"},
		{"DATABASE_URL", "postgres://h/d", "status --database nonsense://[", "--database: that is no URL"},
		{"KAFKA_CA", "/nowhere", "topics t --kafka k:1", "$KAFKA_CA: open /nowhere"},
		{"KAFKA_CA", "/nowhere", "topics t --kafka k:1 --kafka-ca /elsewhere", "--kafka-ca: open /elsewhere"},
		{"KAFKA_MECHANISM", "pain", "topics t --kafka k:1", `$KAFKA_MECHANISM "pain": want plain`},
	} {
		d := &commandFixture{vars: map[string]string{test.variable: test.value}}
		a := d.call(t, strings.Fields(test.args)...)
		require.NotEqual(t, exitOK, a.code)
		require.Contains(t, a.err, test.want, test.args)
	}
}

// Without Kafka there is one error, and no table: every topic would be missing there.
func TestTopicsWithoutKafka(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.record(t, "a")
	d.vars["KAFKA_BROKERS"] = "127.0.0.1:1"
	for _, args := range []string{"topics", "topics --check", "topics --json", "topics --create", "topics t"} {
		a := d.call(t, append(strings.Fields(args), "--timeout", "1s")...)
		require.Equal(t, exitError, a.code, args)
		require.Empty(t, a.out, args)
		require.Regexp(t, `^outbox: .*(127\.0\.0\.1:1|deadline).*\n$`, a.err, args)
	}
	delete(d.vars, "KAFKA_BROKERS")
	a := d.call(t, "topics")
	require.Equal(t, exitUsage, a.code)
	require.Empty(t, a.out)
	require.Contains(t, a.err, "which Kafka? --kafka HOST:PORT, or $KAFKA_BROKERS")
}

// The command stops waiting for a silent broker after a while.
func TestSilentKafka(t *testing.T) {
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, and reads nothing
	require.NoError(t, err)
	defer silent.Close()
	d := &commandFixture{vars: map[string]string{"KAFKA_BROKERS": silent.Addr().String()}}
	for _, args := range []string{"dlq list t.dlq", "dlq replay t.dlq", "topics t"} {
		a := d.call(t, append(strings.Fields(args), "--timeout", "500ms")...)
		require.Equal(t, exitError, a.code)
		require.Contains(t, a.err, "--timeout is 500ms", args)
	}
}

type topicsDoc struct {
	Topics  []topicJSON `json:"topics"`
	Nowhere []string    `json:"types_without_topic"`
}

func TestTopics(t *testing.T) {
	t.Parallel()
	d := newShop(t).withKafka(t)
	require.Contains(t, d.ok(t, "topics"), "No events are recorded")
	d.record(t, "a", "b")
	var doc topicsDoc
	d.json(t, &doc, exitProblems, "topics", "--check")
	require.Len(t, doc.Topics, 2)
	require.Equal(t, "missing", doc.Topics[0].State)
	require.EqualValues(t, 2, doc.Topics[0].Events)
	require.Contains(t, d.ok(t, "topics"), "missing")

	doc = topicsDoc{}
	d.json(t, &doc, exitOK, "topics", "--create", "--partitions", "2", "--retention", "1d", "--check")
	for i, topic := range []string{d.topic, d.topic + ".dlq"} {
		require.Equal(t, topic, doc.Topics[i].Topic)
		require.Equal(t, "created", doc.Topics[i].State)
		require.Equal(t, 2-i, doc.Topics[i].Partitions)
	}
	require.EqualValues(t, 24*60*60*1000, doc.Topics[0].RetentionMS)
	doc = topicsDoc{}
	d.json(t, &doc, exitProblems, "topics", "--check", "--create", "--replication", "1")
	require.Equal(t, "there", doc.Topics[0].State)
	require.Equal(t, []differenceJSON{{"partitions", "3", "2"}, {"retention.ms", "604800000", "86400000"}}, doc.Topics[0].Differences)
	d.change = terminal
	text := d.ok(t, "topics")
	requireNarrow(t, text)
	require.Contains(t, text, "1d00h")

	testenv.UpdateEvents(t, d.db, `UPDATE `+pgx.Identifier{d.schema, "outbox"}.Sanitize()+` SET topic = NULL, event_type = 'nowhere' WHERE aggregate_id = 'b'`)
	require.Contains(t, d.ok(t, "topics"), "No topic follows from nowhere")
	a := d.call(t, "topics", d.topic, "--replication", "5", "not/a/name")
	require.Equal(t, exitError, a.code)
	named := (&commandFixture{vars: map[string]string{}}).withKafka(t)
	require.Contains(t, named.ok(t, "topics", d.topic), d.topic, "without a database")
	a = named.call(t, "topics", "--create", "--replication", "5", "cli-"+uuid.NewString())
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "INVALID_REPLICATION_FACTOR")
	require.Contains(t, a.err, "field ReplicationFactor is 5, and the cluster has 1 broker: set it to 1")
	require.Contains(t, a.err, "The field ReplicationFactor is --replication.")
}

// No output contains a password, whichever step fails.
func TestSecretsStayHidden(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	c := d.db.Config().ConnConfig
	role := fmt.Sprintf("cli_%.8s", uuid.NewString())
	d.exec(t, "CREATE ROLE "+role+" LOGIN PASSWORD 'right'")
	t.Cleanup(func() { d.exec(t, "DROP ROLE "+role) })
	d.vars["DATABASE_URL"] = fmt.Sprintf("postgres://%s:hunter22@%s:%d/%s?sslmode=disable", role, c.Host, c.Port, c.Database)
	d.vars["KAFKA_BROKERS"], d.vars["KAFKA_USER"], d.vars["KAFKA_PASSWORD"] = "127.0.0.1:1", "me", "hunter33"
	for _, args := range []string{"postgres://u:hunter66@h/d status", "status postgres://u:hunter@66@h/d", "failures show password='hunter\\'77'", "failures show sslpassword=hunter88",
		"status --databse=postgres://u:hunter22@h/d", "status", "doctor", "doctor --json", "migrate up", "topics t", "dlq list t", "status --database postgres://x:hunter44@127.0.0.1:1/db",
		"status --database user=x&password=hunter55&host=127.0.0.1&port=1"} {
		words := strings.Fields(args)
		words[len(words)-1] = strings.ReplaceAll(words[len(words)-1], "&", " ")
		a := d.call(t, append(words, "--timeout", "2s")...)
		require.NotEqual(t, exitOK, a.code, args)
		require.NotContains(t, a.out+a.err, "hunter", args)
	}
}

func TestMask(t *testing.T) {
	t.Parallel()
	e := &env{getenv: func(string) string { return "" }, globals: globals{database: "postgres://kim:hunter22@h/d"}}
	require.Equal(t, "kim@h:5432/d", e.databaseName())
	require.Equal(t, "what xxxxx said", e.mask("what hunter22 said"))
	e = &env{getenv: func(string) string { return "" }, globals: globals{database: "postgres://kim:kim@h/d"}}
	require.Equal(t, "kim@h:5432/d", e.mask(e.databaseName()), "it is no secret")
}

// Help and usage do not show the values of flags.
func TestHelpHasNoSecrets(t *testing.T) {
	t.Parallel()
	d := &commandFixture{vars: map[string]string{"DATABASE_URL": "postgres://u:hunter22@h/d", "KAFKA_PASSWORD": "hunter33", "KAFKA_USER": "hunter44"}}
	for _, args := range []string{"--database postgres://u:hunter22@h/d status --help", "--database postgres://u:hunter22@h/d --kafka-user hunter55 help flags",
		"status --database postgres://u:hunter22@h/d --xyz", "--database postgres://u:hunter22@h/d", "--database postgres://u:hunter22@h/d version"} {
		a := d.call(t, strings.Fields(args)...)
		require.NotContains(t, a.out+a.err, "hunter", args)
	}
}

// An error is short, whatever an argument, a header or a table contains.
func TestErrorsAreShort(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	huge := strings.Repeat("x", 1<<20)
	for _, args := range [][]string{{huge}, {"failures", huge}, {"failures", "show", huge}, {"status", "--" + huge}, {"status", "--every", huge},
		{"doctor", "--only", huge}, {"doctor", "--as", huge}, {"failures", "list", "--status", huge}, {"failures", "edit", "event-1", "--reason", huge, "--payload", "-"},
		{"status", "--schema", huge}, {"failures", "hold", huge, "--reason", "x"}, {"status", "--database", huge}} {
		a := d.call(t, args...)
		require.NotEqual(t, exitOK, a.code)
		require.Less(t, len(a.out)+len(a.err), 10_000, "%.50q", args)
	}
	// Rows that a relay of an earlier release or another program has put into the tables.
	d.fail(t, outbox.StatusDead, "a")
	d.exec(t, `UPDATE {s}.outbox_failed SET last_error = repeat('x', 1 << 20), error_class = repeat('y', 40)`)
	require.Less(t, len(d.ok(t, "failures", "list")), 10_000)
	require.Less(t, len(d.ok(t, "failures", "show", d.firstFailed(t, "a"))), 10_000)
}

// A step that takes too long ends with an error that says why.
func TestTimeout(t *testing.T) {
	// Not parallel: it bounds how long commands take.
	d := newShop(t)
	d.fail(t, outbox.StatusDead, "a")
	id := d.firstFailed(t, "a")
	tx, err := d.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(background) }()
	_, err = tx.Exec(background, `LOCK TABLE `+pgx.Identifier{d.schema, "outbox_failed"}.Sanitize())
	require.NoError(t, err)
	for _, args := range []string{"failures list", "failures resolve " + id + " --reason x", "status", "failures show " + id} {
		a := d.call(t, append(strings.Fields(args), "--timeout", "300ms")...)
		require.Equal(t, exitError, a.code)
		require.Contains(t, a.err, "--timeout is 300ms", args)
	}
	ctx, cancel := context.WithCancel(background)
	cancel()
	a := d.callWithin(t, ctx, "failures", "list")
	require.Equal(t, exitError, a.code)
	require.Equal(t, "outbox: interrupted\n", a.err)
}

// An error that has one usual cause comes with a remedy.
func TestHints(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newCommandFixture(t)
	a := d.call(t, "status")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "outbox migrate up")
	d.migrate(t)
	d.exec(t, "ALTER TABLE {s}.outbox_failed RENAME COLUMN next_retry_at TO later") // of an earlier release
	a = d.call(t, "failures", "list")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "outbox migrate up")
	d.exec(t, "ALTER TABLE {s}.outbox_failed RENAME COLUMN later TO next_retry_at")
	role := fmt.Sprintf("cli_%.8s", uuid.NewString())
	d.exec(t, "CREATE ROLE "+role)
	t.Cleanup(func() { d.exec(t, "DROP OWNED BY "+role); d.exec(t, "DROP ROLE "+role) })
	d.exec(t, "GRANT USAGE ON SCHEMA {s} TO "+role)
	d.vars["DATABASE_URL"] = d.url("&options=-c%20role%3D" + role)
	a = d.call(t, "failures", "list")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "outbox doctor --as reader")
}

// TLS is spoken only with brokers that the authorities vouch for.
func TestKafkaTLS(t *testing.T) {
	// Not parallel: its handshakes have a second.
	var handshakes atomic.Int64
	server := httptest.NewUnstartedServer(nil)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Config.ConnState = func(c net.Conn, _ http.ConnState) {
		if secure, ok := c.(*tls.Conn); ok && secure.ConnectionState().HandshakeComplete {
			handshakes.Add(1)
		}
	}
	server.StartTLS()
	defer server.Close()
	file := filepath.Join(t.TempDir(), "ca.pem")
	encoded := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	require.NoError(t, os.WriteFile(file, encoded, 0o600))
	d := &commandFixture{vars: map[string]string{"KAFKA_BROKERS": server.Listener.Addr().String()}}
	call := func(args ...string) answer {
		return d.call(t, append([]string{"dlq", "list", "t", "--timeout", "1s"}, args...)...)
	}
	require.Contains(t, call("--kafka-tls").err, "unknown authority")
	require.Zero(t, handshakes.Load())
	require.NotContains(t, call("--kafka-ca", file).err, "unknown authority")
	require.Positive(t, handshakes.Load())
	require.NoError(t, os.WriteFile(file, []byte("no"), 0o600))
	require.Contains(t, call("--kafka-ca", file).err, "holds no certificate")
	require.Contains(t, call("--kafka-ca", file+"s").err, "--kafka-ca")
}

// The login comes from flags and environment.
func TestKafkaLogin(t *testing.T) {
	t.Parallel()
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("token.of.me\n"), 0o600))
	password := map[string]string{"KAFKA_USER": "me", "KAFKA_PASSWORD": "hunter22"}
	for _, test := range []struct {
		mechanism, token string
		vars             map[string]string
		want, contains   string
	}{
		{"", "", password, "SCRAM-SHA-256", "me"},
		{"plain", "", password, "PLAIN", "me"},
		{"scram-sha-256", "", password, "SCRAM-SHA-256", "me"},
		{"scram-sha-512", "", password, "SCRAM-SHA-512", "me"},
		{"", "", map[string]string{"KAFKA_USER": "me", "KAFKA_PASSWORD": "hunter22", "KAFKA_MECHANISM": "plain"}, "PLAIN", "me"},
		{"oauthbearer", token, nil, "OAUTHBEARER", "auth=Bearer token.of.me\x01"},
		{"oauthbearer", "", map[string]string{"KAFKA_TOKEN": "token.of.me"}, "OAUTHBEARER", "auth=Bearer token.of.me\x01"},
		{"aws-msk-iam", "", map[string]string{"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "hunter22"}, "AWS_MSK_IAM", `"x-amz-credential":"me/`},
	} {
		var errs strings.Builder
		e := &env{getenv: func(name string) string { return test.vars[name] }, stderr: &errs,
			globals: globals{kafka: "127.0.0.1:1", kafkaMechanism: test.mechanism, kafkaToken: test.token}}
		opts, err := e.kafkaOpts()
		require.NoError(t, err)
		client, err := kgo.NewClient(opts...)
		require.NoError(t, err)
		defer client.Close()
		logins, ok := client.OptValue(kgo.SASL).([]sasl.Mechanism)
		require.True(t, ok)
		require.Len(t, logins, 1)
		require.Equal(t, test.want, logins[0].Name())
		_, first, err := logins[0].Authenticate(background, "b-1.shop.kafka.eu-central-1.amazonaws.com:9098")
		require.NoError(t, err)
		require.Contains(t, string(first), test.contains)
		if strings.HasPrefix(test.want, "SCRAM") {
			require.Empty(t, errs.String())
			continue
		}
		require.Contains(t, errs.String(), "in clear text")
		_, err = e.kafkaOpts()
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(errs.String(), "\n"), "once")
		e = &env{getenv: e.getenv, globals: e.globals} // which would panic without a place for warnings
		e.kafkaTLS = true
		_, err = e.kafkaOpts()
		require.NoError(t, err, "no warning with TLS")
	}
}

// A token expires and is written anew, while a command runs.
func TestTokenIsReadAtEachLogin(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("first"), 0o600))
	e := &env{getenv: func(string) string { return "" }, globals: globals{kafka: "127.0.0.1:1", kafkaTLS: true, kafkaMechanism: "oauthbearer", kafkaToken: file}}
	login, err := e.kafkaLogin()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, []byte("second"), 0o600))
	_, sent, err := login.Authenticate(background, "")
	require.NoError(t, err)
	require.Contains(t, string(sent), "Bearer second\x01")
	require.Equal(t, "xxxxx and xxxxx", e.mask("first and second"))
	require.NoError(t, os.WriteFile(file, []byte("a\x01b"), 0o600))
	_, _, err = login.Authenticate(background, "")
	require.ErrorContains(t, err, "other characters")
	require.NotContains(t, err.Error(), "\x01")
}
