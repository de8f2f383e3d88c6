package outboxadmin

import (
	"html"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
)

var linked = regexp.MustCompile(`(?:href|src)="([^"]*)"`)

// crawl follows all links from a page, and returns the pages by path.
func (h *adminFixture) crawl(from string) map[string]string {
	h.t.Helper()
	found := map[string]string{}
	for todo := []string{from}; len(todo) > 0 && len(found) < 250; {
		path := todo[0]
		todo = todo[1:]
		if _, seen := found[path]; seen {
			continue
		}
		found[path] = h.get(path)
		at, err := url.Parse(prefix + path)
		require.NoError(h.t, err)
		for _, link := range linked.FindAllStringSubmatch(found[path], -1) {
			if strings.HasPrefix(link[1], "#") {
				continue
			}
			require.NotRegexp(h.t, `^(/|[a-z]+:|$)`, link[1], "on %s: links are relative", path)
			to, err := at.Parse(html.UnescapeString(link[1]))
			require.NoError(h.t, err)
			inside, ok := strings.CutPrefix(to.RequestURI(), prefix)
			require.True(h.t, ok, "%s leads out, to %s", path, to)
			todo = append(todo, inside)
		}
	}
	return found
}

// No link leads astray, under a prefix; nothing is written into a page that the policy
// forbids.
func TestLinks(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	found := h.crawl("/failed/event-1")
	require.Greater(t, len(found), 100)
	for _, path := range []string{"/failed/event-1", "/failed/retry?", "/events/4099001", "/audit", "/api/openapi.json", "/assets/admin.css"} {
		_, ok := found[path]
		require.True(t, ok, path)
	}
	for path, page := range found {
		if !strings.HasPrefix(page, "<!doctype html>") {
			continue
		}
		require.NotRegexp(t, `(?i)<style|\sstyle="|\son[a-z]+="|<script(?: defer)?>|javascript:`, page, path)
		require.NotContains(t, page, "ZgotmplZ", path)
		require.NotContains(t, page, "%!", path)
		require.Equal(t, 1, strings.Count(page, "<h1"), path)
	}
}

func TestOverview(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	page := h.get("/")
	for _, words := range []string{"Relay default: 15 events are dead, refused", "Relay default, in this process: the circuit breaker is open.", "badge is-sent\">works</span>",
		"Relay default: 1 key waits for an operator.", "message too large", "badge is-sent\">current"} {
		require.Contains(t, page, words)
	}
	require.Equal(t, 6, strings.Count(page, `<path class="plot-line"`), "each relay has three plots")
	require.NotContains(t, page, "no process leads")
	_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".outbox_lease SET expires_at = now() - interval '1 s'`)
	require.NoError(t, err)
	page = h.get("/?span=1h")
	require.Contains(t, page, "Relay analytics: no process leads, its state is unknown since ")
	require.Contains(t, page, "Relay default: no process leads, its state is unknown since ")
	require.Equal(t, http.StatusBadRequest, h.send("reader", http.MethodGet, "/?span=2h", "", "").Code)
}

// A relay that a cutover has ended has no leader, and the page does not say that it has one.
func TestOverviewAfterACut(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	for holder, to := range map[string]string{"outbox cut": "workers", "outbox debezium": "Debezium"} {
		_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".outbox_lease SET holder = $1, expires_at = 'infinity' WHERE name IN ('default', 'analytics')`, holder)
		require.NoError(t, err)
		page := h.get("/")
		require.NotContains(t, page, ">leading<")
		require.NotContains(t, page, ">no leader<")
		require.NotContains(t, page, holder)
		require.Equal(t, 2, strings.Count(page, ">ended by a cut<"))
		require.NotContains(t, page, ">unknown<")
		require.Contains(t, page, "none, its events go to "+to)
	}
}

