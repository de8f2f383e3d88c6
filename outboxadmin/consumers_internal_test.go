package outboxadmin

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// The overview shows paused topics with the operator and the reason. The audit has the pause too.
func TestConsumerGroups(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	require.NotContains(t, h.get("/"), "Consumer groups")
	require.JSONEq(t, `{"groups": [], "more": false, "lag_at": null, "lag_error": "", "dead_letters": [], "deliveries": [], "workers": [], "waiting": [], "members": [], "processes": []}`, h.get("/api/consumers"))
	_, err := h.db.Exec(t.Context(), strings.ReplaceAll(`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
		SELECT 'stats', 'orders', '00000000-0000-0000-0000-000000000001', n, 0, 7 FROM generate_series(0, 2) AS n`, "{s}", `"`+h.schema+`"`))
	require.NoError(t, err)

	pause := map[string]any{"group": "stats", "topic": "orders", "reason": "the stock is counted"}
	require.Equal(t, http.StatusNoContent, h.call("/api/consumers/pause", pause).Code)
	require.Equal(t, audited{"o.operator", "pause", "the stock is counted"}, h.lastAudit())
	require.Equal(t, http.StatusConflict, h.call("/api/consumers/pause", pause).Code)
	require.Equal(t, http.StatusNoContent, h.call("/api/consumers/pause", map[string]any{"group": "stats", "reason": "a migration"}).Code)
	answer := h.get("/api/consumers")
	require.Contains(t, answer, `"reason":"a migration"`)
	require.Contains(t, answer, `{"topic":"orders","partitions":3,"lag":null,`)
	page := h.get("/")
	require.Contains(t, page, "Consumer group stats: orders paused by o.operator now: the stock is counted")
	require.Contains(t, page, "Consumer group stats: all topics paused by o.operator now: a migration")
	page = h.get("/consumers")
	require.Regexp(t, regexp.MustCompile(`(?s)aria-label="Consumer group stats".*a migration.*Topics.*>stats</span>.*>all topics</span>.*a migration.*>orders</span>.*the stock`), page)
	require.Regexp(t, regexp.MustCompile(`(?s)paused group stats.*>all topics</span>.*paused group stats.*>orders</span>`), h.get("/audit"))
	require.Contains(t, h.get("/api/audit"), `"group":"stats"`)

	require.Equal(t, http.StatusNoContent, h.call("/api/consumers/resume", map[string]any{"group": "stats", "reason": "done"}).Code)
	require.Equal(t, http.StatusConflict, h.call("/api/consumers/resume", map[string]any{"group": "stats", "reason": "done"}).Code)
	require.NotContains(t, h.get("/"), "all topics paused")
	for _, bad := range []map[string]any{{"group": "", "reason": "x"}, {"group": "stats", "reason": ""}, {"group": "stats", "topic": "a/b", "reason": "x"}} {
		w := h.call("/api/consumers/pause", bad)
		require.Equal(t, http.StatusUnprocessableEntity, w.Code, w.Body)
	}
}

// A role that may write to consumer_start for one group can insert any rows. The page still shows the
// readable parts of these rows, and the other groups.
func TestPoisonedGroups(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	exec := func(sql string, args ...any) {
		_, err := h.db.Exec(t.Context(), strings.ReplaceAll(sql, "{s}", `"`+h.schema+`"`), args...)
		require.NoError(t, err)
	}
	const insert = `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position, saved_at, lost)
		SELECT $1, left($2, 249), gen_random_uuid(), n, 0, 7, $3, $4 FROM generate_series(0, 2) AS n`
	for i, at := range []string{"infinity", "-infinity", "20000-01-01", "4713-01-01 BC", "now"} {
		exec(insert, "poison", fmt.Sprint(i, hostileText), at, int64(math.MaxInt64))
		exec(insert, "poison", fmt.Sprint("less", i), at, int64(math.MinInt64))
	}
	exec(insert, left(hostileText, 255), "orders", "now", 0)
	exec(`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset) SELECT 'many', 'topic-' || n, gen_random_uuid(), 0, 0 FROM generate_series(1, 1000) AS n`)
	exec(insert, "stats", "orders", "now", 0)
	require.Equal(t, http.StatusNoContent, h.call("/api/consumers/pause", map[string]any{"group": "stats", "topic": "orders", "reason": "because"}).Code)

	page := h.get("/") + h.get("/consumers")
	require.NotContains(t, page, "<script>alert")
	require.NotContains(t, page, "<img src=x")
	require.Contains(t, page, "topics more")
	require.Contains(t, page, "Consumer group stats: orders paused by o.operator", "although its line is not shown")
	require.Less(t, len(page), 1<<20)
	var answer apiGroupList
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/consumers")), &answer))
	require.Len(t, answer.Groups, 4)
	require.Contains(t, h.get("/api/consumers"), `"lost":9223372036854775807`)
}

