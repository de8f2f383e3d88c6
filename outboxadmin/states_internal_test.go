package outboxadmin

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/outboxops"
)

// exec runs a statement in the schema {s}.
func (h *adminFixture) exec(sql string, args ...any) {
	h.t.Helper()
	_, err := h.db.Exec(h.t.Context(), strings.ReplaceAll(sql, "{s}", `"`+h.schema+`"`), args...)
	require.NoError(h.t, err)
}

// calmFixture has a page of a process without relays, in a database where nothing is wrong and events are pending.
func calmFixture(t *testing.T) *adminFixture {
	h := newAdminFixture(t, func(c *Config) { c.Health = nil })
	h.exec(`DELETE FROM {s}.outbox_failed`)
	h.exec(`DELETE FROM {s}.outbox WHERE created_at < now() - interval '1 minute'`)
	return h
}

// An event that may have expired is not said to be sent, unless its place in Kafka is known.
func TestStatesOfAnEvent(t *testing.T) {
	t.Parallel()
	expires := time.Now()
	at := func(relay string, expired bool) outboxops.EventSent {
		return outboxops.EventSent{Relay: relay, Expired: expired}
	}
	for name, tt := range map[string]struct {
		expires time.Time
		sent    []outboxops.EventSent
		status  string
	}{
		"never expires":           {time.Time{}, nil, "sent"},
		"may have expired":        {expires, nil, "attempted"},
		"sent":                    {expires, []outboxops.EventSent{at("b", true), at("a", false)}, "sent"},
		"expired":                 {expires, []outboxops.EventSent{at("a", true), at("b", false)}, "expired"},
		"sent, expired at repeat": {expires, []outboxops.EventSent{at("a", true), at("a", false)}, "sent"},
		"sent by another relay":   {expires, []outboxops.EventSent{at("b", false)}, "attempted"},
	} {
		got := statesOf(outboxops.RecordedEvent{ExpiresAt: tt.expires, Sent: tt.sent, AttemptedBy: []string{"a"}, PendingFor: []string{"c"}})
		require.Equal(t, []eventState{{Relay: "a", Status: tt.status}, {Relay: "c", Status: "pending"}}, got, name)
	}
}

// saidAgo is an age that depends on the load.
var saidAgo = regexp.MustCompile(`said [4-9] s ago|said [1-5][0-9] s ago`)

// notices returns the texts of the notices, except for those about transactions, which other tests may have open.
func (h *adminFixture) notices() (texts []string) {
	var over apiOverview
	require.NoError(h.t, json.Unmarshal([]byte(saidAgo.ReplaceAllString(h.get("/api/overview"), "said 4 s ago")), &over))
	for _, n := range over.Notices {
		if !strings.Contains(n.Text, "transaction open") {
			texts = append(texts, n.Level+" "+n.Text)
		}
	}
	return texts
}

// What the rows say of outages is on the page, whoever serves it.
func TestOutagesFromRows(t *testing.T) {
	t.Parallel()
	h := calmFixture(t)
	require.Empty(t, h.notices())
	page := h.get("/")
	require.NotContains(t, page, "This process")
	require.Contains(t, page, "for a topic or partition")
	require.Regexp(t, `<dt>State</dt><dd>works, <span class="faint">said <time [^>]*>[0-9]+ s ago`, page)

	h.exec(`UPDATE {s}.outbox_lease SET state_at = now() - interval '4 s', kafka_at = NULL, state = '{"epoch": 3, "works": false,
		"reasons": ["the circuit breaker is open", "Kafka has been failing for 9s: dial tcp 10.0.0.7:9092: refused", "nothing has moved for 9s"],
		"breakers": [{"state": "open", "since": "2026-01-02T12:03:09Z"}],
		"outages": [{"what": "Kafka", "class": "unreachable", "since": "2026-01-02T12:03:00Z", "error": "dial tcp 10.0.0.7:9092: refused"}]}' WHERE name = 'analytics'`)
	const by = ", said 4 s ago by shop-6d9f7c5b84-9vw4t/1/20bd77."
	require.Equal(t, []string{
		"bad Relay analytics: Kafka has not answered since 2026-01-02 12:03:00 UTC (unreachable: dial tcp 10.0.0.7:9092: refused)" + by,
		"bad Relay analytics: the circuit breaker is open, since 2026-01-02 12:03:09 UTC" + by,
		"bad Relay analytics: nothing has moved for 9s" + by,
	}, h.notices())
	page = h.get("/")
	require.NotContains(t, page, "All is well")
	require.Regexp(t, `(?s)analytics</h2>.*badge is-dead">unreachable</span> <span class="badge is-dead">breaker open</span>`, page)
	require.Regexp(t, `oldest <time [^>]*>[^<]*</time>; Kafka has not answered since 2026-01-02 12:03:00 UTC</span>`, page)
	var list apiRelayList
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/relays")), &list))
	state := list.Relays[0].State
	require.False(t, state.Works)
	require.Nil(t, state.KafkaAt)
	require.Equal(t, "open", state.Breaker)
	require.Equal(t, "2026-01-02T12:03:09Z", state.BreakerSince.Format("2006-01-02T15:04:05Z07:00"))
	require.Equal(t, "unreachable", state.Outages[0].Class)
	require.True(t, list.Relays[1].State.Works)

	h.exec(`UPDATE {s}.outbox_lease SET epoch = 4 WHERE name = 'analytics'`)
	require.Equal(t, []string{"warn Relay analytics: unknown whether it works: shop-6d9f7c5b84-9vw4t/1/20bd77 leads, and has not said yet."}, h.notices())
	require.Contains(t, h.get("/"), `badge is-dead">unknown</span>`)
	require.Contains(t, h.get("/api/relays"), `"state":null`)
	h.exec(`UPDATE {s}.outbox_lease SET state = '{"epoch": 4, "works": true, "outages": [{"what": "topic orders", "class": "unknown_topic", "since": "2026-01-02T12:03:00Z", "error": "no such topic"}]}'
		WHERE name = 'analytics'`)
	require.Equal(t, []string{"warn Relay analytics: topic orders has been failing since 2026-01-02 12:03:00 UTC (unknown topic: no such topic)" + by}, h.notices())
}