// The page and the API name the cursor topic of a relay that sends exactly once, and the newest confirmed transaction.
func TestExactlyOnce(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	require.NotContains(t, h.get("/"), "exactly once")
	require.Contains(t, h.get("/api/relays"), `"cursor_topic":"","transaction":0`)
	query1[int64](h, `INSERT INTO {s}.outbox_cursor (relay, snapshot, last_processed_id, highest_id, system_identifier, epoch, cursor_topic, token, batch, confirmed)
		SELECT relay, snapshot, last_processed_id, highest_id, system_identifier, epoch, '<cursors>', 't', 4711, id
		  FROM {s}.outbox_cursor WHERE relay = 'default' ORDER BY id DESC LIMIT 1 RETURNING id`)
	page := h.get("/")
	require.Contains(t, page, "exactly once, ")
	require.Contains(t, page, `title="&lt;cursors&gt;"`)
	require.Contains(t, page, "transaction 4,711 is confirmed")
	require.Contains(t, h.get("/api/relays"), `"transaction":4711`)
}

func TestNotices(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, tt := range noticeTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := situation{now: now, staleAfter: 5 * time.Minute, relays: []outbox.RelayStatus{{Name: "default", Holder: "x"}}}
			tt.change(&s, now)
			var texts []string
			for _, n := range s.notices() {
				texts = append(texts, n.Text)
			}
			require.Equal(t, tt.want, texts)
		})
	}
}

