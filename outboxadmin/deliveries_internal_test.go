package outboxadmin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
)

// newBusyFixture is [newAdminFixture] with deliveries in addition to the failed events.
func newBusyFixture(t *testing.T, configure func(*Config)) *adminFixture {
	t.Helper()
	h := newAdminFixture(t, configure)
	require.NoError(t, seed.Deliver(t.Context(), h.db, h.schema))
	return h
}

// Both kinds of failures are in one list, which can be narrowed to either, and which goes on where
// it ended.
func TestFailuresOfBothKinds(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	const unresolved = 104 + seed.DeadInAll + 1
	for query, want := range map[string]string{
		"": fmt.Sprintf("%d failures", unresolved), "kind=event": "104 failures", "kind=delivery": "7 failures", "group=stats&status=dead": "6 failures",
		"action=RESERVE": "2 failures", "class=timeout": "5 failures", "kind=delivery&status=waiting": "2 failures", "kind=delivery&status=done": "Done deliveries are not counted.",
		"key=ord-20501": "1 failure<", "relay=default": "104 failures", "group=nobody": "0 failures",
	} {
		require.Contains(t, h.get("/failed?"+query), want, query)
	}
	seen := map[string]int{}
	for path := "/api/failed?limit=50"; path != ""; {
		var list apiFailedList
		require.NoError(t, json.Unmarshal([]byte(h.get(path)), &list))
		for _, f := range list.Failed {
			seen[f.Kind]++
		}
		path = ""
		if list.Next != nil {
			path = "/api/failed?limit=50&after=" + *list.Next
		}
	}
	require.Equal(t, map[string]int{"event": 104, "delivery": 7}, seen)
	for _, bad := range []string{"relay=default&group=stats", "kind=event&group=stats", "kind=delivery&outbox_id=7", "kind=dead", "after=event-1,event-2", "after=one"} {
		require.Equal(t, http.StatusBadRequest, h.send("reader", http.MethodGet, "/failed?"+bad, "", "").Code, bad)
	}
}

// The filter offers the existing values. A picked value stays picked, even if no failure has it.
func TestFilterIsDropDowns(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	page := h.get("/failed?group=nobody&status=dead")
	for _, name := range []string{"kind", "status", "group", "action", "relay", "class", "type"} {
		require.Contains(t, page, `<select id="`+name+`" name="`+name+`">`)
	}
	for _, option := range []string{`<option value="nobody" selected>`, `<option value="stats">`, `<option value="dead" selected>`, `<option value="RESERVE">`, `<option value="timeout">`,
		`<option value="default">`, `<option value="message_too_large">`, `<option value="done">`} {
		require.Contains(t, page, option)
	}
	require.Contains(t, h.get("/failed?status=failed,waiting"), `<option value="failed,waiting" selected>failed, waiting</option>`)
}

// A repeated status counts once: five times dead is not any.
func TestStatusTwice(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	require.Contains(t, h.get("/failed?status=dead,dead,dead,dead,dead"), `name="status">`)
	require.Contains(t, h.get("/failed/retry?status=dead,dead,dead,dead,dead"), `name="status" value="dead"`)
}

