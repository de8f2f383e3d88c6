package main

import (
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

type deliveriesDoc struct {
	Deliveries []deliveryJSON `json:"deliveries"`
	More       bool           `json:"more"`
}

func TestDeliveryCommands(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	require.Equal(t, "Nothing is owed to a handler.\n", d.ok(t, "delivery", "list"))
	require.Equal(t, "0 in all\n", d.ok(t, "delivery", "counts"))
	ids := d.deliver(t, "k", "DONE", "DEAD", "PENDING", "PARKED")
	d.deliver(t, "other", "PROCESSING")

	d.change = terminal
	text := d.ok(t, "delivery", "list")
	requireNarrow(t, text)
	require.Regexp(t, `(?m)^`+ids[1]+` +DEAD +\S+( s)? +3/10 +timeout +stats +COUNTED +orders +k$`, text)
	require.NotContains(t, text, "DONE")
	require.Contains(t, d.ok(t, "delivery", "list", "--limit", "2"), "There is more: --after "+ids[3])
	require.Equal(t, "No delivery matches these flags.\n", d.ok(t, "delivery", "list", "--group", "nobody"))
	text = d.ok(t, "delivery", "counts")
	requireNarrow(t, text)
	require.Regexp(t, `(?m)^1 +PENDING +0 +2h00m +1h00m ago +stats +COUNTED +orders$`, text)
	require.Regexp(t, `(?m)^1 +PROCESSING +0 +2h00m +in (59m|1h)\S+ +stats`, text)
	require.Contains(t, text, "4 in all")
	text = d.ok(t, "delivery", "show", ids[1])
	requireNarrow(t, text)
	for _, want := range []string{"status     DEAD\n", "code       timeout\n", "error      too slow·[31m\n", "attempts   3 of 10", "header     traceparent: 00-x\n", `"n": 1`} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, d.ok(t, "delivery", "show", "--no-payload", ids[1]), `"n"`)
	d.change = nil

	var list deliveriesDoc
	d.json(t, &list, exitOK, "delivery", "list", "--status", "dead,done", "--key", "k")
	require.Len(t, list.Deliveries, 2)
	require.False(t, list.More)
	require.Equal(t, []string{"stats", "orders", "COUNTED", "k", "DEAD", "timeout"}, []string{list.Deliveries[0].Group, list.Deliveries[0].Stream,
		list.Deliveries[0].Action, list.Deliveries[0].Key, list.Deliveries[0].Status, list.Deliveries[0].Code})

	require.Equal(t, "stream orders: 1\nwould requeue 1 delivery; --yes does it\n", d.ok(t, "delivery", "requeue", "--code", "timeout"))
	require.Equal(t, "stream orders: 1\nwould requeue 1 delivery\n", d.ok(t, "delivery", "requeue", "--dry-run", ids[0], ids[1]))
	require.Equal(t, "requeued 1 delivery\n", d.ok(t, "delivery", "requeue", "--code", "timeout", "--yes", "--reason", "the host is back"))
	var one deliveryJSON
	d.json(t, &one, exitOK, "delivery", "show", ids[1])
	require.Equal(t, "PENDING", one.Status)
	require.Zero(t, one.Attempts)
	require.JSONEq(t, `{"n": 1}`, string(one.Payload))
	require.Equal(t, []string{"requeue", "kim", "the host is back"}, []string{one.Audit[0].Action, one.Audit[0].Operator, one.Audit[0].Reason})

	var doc map[string]any
	d.json(t, &doc, exitOK, "delivery", "resolve", "--all")
	require.Equal(t, map[string]any{"action": "resolve", "deliveries": 3., "dry_run": true, "streams": map[string]any{"orders": 3.}}, doc)
	require.Equal(t, "resolved 2 deliveries\n", d.ok(t, "delivery", "resolve", ids[2], ids[1], ids[2], "--reason", "sold out"))
	require.Contains(t, d.ok(t, "delivery", "list", "--resolved"), "DEAD,resolved")
	a := d.call(t, "delivery", "requeue", ids[1], ids[3], "--reason", "again")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "requeue delivery "+ids[3]+": not possible in this status: it is PARKED")
	require.Equal(t, "requeued 1 delivery\n", a.out)
	require.Contains(t, d.call(t, "delivery", "show", "999999").err, "not found")

	for args, text := range map[string]string{
		"delivery show x":                             `"x" is no id`,
		"delivery list --status ded":                  `did you mean "DEAD"?`,
		"delivery list --limit 1001":                  "--limit is 1 to 1000",
		"delivery list --after -1":                    "must not be negative",
		"delivery counts --status done":               "is not counted",
		"delivery requeue --reason x":                 "name an ID, flags that pick deliveries, or --all",
		"delivery requeue 1 --all":                    "not both",
		"delivery requeue 1":                          "--reason is missing",
		"delivery requeue --all --yes --dry-run":      "contradict",
		"delivery resolve --all --rate -1":            "must not be negative",
		"delivery resolve --status done --reason x":   "want PENDING, PARKED, DEAD",
		"delivery requeue --status dead --reason why": "there is no flag --status",
	} {
		a := d.call(t, strings.Fields(args)...)
		require.Equal(t, exitUsage, a.code, args)
		require.Contains(t, a.err, text, args)
	}
}