// noticeTests have each kind of problem. Without any of them, the page says that all is well.
var noticeTests = []struct {
	name   string
	change func(*situation, time.Time)
	want   []string
}{
	{"nothing", func(*situation, time.Time) {}, nil},
	{"no leader", func(s *situation, _ time.Time) { s.relays[0].Holder = "" },
		[]string{"Relay default: no process leads. Nothing of it is sent until a process takes the lease."}},
	{"a leader that has not said anything", func(s *situation, _ time.Time) { s.relays[0].Pending = 3 },
		[]string{"Relay default: unknown whether it works: x leads, and has not said yet."}},
	{"a relay that a cut has ended", func(s *situation, _ time.Time) { s.relays[0].Pending, s.relays[0].Holder = 3, "outbox cut" }, nil},
	{"pending, and not for long", func(s *situation, now time.Time) {
		s.relays[0].Said = &outbox.RelayState{At: now, Works: true}
		s.relays[0].Pending, s.relays[0].Oldest = 1, now.Add(-4*time.Minute)
	}, nil},
	{"dead and tried again", func(s *situation, _ time.Time) { s.relays[0].Dead, s.relays[0].Failed, s.relays[0].Waiting = 1, 1, 2 },
		[]string{"Relay default: 1 event is dead, refused by Kafka too often.", "Relay default: 3 events will be retried."}},
	{"parked alone", func(s *situation, _ time.Time) { s.relays[0].Parked = 2 }, []string{"Relay default: 2 events wait behind others of their keys."}},
	{"held keys", func(s *situation, _ time.Time) {
		s.relays[0].HeldKeys = 1
		s.groups.deliveries = []outboxops.DeliveryCount{{Group: "stats", Status: outboxops.DeliveryDead, Deliveries: 3, Held: 2}}
	}, []string{"Relay default: 1 key waits for an operator.", "Consumer group stats: 2 keys wait for an operator."}},
	{"an open breaker", func(s *situation, _ time.Time) {
		s.health = map[string]*outbox.RelayHealth{"other": {Live: true, Ready: true, Works: true, Breaker: outbox.BreakerOpen}}
	}, []string{"Relay other, in this process: the circuit breaker is open."}},
	{"a blocked partition, and a lag", func(s *situation, _ time.Time) {
		s.consumers = []outbox.ConsumerHealth{{Group: "a", Live: true, Ready: true, Works: true, Reasons: []string{"the lag grows"}}, {Group: "b", Live: true, Reasons: []string{"orders/3 waits at offset 7"}}}
		s.workers = []outbox.WorkerHealth{{Group: "c"}}
	}, []string{"Consumer group b, in this process: orders/3 waits at offset 7.", "Workers of group c, in this process: it does not work.", "Consumer group a, in this process: the lag grows."}},
	{"deliveries", func(s *situation, _ time.Time) {
		s.counts = []outboxops.FailureCount{{Kind: outboxops.KindDelivery, Group: "stats", Status: outbox.StatusDead, Type: "a", Events: 2}, {Kind: outboxops.KindDelivery, Group: "mail", Status: outbox.StatusFailed, Events: 1},
			{Kind: outboxops.KindDelivery, Group: "stats", Status: outbox.StatusDead, Type: "b", Events: outbox.MaxCounted, More: true}, {Kind: outboxops.KindEvent, Status: outbox.StatusDead, Events: 9}}
	}, []string{"Consumer group stats: 10,002+ deliveries are dead, no attempts left.", "Consumer group mail: 1 delivery will be retried."}},
	{"what waits for too long, wherever it waits", func(s *situation, now time.Time) {
		s.stale = []outbox.EventCount{{Relay: "default", Status: "parked", Events: 199, Oldest: now.Add(-11 * time.Minute)}, {Relay: "default", Status: "waiting", Events: 1, Oldest: now.Add(-12 * time.Minute)},
			{Group: "stats", Status: "pending", Events: 1, Oldest: now.Add(-3 * time.Hour)}}
	}, []string{"Consumer group stats: 1 event has waited for longer than 5 min, the oldest for 3 h: 1 pending.",
		"Relay default: 200 events have waited for longer than 5 min, the oldest for 12 min: 1 waiting, 199 parked."}},
	{"parts of a bounded read, which are no exact numbers", func(s *situation, now time.Time) {
		s.stale = []outbox.EventCount{{Group: "stats", Status: "waiting", Type: "a", Events: 5000, More: true, Oldest: now.Add(-time.Hour)}, {Group: "stats", Status: "failed", Type: "b", Events: 3, Oldest: now.Add(-time.Hour)}}
		s.groups.deliveries = []outboxops.DeliveryCount{{Group: "stats", Status: outboxops.DeliveryDead, Deliveries: outbox.MaxCounted, More: true, Held: 2},
			{Group: "mail", Status: outboxops.DeliveryPending, Deliveries: outbox.MaxCounted, More: true}, {Group: "mail", Status: outboxops.DeliveryDead, Deliveries: 3, Held: 2}}
		s.groups.Counts = []tables.EventCount{{Group: "stats", Action: "COUNT", Topic: "orders", Status: "waiting", Events: 4000, More: true, Oldest: now.Add(-time.Hour)},
			{Group: "stats", Action: "COUNT", Topic: "orders", Status: outbox.StatusFailed, Events: 6000, More: true, Oldest: now.Add(-time.Hour)}}
		s.counts = []outboxops.FailureCount{{Kind: outboxops.KindDelivery, Group: "stats", Status: outbox.StatusFailed, Events: 6000, More: true}}
	}, []string{"Consumer group stats: no process runs, and 10,000+ events wait.",
		"Consumer group stats: 5,003+ events have waited for longer than 5 min, the oldest for 60 min: 5,000+ waiting, 3 failed.",
		"Consumer group mail: 2 keys wait for an operator.", "Consumer group stats: 2+ keys wait for an operator.",
		"Consumer group stats: 6,000+ deliveries will be retried: 6,000+ of action COUNT, topic orders."}},
	{"pauses", func(s *situation, now time.Time) {
		pause := &outboxops.ConsumerPause{Operator: "kim", Reason: "stock", At: now.Add(-time.Hour)}
		s.groups.groups = []outboxops.ConsumerGroup{{Group: "stats", Topics: []outboxops.ConsumerTopic{{Topic: "orders", Pause: pause}, {Topic: "likes"}}}, {Group: "mail", Pause: pause}}
	}, []string{"Consumer group stats: orders paused by kim 60 min ago: stock", "Consumer group mail: all topics paused by kim 60 min ago: stock"}},
	{"open transactions", func(s *situation, now time.Time) {
		s.open = []outboxops.OpenTransaction{{PID: 7, User: "shop", Since: now.Add(-50 * time.Second)}, {PID: 8, User: "shop", Application: "cron", Since: now.Add(-2 * time.Hour)}, {Prepared: "x", User: "shop", Since: now.Add(-48 * time.Hour)}}
	}, []string{"Process 8 (shop cron) has had a transaction open for 2 h.", "Transaction x (shop) has been prepared for 2 days."}},
}