// The page shows a delivery and offers the actions of the command line.
func TestActsOnDeliveries(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	status := func(id int) string {
		return query1[string](h, `SELECT concat_ws(' ', status, CASE WHEN held THEN 'held' END, attempt_count, CASE WHEN resolved_at IS NOT NULL THEN 'resolved' END) FROM {s}.event_delivery WHERE id = $1`, id)
	}
	page := h.get("/failed/delivery-1")
	for _, words := range []string{"Dead: no attempts left", "10 of 10", "COUNT_SALES", "context deadline exceeded", "Mina Park", "Resolve without handling", "Hold the key", "req-5"} {
		require.Contains(t, page, words)
	}
	require.Contains(t, page, "Edit the payload")
	require.NotContains(t, h.get("/failed/delivery-8"), "Edit the payload", "a worker may take it")
	require.Contains(t, h.get("/failed/delivery-9"), "With a worker now")
	require.Contains(t, h.get("/failed/delivery-10"), "Nothing: it is handled.")
	require.Contains(t, h.get("/failed/delivery-8"), "Waits for a worker")

	perform := func(id int, action string) string {
		w := h.post(fmt.Sprintf("/failed/delivery-%d/%s", id, action), "reason", "because")
		require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
		return w.Header().Get("Location")
	}
	require.Equal(t, "../delivery-1?done=hold_group", perform(1, "hold"))
	require.Equal(t, "DEAD held 10", status(1))
	require.Contains(t, h.get("/"), "Consumer group stats: 1 key waits for an operator.")
	perform(1, "release")
	require.Equal(t, "../delivery-1?done=requeue", perform(1, "retry"))
	require.Equal(t, "PENDING 0", status(1))
	page = h.get("/failed/delivery-1?done=requeue")
	require.Contains(t, page, "A worker of the group handles it again")
	require.Regexp(t, `(?s)o\.operator</strong>.*retried.*released.*held`, page)
	perform(2, "resolve")
	require.Contains(t, h.get("/api/failed/delivery-2"), `"resolved_by":"o.operator","resolution":"because"`)
	perform(2, "retry")
	require.Equal(t, "PENDING 0", status(2), "a resolution can be taken back")
	require.Equal(t, http.StatusConflict, h.post("/failed/delivery-2/edit", "reason", "because", "payload", "{}").Code, "it is not dead any more")
	require.Equal(t, http.StatusConflict, h.post("/failed/delivery-9/resolve", "reason", "because").Code, "a worker has it")
	require.Regexp(t, `href="failed/delivery-1">delivery-1</a> of group stats`, h.get("/audit"))

	require.Contains(t, h.get("/failed/retry?kind=delivery&class=timeout&status=dead"), "Retry 2 failures?")
	var result apiBulkResult
	answer := h.call("/api/failed/resolve", map[string]any{"filter": map[string]string{"group": "stats", "status": "dead"}, "reason": "sold out"})
	require.NoError(t, json.Unmarshal(answer.Body.Bytes(), &result))
	require.Equal(t, apiBulkResult{4, false, []apiTopic{{"order-events", 4}}, []apiHandler{{"stats", "COUNT_SALES", 2}, {"stats", "RESERVE", 2}}}, result)
}

// A retry of failures with any status leaves resolutions as they are. One that names the status reverts them.
func TestRetryAnyKeepsResolutions(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	h.exec(`UPDATE {s}.event_delivery SET resolved_by = 'kim', resolved_at = now(), note = 'sold out' WHERE id <= 2`)
	page := h.get("/failed/retry?kind=delivery&status=any")
	require.Contains(t, page, "Retry 4 failures?")
	require.Contains(t, h.post("/failed/retry", confirmed(page, "again")...).Header().Get("Location"), "&n=4&")
	require.Contains(t, h.call("/api/failed/retry", map[string]any{"filter": map[string]any{"kind": "delivery", "status": "any"}, "dry_run": true}).Body.String(), `"events":0`)
	require.Equal(t, 2, query1[int](h, `SELECT count(*)::int FROM {s}.event_delivery WHERE resolved_by = 'kim'`))
	for _, named := range []string{"resolved", "resolved,dead,failed,parked,waiting"} {
		page = h.get("/failed/retry?kind=delivery&status=" + named)
		require.Contains(t, page, "Retry 2 failures?")
	}
	require.Contains(t, h.post("/failed/retry", confirmed(page, "again")...).Header().Get("Location"), "&n=2&")
}