// A process that leads a relay shows its own health only where its row does not say yet that something is wrong.
func TestOwnHealthBesideRows(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	page := h.get("/")
	require.Contains(t, page, "Relay default, in this process: the circuit breaker is open.")
	require.Equal(t, 1, strings.Count(page, "<dt>This process</dt><dd>leads</dd>"), "only of the relay that it has")
	h.exec(`UPDATE {s}.outbox_lease SET state = '{"epoch": 14, "breakers": [{"state": "open", "since": "2026-01-02T12:03:09Z"}]}' WHERE name = 'default'`)
	page = h.get("/")
	require.NotContains(t, page, "in this process")
	require.Contains(t, page, "Relay default: the circuit breaker is open, since 2026-01-02 12:03:09 UTC, said ")
}

// The members of a group are summed up, each thing that they say once.
func TestGroupsFromRows(t *testing.T) {
	t.Parallel()
	h := calmFixture(t)
	require.Contains(t, h.get("/consumers"), "No group has begun to read.")
	h.exec(`INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes)
		SELECT 'mail', 'host/' || n, false, now() - interval '3 s', '10 s', '{}' FROM generate_series(10, 29) AS n`)
	require.Empty(t, h.notices())
	page := h.get("/consumers")
	require.Contains(t, page, `aria-label="Consumer group mail"`)
	require.NotContains(t, page, "No group has begun")
	require.NotContains(t, page, "In this process")
	require.Regexp(t, regexp.MustCompile(`>mail</span></th><td data-label="State"><span class="pair">\s*<span class="badge is-sent">works</span>`), h.get("/"))

	h.exec(`UPDATE {s}.event_member SET works = false, reasons = '{"handlers hang"}' WHERE member = 'host/10'`)
	h.exec(`UPDATE {s}.event_member SET reasons = ARRAY['the breaker of action CALL is open: 3 events in a row have failed for ' || right(member, 1) || 's, and others wait'],
		state = jsonb_build_object('breakers', jsonb_build_array(jsonb_build_object('action', 'CALL', 'state', 'open', 'since', '2026-01-02T12:03:' || right(member, 2) || 'Z')))
		WHERE member IN ('host/11', 'host/12', 'host/13')`)
	h.exec(`UPDATE {s}.event_member SET works = false, kafka_at = now(), renewed_at = now(), reasons = '{"PostgreSQL has been failing for 7s: read only"}',
		state = '{"outages": [{"what": "PostgreSQL", "class": "read_only", "since": "2026-01-02T12:03:00Z", "error": "read only"}]}' WHERE member IN ('host/14', 'host/15')`)
	notices := strings.Join(h.notices(), "\n")
	require.Regexp(t, `^bad Consumer group mail: PostgreSQL has been failing since 2026-01-02 12:03:00 UTC \(read only: read only\) at 2 of 20 members, said [^,]* by worker host/1[45]\.
bad Consumer group mail: 1 of 20 members does not work: handlers hang, said [0-9]+ s ago by worker host/10\.
warn Consumer group mail: the breaker of action CALL is open, since 2026-01-02 12:03:11 UTC at 3 of 20 members, said [0-9]+ s ago by worker host/1[123]\.$`, notices)
	require.Contains(t, h.get("/"), `<span class="badge is-dead">read only at 2 of 20</span>`)
	var list apiGroupList
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/consumers")), &list))
	for _, m := range list.Members {
		switch m.Member {
		case "host/11":
			require.Equal(t, "CALL", (*m.Breakers)[0].Action)
			require.Empty(t, *m.Outages)
		case "host/14":
			require.Equal(t, "read_only", (*m.Outages)[0].Class)
			require.NotNil(t, m.KafkaAt)
		}
	}

	h.exec(`UPDATE {s}.event_member SET renewed_at = now() - interval '1 minute'`)
	require.NotContains(t, strings.Join(h.notices(), ""), "at 3 of 20", "what rows say that are not renewed is not known any more")
	require.Contains(t, h.get("/"), `<span class="badge is-dead">unknown</span>`)
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/consumers")), &list))
	require.Nil(t, list.Members[4].Outages)
}
