package outboxadmin

import (
	"net/http"
	"testing"

	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

// A group of workers has the plots of a relay, from the moves of its position. The backlog adds up events without a
// row and rows that wait.
func TestPlotsOfGroups(t *testing.T) {
	t.Parallel()
	h := newBusyFixture(t, nil)
	require.NoError(t, seed.Work(t.Context(), h.db, h.schema))
	handler, err := New(h.db, Config{Authorize: authorize, Schema: h.schema})
	require.NoError(t, err)
	h.handler = http.StripPrefix(prefix, handler)
	h.get("/consumers")
	page := h.get("/consumers?span=1h")
	require.Contains(t, page, `aria-current="true">1h</a>`)
	for _, words := range []string{`aria-label="Consumer group stats"`, `aria-label="Picked up: `, `aria-label="Time to pick up: `, `aria-label="Backlog: `, "PostgreSQL, active", "no worker has picked them up"} {
		require.Contains(t, page, words)
	}
	require.NotContains(t, page, `aria-label="Picked up: nothing known in this time"`)
	require.Contains(t, page, `<span>Lag</span>`, "of group mail, which reads from Kafka")
	require.Regexp(t, `"events":[1-9]\d*,"latency_ms":[1-9]`, h.get("/api/consumers/stats/progress"))
	require.Regexp(t, `"failed":3,"lag":null`, h.get("/api/consumers/stats/backlog"))
	samples := handler.(*admin).groupSamples.since("stats", noon)
	require.NotEmpty(t, samples)
	require.EqualValues(t, 3, samples[0].failed, "one failed and two wait")
}