// The payload of a dead delivery is edited on the page and by the API, for its group and action. The history has the
// payload from before.
func TestEditDelivery(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	require.Contains(t, h.get("/failed/delivery-1"), "all others handle the event as it was recorded")
	require.Equal(t, 422, h.post("/failed/delivery-1/edit", "reason", "because", "payload", `{"half":`).Code)
	w := h.post("/failed/delivery-1/edit", "reason", "because", "payload", `{"edited": true}`)
	require.Equal(t, http.StatusSeeOther, w.Code, w.Body)
	require.Equal(t, "../delivery-1?done=edit_group", w.Header().Get("Location"))
	require.Equal(t, http.StatusNoContent, h.call("/api/failed/delivery-2/edit", map[string]any{"reason": "x", "payload": map[string]any{"edited": true}}).Code)
	require.Equal(t, 2, query1[int](h, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'PENDING' AND payload = '{"edited": true}'`))
	page := h.get("/failed/delivery-1?done=edit_group")
	for _, words := range []string{"The payload is changed for this group and action", "The old payload", "retried", "edited"} {
		require.Contains(t, page, words)
	}
}

// After a retry, the page of a failure shows its outcome, even if its row is gone.
func TestWhatBecameOfAFailure(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	exec := func(sql string) {
		_, err := h.db.Exec(t.Context(), strings.ReplaceAll(sql, "{s}", `"`+h.schema+`"`))
		require.NoError(t, err)
	}
	require.Equal(t, http.StatusSeeOther, h.post("/failed/event-1/retry", "reason", "the courier answers").Code)
	exec(`DELETE FROM {s}.outbox_failed WHERE id = 1`) // as the relay does once Kafka has it
	page := h.get("/failed/event-1?done=retry")
	for _, words := range []string{"What became of event-1", "Relay default has sent it: it is in Kafka.", "the courier answers", `href="../events/4099003"`, "The relay sends it at its next poll"} {
		require.Contains(t, strings.ReplaceAll(page, "./../", "../"), words)
	}
	exec(`ALTER TABLE {s}.outbox_4000000_5000000 DROP CONSTRAINT outbox_xid_is_of_this_transaction`)
	exec(`UPDATE {s}.outbox SET expires_at = now() - interval '1 minute' WHERE id = 4099003`) // then retention may have removed a row that had expired
	require.Contains(t, h.get("/failed/event-1"), "Relay default has sent it, or it had expired before.")
	require.NotContains(t, h.get("/failed/event-1"), "it is in Kafka")
	for _, path := range []string{"/events/4099003", "/failed/event-1"} {
		require.Contains(t, h.get(path), "badge is-attempted", path)
		require.NotContains(t, h.get(path), ">sent<", path)
	}
	exec(`DELETE FROM {s}.outbox WHERE id = 4099003`)
	require.Contains(t, h.get("/failed/event-1"), "Relay default has sent it, or it had expired before. The event itself is not recorded here any more")
	require.Contains(t, h.get("/audit?failure=event-1"), "the courier answers")
	require.NotContains(t, h.get("/audit?failure=event-1"), "policy, see OPS-1184")
	require.Contains(t, h.get("/api/audit?failure=event-1&operator=o.operator"), `"failure_id":"event-1"`)

	for id, action := range map[int]string{1: "retry", 2: "resolve"} {
		require.Equal(t, http.StatusSeeOther, h.post(fmt.Sprintf("/failed/delivery-%d/%s", id, action), "reason", "because").Code)
	}
	exec(`UPDATE {s}.event_delivery SET status = 'DONE', attempt_count = 1, processed_at = now(), order_key = order_key WHERE id = 1`)
	require.Contains(t, h.get("/failed/delivery-1"), `badge is-done`)
	exec(`DELETE FROM {s}.event_delivery WHERE id IN (1, 2, 3)`) // as retention does
	require.Contains(t, h.get("/failed/delivery-1"), "Group stats has handled it, or it had expired before. Retention has removed the row.", "whether the event expires is not recorded here")
	require.Contains(t, h.get("/failed/delivery-2"), "It was resolved by o.operator, and retention has removed the row.")
	require.Equal(t, http.StatusNotFound, h.send("reader", http.MethodGet, "/failed/delivery-3", "", "").Code, "nobody did anything about it")
}

// The page, the API and the calls that the command line has say the same.
func TestNumbersAgree(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, func(c *Config) { c.StaleAfter = 3 * time.Minute })
	failures, err := outboxops.NewFailures(h.db, outboxops.FailuresConfig{Schema: h.schema})
	require.NoError(t, err)
	counts, err := failures.Count(t.Context(), outboxops.FailureFilter{})
	require.NoError(t, err)
	var events, dead int64
	for _, c := range counts {
		if c.Kind == outboxops.KindEvent {
			events += int64(c.Events)
		} else if c.IsUnresolved() {
			dead += int64(c.Events)
		}
	}
	inspector, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	stale, err := inspector.Stale(t.Context(), 3*time.Minute)
	require.NoError(t, err)

	var over apiOverview
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/overview")), &over))
	require.Equal(t, []int64{104, seed.DeadInAll}, []int64{over.Unresolved.Events, over.Unresolved.Deliveries})
	require.Equal(t, []int64{events, dead}, []int64{over.Unresolved.Events, over.Unresolved.Deliveries})
	sum := func(n int, more int) int { return n + more }
	var listed, found int
	for _, s := range over.Stale {
		listed = sum(listed, s.Events)
	}
	groups := 0
	for _, s := range stale {
		found = sum(found, s.Events)
		if s.Group == "stats" {
			groups += s.Events
		}
	}
	require.Equal(t, found, listed)
	require.Equal(t, 3, groups, "what is pending, failed or with a worker; not what is dead")

	page := h.get("/")
	require.Contains(t, page, "104 failed events")
	require.Contains(t, page, "6 dead deliveries")
	for _, n := range over.Notices {
		require.Contains(t, page, strings.NewReplacer(`'`, "&#39;").Replace(n.Text))
	}
	require.Contains(t, page, "Consumer group stats: 6 deliveries are dead")
	require.Contains(t, page, "Consumer group stats: 3 events have waited for longer than 3 min, the oldest for 4 min")
	require.NotContains(t, page, "All is well")
	var list apiGroupList
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/consumers")), &list))
	i := slices.IndexFunc(list.Deliveries, func(d apiDeliveryCount) bool { return d.Status == outboxops.DeliveryDead && d.Action == "COUNT_SALES" })
	require.Equal(t, seed.DeadTimeouts, list.Deliveries[i].Deliveries)
}

// A notice that needs an operator precedes a notice that only informs. Each shows the time of its data.
func TestOrderOfUrgency(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	page := h.get("/")
	var at []int
	for _, words := range []string{"As of <time", `aria-label="What needs attention"`, `<h2 id="kinds">`, `<h2 id="groups">`, `<h2 id="relay-0">`, `<h2 id="open">`, `<h2 id="partitions">`} {
		at = append(at, strings.Index(page, words))
	}
	require.IsIncreasing(t, at)
	require.NotContains(t, at, -1)
	require.Regexp(t, regexp.MustCompile(`(?s)<details class="more-rows" id="more-partitions"><summary>\d+ partitions, [^<]*<code>outbox_4000000`), page, "the table of partitions is closed")
	statuses := regexp.MustCompile(`<td data-label="Status"><span class="badge is-(\w+)`).FindAllStringSubmatch(page, -1)
	require.Equal(t, "dead", statuses[0][1])
	require.Equal(t, "parked", statuses[len(statuses)-1][1])
}

// A figure of an hour ago is not one of now.
func TestFiguresSayHowOldTheyAre(t *testing.T) {
	t.Parallel()
	now := time.Now()
	age := func(at time.Time, step time.Duration) string {
		points := []point{{at, 3}}
		return newPlot("Latency", points, scale{from: now.Add(-time.Hour), to: now, gap: time.Minute, least: 1, format: millisText}).aged(now, points, step).Age
	}
	require.Equal(t, "in the last 15 s", age(now.Add(-3*time.Second), 15*time.Second))
	require.Equal(t, "40 min ago", age(now.Add(-40*time.Minute), 15*time.Second))
	require.Equal(t, "4 s ago", age(now.Add(-4*time.Second), 0))
	require.Empty(t, plot{}.aged(now, nil, 0).Age)
}

// The overview shows the health of this process's consumers and workers. Missing health does not count as
// good health.
func TestProcesses(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) {
		c.Consumers = func() []outbox.ConsumerHealth {
			return []outbox.ConsumerHealth{{Group: "mail", Live: true, Partitions: 3, Reasons: []string{"orders/1 waits at offset 7"}}}
		}
		c.Workers = func() []outbox.WorkerHealth {
			return []outbox.WorkerHealth{{Group: "stats", Live: true, Ready: true, Works: true}}
		}
	})
	require.Contains(t, h.get("/"), "Consumer group mail, in this process: orders/1 waits at offset 7.")
	page := h.get("/consumers")
	require.Contains(t, page, "orders/1 waits at offset 7")
	require.Contains(t, page, "3 partitions")
	require.Contains(t, page, "Lag is unknown: this page has no address of Kafka.")
	require.Contains(t, h.get("/api/consumers"), `"processes":[{"group":"mail","kind":"consumer","live":true,"works":false,"reasons":["orders/1 waits at offset 7"]},`)
	calm := newAdminFixture(t, func(c *Config) { c.Health = nil })
	for _, table := range []string{"outbox_failed", "outbox"} {
		_, err := calm.db.Exec(t.Context(), `DELETE FROM "`+calm.schema+`".`+table)
		require.NoError(t, err)
	}
	page = calm.get("/")
	if !strings.Contains(page, "transaction open for") { // of other tests
		require.Contains(t, page, "All is well")
		require.Contains(t, page, "nothing is known of consumers without a database")
	}
}