// A role that may write to event_member for one group can store any values there. The page and the API still show all
// groups.
func TestPoisonedMembers(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	exec := func(sql string, args ...any) error {
		_, err := h.db.Exec(t.Context(), strings.ReplaceAll(sql, "{s}", `"`+h.schema+`"`), args...)
		return err
	}
	const insert = `INSERT INTO {s}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes) VALUES ($1, $2, true, now(), '1 h', '{}')`
	for i, change := range testenv.PoisonedMembers {
		member := fmt.Sprint("poison", i)
		require.NoError(t, exec(insert, "poison", member))
		require.NoError(t, exec(`UPDATE {s}.event_member SET `+change+` WHERE member = $1`, member), change)
		require.Equal(t, http.StatusOK, h.send("operator", http.MethodGet, "/api/consumers", "", "").Code, change)
	}
	require.ErrorContains(t, exec(`UPDATE {s}.event_member SET renewed_every = '100000000 years'`), "event_member_renewed_every", "PostgreSQL cannot calculate with three of them")
	require.NoError(t, exec(insert, "stats", "host/1/x"))
	file := readOpenAPI(t)
	for _, path := range []string{"/consumers", "/overview", "/relays"} {
		h.checkAnswer(file, path, path)
	}
	h.checkPage("/")
	h.checkPage("/consumers")
	require.Contains(t, h.get("/consumers"), "host/1/x")
	require.NotContains(t, h.log.String(), "request failed")
}

// A group may have noted very many rows. A page and the API then read a part of them, say so, and
// show the other groups and everything that is paused.
func TestVeryManyGroupRows(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	exec := func(sql string) {
		_, err := h.db.Exec(t.Context(), strings.ReplaceAll(sql, "{s}", `"`+h.schema+`"`))
		require.NoError(t, err)
	}
	exec(`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
		SELECT g, 'topic-' || n, '00000000-0000-0000-0000-000000000001', 0, 0, 7 FROM unnest('{many,more}'::text[]) AS g, generate_series(1, 20000) AS n`)
	exec(`INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition, start_offset, position)
		SELECT g, 'orders', '00000000-0000-0000-0000-000000000001', n, 0, 7 FROM unnest('{a,z}'::text[]) AS g, generate_series(0, 2) AS n`)
	exec(`INSERT INTO {s}.consumer_pause (consumer_group, topic, operator, reason) VALUES ('many', 'topic-9999', 'kim', 'why'), ('z', '', 'kim', 'all')`)
	var answer apiGroupList
	body := h.get("/api/consumers")
	require.Less(t, len(body), 2<<20)
	require.NoError(t, json.Unmarshal([]byte(body), &answer))
	require.True(t, answer.More)
	require.Len(t, answer.Groups, 4)
	lines := 0
	for _, g := range answer.Groups {
		lines += len(g.Topics)
	}
	require.Less(t, lines, 10_001)
	require.Equal(t, 3, answer.Groups[3].Topics[0].Partitions)
	require.Equal(t, "all", answer.Groups[3].Pause.Reason)
	require.Contains(t, body, `"reason":"why"`)
	page := h.get("/")
	require.Contains(t, page, "Consumer group many: topic-9999 paused by kim")
	require.Contains(t, page, "There are more groups or partitions than this page reads")
}

func left(s string, n int) string { return s[:min(n, len(s))] }
