package main

import (
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/outboxgo/outbox"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/require"
)

// numbers are what a view shows, by what they count.
type numbers map[string]int64

// without returns them without some, named by how they begin.
func (n numbers) without(prefixes ...string) numbers {
	n = maps.Clone(n)
	maps.DeleteFunc(n, func(name string, _ int64) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
	})
	return n
}

func (a *agreement) get(handler http.Handler, path string) string {
	a.t.Helper()
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequestWithContext(a.t.Context(), http.MethodGet, "http://ops.example"+path, http.NoBody))
	require.Equal(a.t, http.StatusOK, w.Code, "%s: %s", path, w.Body)
	text, err := io.ReadAll(w.Body)
	require.NoError(a.t, err)
	return string(text)
}

// truth returns the numbers that tables, Kafka and processes have. The names say what is counted, and of what.
func (a *agreement) truth() numbers {
	a.t.Helper()
	n := numbers{
		"unresolved events":         a.count(`SELECT count(*) FROM {s}.outbox_failed WHERE status <> 'resolved'`),
		"keys of main":              a.count(`SELECT count(DISTINCT parking_key) FROM {s}.outbox_failed WHERE status IN ('waiting', 'failed', 'parked')`),
		"dead in all":               a.rows("dead") + a.count(`SELECT count(*) FROM {s}.event_delivery WHERE status = 'DEAD' AND resolved_at IS NULL`),
		"paused groups":             a.count(`SELECT count(DISTINCT consumer_group) FROM {s}.consumer_pause`),
		"dead letters":              a.ends("orders.dlq"),
		"open breaker of relay cut": 1, "open breaker of action CALLED": 1,
		"unled relay gone": 1,
	}
	n["unresolved in all"] = n["unresolved events"] + n["dead in all"] - a.rows("dead")
	for _, status := range []string{"waiting", "failed", "parked", "dead"} {
		n[status+" of main"] = a.rows(status)
	}
	recorded := a.count(`SELECT count(*) FROM {s}.outbox`)
	n["pending of gone"], n["pending of cut"], n["pending of main"] = recorded, recorded, 0
	n["stale of gone"], n["stale of cut"] = recorded, recorded
	n["stale of main"] = a.count(`SELECT count(*) FROM {s}.outbox_failed WHERE status <> 'resolved' AND status <> 'dead'`)
	for _, group := range []string{"mails", "sales", "stats"} {
		n["dead of "+group], n["owed to "+group], n["stale of "+group] = a.deliveries(group, "dead"), a.owed(group), a.owed(group)
		n["retried by "+group] = a.count(`SELECT count(*) FROM {s}.event_delivery WHERE consumer_group = $1 AND status = 'PENDING' AND attempt_count > 0`, a.group(group))
	}
	for _, group := range []string{"sales", "stats", "still", "imports"} {
		n["lag of "+group] = a.lag(group)
	}
	return n
}

// short returns the name of a group in this test.
func (a *agreement) short(group string) string { return strings.TrimSuffix(group, "-"+a.id) }

// alerted returns the numbers that alerts have: those of a monitor that began when all had failed.
func (a *agreement) alerted(late *alertLog) numbers {
	a.t.Helper()
	n := numbers{}
	a.eventually(func() bool {
		return len(late.of(outbox.AlertNoLeader)) > 0 && len(late.of(outbox.AlertReport)) > 0 && len(late.of(outbox.AlertManyDead)) > 0 &&
			len(late.of(outbox.AlertStale)) == 6 && len(a.cut.of(outbox.AlertBreaker)) > 0 && len(late.of(outbox.AlertBreaker)) > 0
	}, "not all alerts came")
	for _, alert := range late.of(outbox.AlertNoLeader) {
		n["unled relay "+alert.Relay] = 1
		n["pending of "+alert.Relay] = alert.Status.Pending
	}
	for _, alert := range late.of(outbox.AlertBreaker) {
		n["open breaker of relay "+alert.Relay] = 1
	}
	for _, alert := range late.of(outbox.AlertStale) {
		owner := alert.Relay + a.short(alert.Group)
		for _, c := range alert.Counts {
			n["stale of "+owner] += int64(c.Events)
		}
		if alert.Relay != "" {
			n["pending of "+alert.Relay] = alert.Status.Pending
		}
		if alert.Relay == "main" {
			n["keys of main"] = alert.Status.ParkedKeys
		}
	}
	for _, c := range countsOf(late.of(outbox.AlertManyDead)) {
		n["dead in all"] += int64(c.Events)
	}
	for _, status := range []string{"waiting", "failed", "parked", "dead"} {
		n[status+" of main"] = 0
	}
	for _, group := range []string{"mails", "sales", "stats"} {
		n["dead of "+group] = 0
	}
	for _, c := range countsOf(late.of(outbox.AlertReport)) {
		n["unresolved in all"] += int64(c.Events)
		switch {
		case c.Relay != "":
			n[c.Status+" of "+c.Relay] += int64(c.Events)
			n["unresolved events"] += int64(c.Events)
		case c.Status == outbox.StatusDead:
			n["dead of "+a.short(c.Group)] += int64(c.Events)
		}
	}
	return n
}

