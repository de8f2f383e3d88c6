package outboxadmin

import (
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What is paused stands on the overview, with who has done it and why, and in the audit.
func TestConsumerGroups(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	require.NotContains(t, h.get("/"), "Consumer groups")
	require.JSONEq(t, `{"groups": []}`, h.get("/api/consumers"))
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
	require.Contains(t, answer, `{"topic":"orders","partitions":3,`)
	page := h.get("/")
	require.Contains(t, page, "Consumer group stats: orders paused by o.operator now: the stock is counted")
	require.Contains(t, page, "Consumer group stats: all topics paused by o.operator now: a migration")
	require.Regexp(t, regexp.MustCompile(`(?s)Consumer groups.*>stats</span>.*>all topics</span>.*a migration.*>orders</span>.*the stock`), page)
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