// A role that may write the deliveries of one group can insert any values. The pages show the readable
// parts as text.
func TestPoisonedDeliveries(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".event_delivery SET consumer_group = left($1, 100), action = left($1, 100), event_type = left($1, 100), stream = left($1, 100),
		source = left($1, 100), aggregate_type = left($1, 100), aggregate_id = left($1, 200), last_error_code = left($1, 30), last_error_message = $1,
		headers = jsonb_build_object($1::text, $1::text), payload = jsonb_build_object($1::text, $1::text), created_at = '-infinity', updated_at = 'infinity',
		occurred_at = '20000-01-01', recorded_at = '-infinity', last_attempt_at = 'infinity', next_retry_at = '-infinity' WHERE id IN (1, 5, 7)`, hostileText)
	require.NoError(t, err)
	_, err = h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".event_delivery SET created_at = 'infinity' WHERE id = 5`)
	require.NoError(t, err)
	for _, path := range []string{"/", "/consumers", "/failed", "/failed?kind=delivery&status=any", "/failed/delivery-1", "/failed/delivery-7", "/failed/retry?kind=delivery",
		"/api/overview", "/api/consumers", "/api/failed?kind=delivery", "/api/failed/counts", "/api/failed/delivery-1"} {
		page := h.get(path)
		require.NotContains(t, page, "<script>alert", path)
		require.NotContains(t, page, "<img src=x", path)
	}
	require.Contains(t, h.get("/failed?kind=delivery"), "7 failures")
	require.Contains(t, h.get("/failed?group=stats&status=dead"), "4 failures", "those of others are as they were; nothing hides itself")
}