// Who blocks is on the first page.
func TestOpenTransactions(t *testing.T) {
	t.Parallel()
	handler, err := New(testenv.Pool(t, nil), Config{Authorize: authorize})
	require.NoError(t, err)
	page := handler.(*admin).page(httptest.NewRequest(http.MethodGet, "/", nil), http.StatusOK, "overview", "Overview", overview{Transactions: []outboxops.OpenTransaction{
		{PID: 4711, User: "shop", Application: "checkout", State: "idle in transaction", Since: time.Now().Add(-time.Hour), Query: "SELECT '<1>'", Recording: true, WaitsFor: []int32{12, 13}},
		{Prepared: "settlement-7", State: "prepared", Since: time.Now().Add(-50 * time.Hour)},
	}})
	for _, words := range []string{"4711", "checkout", "idle in transaction", "60 min ago", "SELECT &#39;&lt;1&gt;&#39;", "waits for 12, 13", "settlement-7", "2 days ago", "No relay has run yet"} {
		require.Contains(t, string(page.body), words)
	}
}

var filterTests = []struct {
	name, query string
	rows        int
	total       string
}{
	{"what is unresolved", "", 50, "104 failures"},
	{"the dead", "status=dead", 15, "15 failures"},
	{"all of one order", "status=any&aggregate_type=Order&aggregate_id=" + seed.Order, 2, "2 failures"},
	{"by type and class", "type=loopers.payment.paid.v1&class=invalid_record", 15, "15 failures"},
	{"by topic", "topic=product-events&limit=10", 10, "29 failures"},
	{"by key, as a form sends it", "status=&type=&topic=order-events&key=" + seed.Order + "&since=&until=&event_id=&relay=&outbox_id=&class=&aggregate_id=&aggregate_type=", 2, "2 failures"},
	{"the future", "since=2100-01-01T00:00", 0, "Nothing matches"},
	{"by place", "outbox_id=4099003", 1, "1 failure"},
}

func TestFailedFilters(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	for _, tt := range filterTests {
		t.Run(tt.name, func(t *testing.T) {
			h.t = t
			page := h.get("/failed?" + tt.query)
			require.Equal(t, tt.rows, strings.Count(page, `<th scope="row">`))
			require.Contains(t, page, tt.total)
		})
	}
	h.t = t
	for _, bad := range []string{"stauts=dead", "status=gone", "since=yesterday", "outbox_id=x", "limit=1001", "status=dead&status=failed", "type=%00", "type=%ff"} {
		for _, path := range []string{"/failed?", "/api/failed?", "/failed/retry?"} {
			require.Equal(t, http.StatusBadRequest, h.send("operator", http.MethodGet, path+bad, "", "").Code, path+bad)
		}
	}
}

// The pages of a list have each event once.
func TestPaging(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	seen := map[string]bool{}
	next := regexp.MustCompile(`rel="next" href="([^"]+)"`)
	pages := 0
	for path := "failed?limit=50"; path != ""; pages++ {
		page := h.get("/" + path)
		for _, link := range regexp.MustCompile(`href="failed/event-(\d+)"`).FindAllStringSubmatch(page, -1) {
			require.False(t, seen[link[1]], "event %s is there twice", link[1])
			seen[link[1]] = true
		}
		path = ""
		if link := next.FindStringSubmatch(page); link != nil {
			path = html.UnescapeString(link[1])
		}
	}
	require.Equal(t, 3, pages)
	require.Len(t, seen, 104)
}

