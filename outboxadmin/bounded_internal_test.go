package outboxadmin

import (
	"encoding/json"
	"html"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/stretchr/testify/require"
)

// Numbers of rows that were read up to a limit have a plus on the pages, and a field in the API.
func TestBoundedNumbers(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	insert := strings.ReplaceAll(`
		INSERT INTO {s}.event_delivery (position, order_key, attempt_count, max_attempts, next_retry_at, created_at, updated_at, processed_at,
		       occurred_at, recorded_at, event_id, status, consumer_group, action, stream, event_type, source, aggregate_type, aggregate_id, content_type, payload, last_error_code, held)
		SELECT n, n, 0, 10, now(), now(), now(), CASE s WHEN 'DEAD' THEN now() END,
		       now(), now() - '1 h'::interval, gen_random_uuid(), s, $2::text, 'COUNT', 'orders', CASE n % 2 WHEN 0 THEN 'even' ELSE 'odd' END, 's', 'a', 'k', 'application/json', '{}',
		       CASE n % 2 WHEN 1 THEN 'timeout' END, s = 'DEAD' AND n % 4 = 0
		  FROM generate_series(1, $1::bigint) AS n, unnest('{PENDING,DEAD}'::text[]) AS s`, "{s}", pgx.Identifier{h.schema}.Sanitize())
	for group, n := range map[string]int{"bounded": outbox.MaxCounted + 10, "exact": 10} {
		_, err := h.db.Exec(t.Context(), insert, n, group)
		require.NoError(t, err)
	}

	page := html.UnescapeString(h.get("/consumers"))
	for _, words := range []string{`<dt>Held keys</dt><dd>2,500+</dd>`, `>5,000+<span class="hide"> Waiting</span>`, `>5,000+<span class="hide"> Failed</span>`, `>10,000+<span class="hide"> Dead</span>`,
		`<td data-label="Deliveries" class="num">10,000+</td><td data-label="Held" class="num">2,500+</td>`, `<td data-label="Deliveries" class="num">10,000+</td><td data-label="Held" class="num">0</td>`} {
		require.Contains(t, page, words)
	}
	require.Contains(t, html.UnescapeString(h.get("/")), `>10,000+</a></td><td data-label="To handle" class="num">10,000+</td>`)
	type bounded struct {
		Group string
		More  bool
	}
	var consumers struct{ Deliveries, Waiting []bounded }
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/consumers")), &consumers))
	var overview struct{ Stale []bounded }
	require.NoError(t, json.Unmarshal([]byte(h.get("/api/overview")), &overview))
	for _, all := range [][]bounded{consumers.Deliveries, consumers.Waiting, overview.Stale} {
		require.Contains(t, all, bounded{"bounded", true})
		require.Contains(t, all, bounded{"exact", false})
	}
}
