package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// deliver makes rows of a key of event_delivery, one for each status, and returns their ids.
func (d *commandFixture) deliver(t testing.TB, key string, statuses ...string) (ids []string) {
	t.Helper()
	sql := `INSERT INTO ` + pgx.Identifier{d.schema, "event_delivery"}.Sanitize() + ` (position, order_key, attempt_count, max_attempts, next_retry_at, locked_until,
		locked_by, created_at, updated_at, occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id,
		content_type, last_error_code, last_error_message, headers, payload)
		SELECT $1::bigint, hashtextextended($2::text, 0), 3, 10, now() - interval '1 h', CASE WHEN $3::text = 'PROCESSING' THEN now() + interval '1 h' END,
		       CASE WHEN $3 = 'PROCESSING' THEN 'host/1' END, now() - interval '2 h', now(), now(), now(), gen_random_uuid(), $3, 'stats', 'COUNTED', 'orders',
		       'shop.order.created.v1', 'shop', 'Order', $2, 'application/json', CASE WHEN $3 = 'DEAD' THEN 'timeout' END,
		       CASE WHEN $3 = 'DEAD' THEN E'too slow\x1b[31m' END, '{"traceparent": "00-x"}', '{"n": 1}'
		RETURNING id`
	for i, status := range statuses {
		var id int64
		require.NoError(t, d.db.QueryRow(background, sql, i+1, key, status).Scan(&id))
		ids = append(ids, strconv.FormatInt(id, 10))
	}
	return ids
}

func TestFailuresOfDeliveries(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	ids := d.deliver(t, "k", "DONE", "DEAD", "PENDING", "PARKED")
	d.deliver(t, "other", "PROCESSING")
	for i := range ids {
		ids[i] = "delivery-" + ids[i]
	}

	d.change = terminal
	text := d.ok(t, "failures", "list")
	requireNarrow(t, text)
	require.Regexp(t, `(?m)^`+ids[1]+` +dead +2h00m +3/10 +timeout +stats COUN\S+ +orders +k +shop\S+$`, text)
	require.Equal(t, 2, strings.Count(text, "\n"), "what waits has not failed")
	text = d.ok(t, "failures", "list", "--status", "waiting,parked,dead", "--limit", "2")
	require.Regexp(t, `(?m)^`+ids[3]+` +parked`, text)
	require.Contains(t, text, "There is more: --after "+ids[3])
	require.Equal(t, "No failure matches these flags.\n", d.ok(t, "failures", "list", "--group", "nobody"))
	text = d.ok(t, "failures", "count")
	requireNarrow(t, text)
	require.Regexp(t, `(?m)^1 +delivery +dead +timeout +2h00m +stats COUNTED +shop`, text)
	require.Contains(t, text, "1 in all, 1 unresolved")
	require.Contains(t, d.ok(t, "failures", "count", "--status", "waiting,parked"), "3 in all, 0 unresolved")
	text = d.ok(t, "consumers")
	requireNarrow(t, text)
	require.Regexp(t, `(?m)^1 +PENDING +0 +2h00m +1h00m ago +stats +COUNTED +orders$`, text)
	require.Regexp(t, `(?m)^1 +PROCESSING +0 +2h00m +in (59m|1h)\S+ +stats`, text)
	text = d.ok(t, "failures", "show", ids[1])
	requireNarrow(t, text)
	for _, want := range []string{"status     dead\n", "group      stats\n", "class      timeout\n", "error      too slow·[31m\n", "attempts   3 of 10", "header     traceparent: 00-x\n", `"n": 1`} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, d.ok(t, "failures", "show", "--no-payload", ids[1]), `"n"`)
	require.Contains(t, d.ok(t, "failures", "show", ids[0]), "status     done\n")
	d.change = nil

	var list failuresDoc
	d.json(t, &list, exitOK, "failures", "list", "--status", "dead,done", "--key", "k")
	require.Len(t, list.Failures, 2)
	require.False(t, list.More)
	require.Equal(t, []string{"delivery", "stats", "orders", "COUNTED", "k", "dead", "timeout"}, []string{list.Failures[0].Kind, list.Failures[0].Group,
		list.Failures[0].Topic, list.Failures[0].Action, list.Failures[0].Key, list.Failures[0].Status, list.Failures[0].Class})

	require.Equal(t, "topic orders: 1\ngroup stats, action COUNTED: 1\nwould retry 1 failure; --yes does it\n", d.ok(t, "failures", "retry", "--class", "timeout"))
	require.Equal(t, "topic orders: 1\ngroup stats, action COUNTED: 1\nwould retry 1 failure\n", d.ok(t, "failures", "retry", "--dry-run", ids[0], ids[1]))
	require.Equal(t, "group stats, action COUNTED: 1\nretried 1 failure\n", d.ok(t, "failures", "retry", "--class", "timeout", "--yes", "--reason", "the host is back"))
	var one failureJSON
	d.json(t, &one, exitOK, "failures", "show", ids[1])
	require.Equal(t, "failed", one.Status)
	require.Zero(t, one.Attempts)
	require.JSONEq(t, `{"n": 1}`, string(one.Payload))
	require.Equal(t, []string{"retry", "kim", "the host is back"}, []string{one.Audit[0].Action, one.Audit[0].Operator, one.Audit[0].Reason})

	var doc bulkDoc
	d.json(t, &doc, exitOK, "failures", "resolve", "--status", "waiting,failed,parked")
	require.Equal(t, bulkDoc{"resolve", 3, true, map[string]int{"orders": 3}, []handlerJSON{{"stats", "COUNTED", 3}}}, doc)
	require.Equal(t, "resolved 2 failures\n", d.ok(t, "failures", "resolve", ids[2], ids[1], ids[2], "--reason", "sold out"))
	require.Contains(t, d.ok(t, "failures", "list", "--status", "resolved"), ids[1])
	a := d.call(t, "failures", "retry", ids[1], ids[3], "--reason", "again")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "retry failure "+ids[3]+": not possible in this status: it is parked")
	require.Equal(t, "retried 1 failure\n", a.out)
}