// countsOf returns what the last of some alerts counts.
func countsOf(alerts []outbox.Alert) []outbox.EventCount { return alerts[len(alerts)-1].Counts }

// tags are what HTML has between texts.
var tags = regexp.MustCompile(`(?s)<[^>]*>|\s+`)

// text returns the text that a reader sees on a page.
func text(page string) string {
	return strings.Join(strings.Fields(tags.ReplaceAllString(page, " ")), " ")
}

// onPage returns the numbers that the page shows.
func (a *agreement) onPage() numbers {
	a.t.Helper()
	page := a.newPage()
	consumers := text(a.get(page, "/consumers")) // which asks Kafka
	overview := text(a.get(page, "/"))
	n := numbers{}
	find := func(where, name, pattern string) {
		a.t.Helper()
		all := regexp.MustCompile(pattern).FindAllStringSubmatch(where, -1)
		require.Len(a.t, all, 1, "%s: %s in %s", name, pattern, where)
		value := int64(1) // it is there
		if len(all[0]) > 1 {
			var err error
			value, err = strconv.ParseInt(all[0][1], 10, 64)
			require.NoError(a.t, err)
		}
		n[name] += value
	}
	find(overview, "unresolved events", `unresolved: (\d+) failed events`)
	find(overview, "dead in all", `failed events , (\d+) dead deliver`)
	find(overview, "dead in all", `Relay main: (\d+) events are dead`)
	find(overview, "unresolved in all", `unresolved: (\d+) failed events`)
	find(overview, "unresolved in all", `failed events , (\d+) dead deliver`)
	find(overview, "unled relay gone", `Relay gone: no process leads`)
	find(overview, "open breaker of relay cut", `Relay cut: the circuit breaker is open, since`)
	find(overview, "open breaker of action CALLED", `Consumer group `+a.group("stats")+`: the breaker of action CALLED is open, since`)
	find(overview, "paused groups", `Consumer group `+a.group("still")+`: all topics paused by kim`)
	for _, relay := range []string{"cut", "gone", "main"} {
		find(overview, "stale of "+relay, `Relay `+relay+`: (\d+) events have waited for longer than 1 s`)
		card := regexp.MustCompile(` ` + relay + ` (?:leading|no leader) .*?\d+ held`).FindString(overview)
		find(card, "pending of "+relay, `Pending (\d+) `)
		if relay == "main" {
			for _, status := range []string{"Waiting", "Failed", "Parked", "Dead"} {
				find(card, strings.ToLower(status)+" of main", status+` (\d+) (?:Waiting|Failed|Parked|Dead|for|refused|no|\d+ keys)`)
			}
			find(card, "keys of main", `(\d+) keys? waits?, 0 held`)
		}
	}
	for _, group := range []string{"mails", "sales", "stats"} {
		find(overview, "stale of "+group, `Consumer group `+a.group(group)+`: (\d+) events have waited for longer than 1 s`)
		find(overview, "retried by "+group, `Consumer group `+a.group(group)+`: (\d+) deliver(?:y|ies) will be retried`)
		state := `(?:reads 1 topic|workers) (?:works|breaker open)`
		find(overview, "dead of "+group, a.group(group)+` `+state+` (\d+) \d+ `)
		find(overview, "owed to "+group, a.group(group)+` `+state+` \d+ (\d+) `)
	}
	for _, group := range []string{"sales", "stats", "still", "imports"} {
		topic := a.topic("orders")
		if group == "imports" {
			topic = a.topic("imports")
		}
		find(consumers, "lag of "+group, a.group(group)+` `+topic+` 1 (\d+) `)
	}
	find(consumers, "dead letters", a.topic("orders.dlq")+` `+a.topic("orders")+` (\d+)`)
	return n
}

// document is what the API and the command line have in common.
type document struct {
	Relays []struct {
		Name, Holder, Leader                   string
		Pending, Waiting, Failed, Parked, Dead int64
		ParkedKeys                             int64 `json:"parked_keys"`
		State                                  *struct{ Breaker string }
	}
	Stale []struct {
		Relay, Group string
		Events       int64
	}
	Counts []struct {
		Kind, Relay, Group, Status string
		Events, Failures           int64
	}
	Groups []struct {
		Group  string
		Pause  *struct{ Operator string }
		Topics []struct {
			Topic string
			Lag   *int64
		}
	}
	Deliveries []struct {
		Group, Status string
		Deliveries    int64
	}
	DeadLetters []struct {
		Topic   string
		Records int64
	} `json:"dead_letters"`
	Members    []member
	Unresolved unresolved
}

// member is a process of a group.
type member struct {
	Breakers []struct{ Action, State string }
}

// unresolved is a number, or one of events and one of deliveries.
type unresolved int64

// UnmarshalJSON implements [json.Unmarshaler].
func (u *unresolved) UnmarshalJSON(data []byte) error {
	var both struct{ Events, Deliveries int64 }
	if json.Unmarshal(data, &both) == nil {
		*u = unresolved(both.Events + both.Deliveries)
		return nil
	}
	return json.Unmarshal(data, (*int64)(u))
}