// The events of an aggregate come in order with their states, including events that retention has removed.
func TestAggregate(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	_, err := h.db.Exec(t.Context(), `DELETE FROM "`+h.schema+`".outbox WHERE id = 4099003`)
	require.NoError(t, err)
	page := h.get("/events?aggregate_type=Order&aggregate_id=" + seed.Order)
	var at []int
	for _, words := range []string{"loopers.order.created.v1", "loopers.order.paid.v1", "loopers.order.packed.v1", "loopers.order.shipped.v1"} {
		require.Equal(t, 1, strings.Count(page, ">"+words+"<"), words)
		at = append(at, strings.Index(page, ">"+words+"<"))
	}
	require.IsIncreasing(t, at)
	require.Equal(t, 5, strings.Count(page, "badge is-sent"))
	require.Equal(t, 1, strings.Count(page, "badge is-dead"))
	require.Equal(t, 1, strings.Count(page, "badge is-parked"))
	id := query1[string](h, `SELECT event_id::text FROM {s}.outbox_failed WHERE outbox_id = 4099003`)
	require.Contains(t, h.get("/events?event_id="+strings.ToUpper(id)), ">loopers.order.packed.v1<")
	require.Contains(t, h.get("/events?event_id=00000000-0000-0000-0000-000000000000"), "No such event")
}

// Nothing of a masked payload is anywhere; an edit of one begins with an empty field.
func TestMask(t *testing.T) {
	t.Parallel()
	const secret = "mina@example.com"
	plain := newAdminFixture(t, nil)
	require.Contains(t, html.UnescapeString(plain.get("/failed/event-1")), secret)
	h := newAdminFixture(t, func(c *Config) {
		c.Mask = func(text Text) []byte {
			if text.Kind == TextPayload && strings.Contains(string(text.Value), "gift") {
				return []byte(`{"masked": true}`)
			}
			return text.Value
		}
	})
	for path, page := range h.crawl("/failed/event-1") {
		require.NotContains(t, html.UnescapeString(page), secret, path)
		require.NotContains(t, html.UnescapeString(page), `"yes"`, path+" shows the payload from before the edit")
	}
	require.NotContains(t, h.get("/api/failed/event-1"), secret)
	require.NotContains(t, h.get("/api/failed/event-1"), "yes")
	page := h.get("/failed/event-1")
	require.Contains(t, page, "<strong>masked</strong>")
	require.Contains(t, page, `spellcheck="false" required></textarea>`)
	require.Contains(t, h.get("/failed/event-5"), "SKU-", "what the mask leaves is shown")
}

// An error of the database is logged and not shown.
func TestDatabaseIsAway(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	_, err := h.db.Exec(t.Context(), `ALTER TABLE "`+h.schema+`".outbox_failed RENAME TO elsewhere`)
	require.NoError(t, err)
	for _, path := range []string{"/", "/failed", "/api/failed"} {
		w := h.send("reader", http.MethodGet, path, "", "")
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.NotContains(t, w.Body.String(), "outbox_failed")
	}
	require.Contains(t, h.log.String(), "outbox_failed")
}

// A statement that takes too long is cancelled, and the page says so.
func TestTooLong(t *testing.T) {
	// Not parallel: the request has 200 ms, and must get as far as the database.
	h := newAdminFixture(t, func(c *Config) { c.QueryTimeout = 200 * time.Millisecond })
	tx, err := h.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(background) }()
	_, err = tx.Exec(t.Context(), `LOCK TABLE "`+h.schema+`".outbox_failed`)
	require.NoError(t, err)
	w := h.send("reader", http.MethodGet, "/failed", "", "")
	require.Equal(t, http.StatusGatewayTimeout, w.Code)
	require.Contains(t, w.Body.String(), "That took too long")
}

// Text of other origin is escaped in pages.
func TestEscaping(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".outbox_failed SET event_type = '<img src=x>', last_error = '<script>alert(1)</script>',
		aggregate_id = '"><b>', parking_key = 'javascript:alert(1)/<i>', payload = '{"a":"</pre><script>"}', headers = '{"<b>":"<b>"}' WHERE id = 1`)
	require.NoError(t, err)
	for _, path := range []string{"/", "/failed?status=dead", "/failed/event-1", "/failed/retry?status=dead", "/audit", "/failed?type=%3Cscript%3Ealert(1)%3C/script%3E"} {
		require.NotRegexp(t, `<img|<script>|<b>|<i>|href="javascript`, h.get(path), path)
	}
}