// A dry run counts a named failure only if the same call without --dry-run does not refuse it.
func TestDryRunCountsWhatIsNotRefused(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at) VALUES ('gone', 'outbox cut', 1, 'infinity')`)
	unreadable := `error_class = 'unreadable_row', payload = NULL`
	for _, tt := range []struct {
		name, status, set string // set changes columns of outbox_failed
		can               map[string]bool
	}{
		{"dead", "dead", "", map[string]bool{"retry": true, "resolve": true}},
		{"waiting", "waiting", "", map[string]bool{"retry": true, "resolve": true}},
		{"parked", "parked", "", map[string]bool{"resolve": true}},
		{"resolved", "resolved", "", nil},
		{"failed and held", "failed", "held = true", map[string]bool{"resolve": true}},
		{"dead and held", "dead", "held = true", map[string]bool{"retry": true, "resolve": true}},
		{"without a payload", "dead", unreadable, map[string]bool{"resolve": true}},
		{"an unreadable tombstone", "dead", unreadable + `, content_type = ''`, map[string]bool{"resolve": true}},
		{"with a payload that a relay could not read", "dead", `error_class = 'unreadable_row'`, map[string]bool{"retry": true, "resolve": true}},
		{"of a relay that has ended by a cut", "dead", `relay = 'gone'`, map[string]bool{"resolve": true}},
		{"of a relay that was removed", "dead", `relay = 'removed'`, map[string]bool{"resolve": true}},
	} {
		d.fail(t, tt.status, tt.name)
		if tt.set != "" {
			d.exec(t, `UPDATE {s}.outbox_failed SET `+tt.set+` WHERE aggregate_id = $1`, tt.name)
		}
		id := d.firstFailed(t, tt.name)
		for _, action := range []string{"retry", "resolve"} {
			var dry bulkDoc
			d.json(t, &dry, exitOK, "failures", action, id, "--dry-run")
			require.Equal(t, tt.can[action], dry.Failures == 1, "%s of an event that is %s", action, tt.name)
			require.Len(t, dry.Topics, dry.Failures)
			a := d.call(t, "failures", action, id, "--reason", "x")
			require.Equal(t, tt.can[action], a.code == exitOK, "%s of an event that is %s: %s", action, tt.name, a.err)
		}
	}
	for i, id := range d.deliver(t, "k", "DONE", "DEAD", "PENDING", "PARKED", "PROCESSING") {
		for _, action := range []string{"resolve", "retry"} { // resolve first, as both make another status
			var dry bulkDoc
			d.json(t, &dry, exitOK, "failures", action, "delivery-"+id, "--dry-run")
			a := d.call(t, "failures", action, "delivery-"+id, "--reason", "x")
			require.Equal(t, a.code == exitOK, dry.Failures == 1, "%s of delivery %d: %s", action, i, a.err)
		}
	}
}

// An edit of a delivery is shown before it is done, and its payload is JSON of its content type.
func TestFailuresEditDelivery(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	id := "delivery-" + d.deliver(t, "k", "DEAD")[0]
	payload := filepath.Join(t.TempDir(), "payload")
	require.NoError(t, os.WriteFile(payload, []byte(`{"n":2}`), 0o600))
	edit := []string{"failures", "edit", id, "--payload", payload, "--reason", "it was one too few"}
	text := d.ok(t, append(edit, "--dry-run")...)
	require.Equal(t, "before:\n{\n  \"n\": 1\n}\n\nafter:\n{\n  \"n\": 2\n}\n\nwould edit: 7 bytes instead of 8\n", text)
	type shown struct {
		Payload map[string]int
		Base64  []byte `json:"payload_base64"`
	}
	var doc struct {
		Action        string
		Failures      int
		DryRun        bool `json:"dry_run"`
		Before, After shown
	}
	d.json(t, &doc, exitOK, append(edit, "--dry-run")...)
	require.Equal(t, []any{true, 1, 2}, []any{doc.DryRun, doc.Before.Payload["n"], doc.After.Payload["n"]})
	require.Regexp(t, `(?m)^status +dead$`, d.ok(t, "failures", "show", id))
	require.Equal(t, "edited, and will be handled: 7 bytes\n", d.ok(t, edit...))
	text = d.ok(t, "failures", "show", id)
	require.Contains(t, text, `"n": 2`)
	require.Regexp(t, `(?s)retry by .*: it was one too few\n.* edit by .*: it was one too few\n`, text)
	require.Contains(t, d.call(t, append(edit, "--dry-run")...).err, "not possible in this status")
}

// Operators list, hold, release, retry and resolve both kinds in the same way, and the audit shows the
// operator.
func TestFailuresOfBothKinds(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.fail(t, "dead", "a", "b")
	dead := "delivery-" + d.deliver(t, "a", "DEAD", "PENDING")[0]
	event := d.firstFailed(t, "b")
	text := d.ok(t, "failures", "list", "--limit", "2")
	require.Contains(t, text, "There is more: --after event-")
	after := strings.Fields(text[strings.Index(text, "--after ")+len("--after "):])[0]
	var rest failuresDoc
	d.json(t, &rest, exitOK, "failures", "list", "--after", after)
	require.Len(t, rest.Failures, 1)
	require.Equal(t, dead, rest.Failures[0].ID)
	for flags, want := range map[string]string{"": "3 in all, 3 unresolved", "--kind event": "2 in all", "--relay default": "2 in all", "--kind delivery": "1 in all",
		"--group stats": "1 in all", "--action COUNTED": "1 in all", "--action SENT": "0 in all", "--key a": "2 in all", "--class timeout": "1 in all"} {
		require.Contains(t, d.ok(t, append([]string{"failures", "count"}, strings.Fields(flags)...)...), want, flags)
	}
	require.Equal(t, "hold: the key of "+dead+"\n", d.ok(t, "failures", "hold", dead, "--reason", "kim looks at it"))
	require.Contains(t, d.ok(t, "failures", "list"), "dead,held")
	require.Equal(t, "release: the key of "+dead+"\n", d.ok(t, "failures", "release", dead, "--reason", "it is fine"))
	require.Equal(t, "topic "+d.topic+": 2\ntopic orders: 1\ngroup stats, action COUNTED: 1\nwould retry 3 failures; --yes does it\n", d.ok(t, "failures", "retry", "--all"))
	require.Equal(t, "retried 2 failures\n", d.ok(t, "failures", "retry", dead, event, "--reason", "repaired"))
	require.Equal(t, "group stats, action COUNTED: 1\nresolved 3 failures\n", d.ok(t, "failures", "resolve", "--all", "--yes", "--reason", "the rest", "--operator", "lee"))
	require.Contains(t, d.ok(t, "failures", "list"), "Nothing is unresolved. Not shown: 3 resolved failures")

	d.change = terminal
	text = d.ok(t, "audit")
	requireNarrow(t, text)
	require.Regexp(t, `(?m) resolve +event-\d+ +lee +\S+ +the rest$`, text)
	require.Regexp(t, `(?m) hold +`+dead+` +kim +\S+ +kim looks`, text)
	d.change = nil
	var audit struct {
		Audit []auditJSON
		More  bool
	}
	d.json(t, &audit, exitOK, "audit", dead)
	var actions []string
	for _, a := range audit.Audit {
		require.Equal(t, []string{dead, "stats", "COUNTED", "orders", "a"}, []string{a.Failure, a.Group, a.Handler, a.Topic, a.Key})
		actions = append(actions, a.Operator+" "+a.Action)
	}
	require.Equal(t, []string{"lee resolve", "kim retry", "kim release", "kim hold"}, actions)
	for flags, n := range map[string]int{"": 7, "--operator lee": 3, "--action hold": 1, "--group stats": 4, "--since 1h": 7, "--until 1h": 0, "--action read": 0} {
		d.json(t, &audit, exitOK, append([]string{"audit"}, strings.Fields(flags)...)...)
		require.Len(t, audit.Audit, n, flags)
	}
	text = d.ok(t, "audit", "--limit", "1")
	require.Regexp(t, `There is more: --before \d+\n$`, text)
	require.Equal(t, "Nothing like that was done.\n", d.ok(t, "audit", "--operator", "nobody"))
}