// inDocuments returns the numbers of documents.
func (a *agreement) inDocuments(texts ...string) numbers {
	a.t.Helper()
	var d document
	var states struct{ Groups []struct{ Members []member } } // of the command line's status, whose groups are others than those of consumers
	for n, text := range texts {
		require.NoError(a.t, json.Unmarshal([]byte(text), &d), text)
		if n == 0 {
			require.NoError(a.t, json.Unmarshal([]byte(text), &states), text)
		}
	}
	n := numbers{"paused groups": 0, "dead in all": 0, "unresolved in all": int64(d.Unresolved)}
	for _, r := range d.Relays {
		n["pending of "+r.Name] = r.Pending
		if r.Name == "main" {
			n["waiting of main"], n["failed of main"], n["parked of main"], n["dead of main"] = r.Waiting, r.Failed, r.Parked, r.Dead
			n["keys of main"] = r.ParkedKeys
		}
		if r.Holder+r.Leader == "" {
			n["unled relay "+r.Name] = 1
		}
		if r.State != nil && r.State.Breaker != "closed" {
			n["open breaker of relay "+r.Name] = 1
		}
	}
	for _, s := range d.Stale {
		n["stale of "+s.Relay+a.short(s.Group)] += s.Events
	}
	for _, c := range d.Counts {
		events := c.Events + c.Failures
		if c.Kind == "event" {
			n["unresolved events"] += events
		}
		switch {
		case c.Status == "dead":
			n["dead in all"] += events
		case c.Status == "failed" && c.Kind == "delivery":
			n["retried by "+a.short(c.Group)] += events
		}
	}
	for _, g := range d.Groups {
		if g.Pause != nil {
			n["paused groups"]++
		}
		for _, t := range g.Topics {
			require.NotNil(a.t, t.Lag)
			n["lag of "+a.short(g.Group)] += *t.Lag
		}
	}
	for _, group := range []string{"mails", "sales", "stats"} {
		n["dead of "+group], n["owed to "+group] = 0, 0
	}
	for _, c := range d.Deliveries {
		if c.Status == "DEAD" {
			n["dead of "+a.short(c.Group)] += c.Deliveries
		} else {
			n["owed to "+a.short(c.Group)] += c.Deliveries
		}
	}
	for _, l := range d.DeadLetters {
		n["dead letters"] += l.Records
	}
	members := d.Members
	for _, g := range states.Groups {
		members = append(members, g.Members...)
	}
	for _, m := range members {
		for _, b := range m.Breakers {
			n["open breaker of action "+b.Action]++
		}
	}
	return n
}

// inMetrics returns the numbers that Prometheus scrapes.
func (a *agreement) inMetrics() numbers {
	a.t.Helper()
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(a.get(a.tel.scraped, "/metrics")))
	require.NoError(a.t, err)
	s, n := scraped(families), numbers{"dead in all": 0, "unresolved events": 0}
	value := func(name string, labels ...string) int64 { return int64(s.value(name, labels...)) }
	for _, relay := range []string{"cut", "gone", "main"} {
		n["pending of "+relay] = value("outbox_relay_pending", "outbox_relay_name", relay)
		n["stale of "+relay] = value("outbox_stale", "outbox_relay_name", relay)
		if value("outbox_relay_led", "outbox_relay_name", relay) == 0 {
			n["unled relay "+relay] = 1
		}
		if value("outbox_relay_breaker_state", "outbox_relay_name", relay, "outbox_state", "open") == 1 {
			n["open breaker of relay "+relay] = 1
		}
	}
	for _, status := range []string{"waiting", "failed", "parked", "dead"} {
		n[status+" of main"] = value("outbox_relay_stored", "outbox_relay_name", "main", "outbox_status", status)
		n["unresolved events"] += value("outbox_relay_stored", "outbox_status", status)
	}
	n["keys of main"] = value("outbox_relay_keys", "outbox_relay_name", "main", "outbox_state", "parked")
	n["unresolved in all"] = n["unresolved events"] + value("outbox_worker_dead")
	n["dead in all"] = value("outbox_relay_stored", "outbox_status", "dead") + value("outbox_worker_dead")
	const group = "messaging_consumer_group_name"
	for _, name := range []string{"mails", "sales", "stats"} {
		n["dead of "+name] = value("outbox_worker_dead", group, a.group(name))
		n["owed to "+name] = value("outbox_worker_pending", group, a.group(name))
		n["stale of "+name] = value("outbox_stale", group, a.group(name))
	}
	for _, name := range []string{"sales", "stats", "still", "imports"} {
		n["lag of "+name] = value("outbox_consumer_lag", group, a.group(name))
	}
	for _, action := range []string{"SALE_COUNTED", "CALLED", "MAIL_SENT"} {
		// By the process itself, and by its row, in which it may be half-open for a moment.
		open := max(value("outbox_consumer_breaker_state", "outbox_action", action, "outbox_state", "open"), value("outbox_worker_breaker_state", "outbox_action", action, "outbox_state", "open"))
		if open == 1 && value("outbox_group_breakers", "outbox_action", action) == 1 {
			n["open breaker of action "+action] = 1
		}
	}
	return n
}