// The page of an event has its timeline, with links to its failures and with masked errors. It is there for an event
// that is delayed or removed, too. The API has the same.
func TestTimelinePage(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, func(c *Config) {
		c.Mask = func(text Text) []byte {
			if text.Kind == TextError {
				return []byte("masked " + text.EventType)
			}
			return text.Value
		}
	})
	id := query1[string](h, `SELECT event_id::text FROM {s}.outbox_failed WHERE outbox_id = 4099003`)
	page := h.get("/events/4099003")
	for _, words := range []string{"Payload", "Timeline", "recorded it, or moved it to outbox if it was delayed", `<a href="./../failed/event-1">event-1</a>`, "has it dead after", "masked loopers.order.packed.v1"} {
		require.Contains(t, page, words)
	}
	h.exec(`DELETE FROM {s}.outbox WHERE id = 4099003`)
	for _, path := range []string{"/events/4099003", "/events/" + id} {
		page = h.get(path)
		for _, words := range []string{"Not in outbox", id, "Searched: outbox, outbox_delayed,", "has it dead after", "masked loopers.order.packed.v1"} {
			require.Contains(t, page, words)
		}
		require.NotContains(t, page, "Envelope")
		var got apiTimeline
		require.NoError(t, json.Unmarshal([]byte(h.get("/api"+path+"/timeline")), &got))
		require.Equal(t, []any{int64(4099003), id, false, []string{}}, []any{got.OutboxID, got.EventID, got.InOutbox, got.NotSearched})
		require.NotEmpty(t, got.Entries)
		for _, e := range got.Entries {
			if e.Error != "" {
				require.Equal(t, "masked loopers.order.packed.v1", e.Error)
			}
		}
	}
	delivered := query1[string](h, `SELECT event_id::text FROM {s}.event_delivery WHERE id = 1`)
	require.Contains(t, h.get("/events/"+delivered), "group stats, action COUNT_SALES: dead after 10 attempts")
	h.exec(`INSERT INTO {s}.outbox_delayed (due_at, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		VALUES (now() + interval '1 h', '00000000-0000-4000-8000-000000000001', 'acme.order.due.v1', 'shop', 'Order', 'O-1', '1', 'application/json', now())`)
	require.Contains(t, h.get("/delayed"), `events/00000000-0000-4000-8000-000000000001"`)
	require.Contains(t, h.get("/events/00000000-0000-4000-8000-000000000001"), "due, and not moved to outbox yet")
	for _, path := range []string{"/events/what", "/events/1", "/api/events/what/timeline", "/api/events/1/timeline", "/events/00000000-0000-4000-8000-000000000002"} {
		require.Equal(t, http.StatusNotFound, h.send("reader", http.MethodGet, path, "", "").Code, path)
	}
}
