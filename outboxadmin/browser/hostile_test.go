package browser

import (
	"testing"

	"github.com/outboxgo/outbox/outboxadmin/internal/seed"
	"github.com/stretchr/testify/require"
)

// What a writer puts into any column is text to a browser: no script, no image, no link of
// it, and nothing that the policy had to stop.
func TestHostileEvents(t *testing.T) {
	h := newAdminFixture(t, operator)
	const text = `"'><script>window.pwned = 1</script><img src=x onerror="window.pwned = 1"><svg/onload=window.pwned=1>`
	_, err := h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".outbox_failed SET event_type = left($1, 100), source = left($1, 100), aggregate_type = left($1, 100),
		aggregate_id = $1, topic = $1, partition_key = $1, parking_key = $1 || '/' || $1, last_error = $1, error_class = left($1, 40),
		headers = jsonb_build_object($1::text, $1::text), payload = jsonb_build_object($1::text, '</pre></textarea>' || $1::text)
		WHERE id = 1`, text)
	require.NoError(t, err)
	_, err = h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".outbox_audit SET operator = left($1, 100), reason = $1, parking_key = $1 || '/' || $1`, text)
	require.NoError(t, err)
	require.NoError(t, seed.Deliver(t.Context(), h.db, h.schema))
	_, err = h.db.Exec(t.Context(), `UPDATE "`+h.schema+`".event_delivery SET consumer_group = left($1, 100), action = left($1, 100), event_type = left($1, 100), stream = left($1, 100),
		aggregate_id = left($1, 200), last_error_code = left($1, 40), last_error_message = $1, payload = jsonb_build_object($1::text, '</pre></textarea>' || $1::text) WHERE id <= 5`, text)
	require.NoError(t, err)
	for _, path := range []string{"", "consumers", "failed?kind=delivery", "failed/delivery-1", "failed/resolve?kind=delivery", "failed?status=dead", "failed/event-1", "failed/retry?status=dead", "audit", "events?aggregate_id=%22%27%3E%3Cscript%3Ewindow.pwned%3D1%3C/script%3E"} {
		tab := h.open(t, path)
		require.Equal(t, "undefined", js[string](t, tab, `typeof window.pwned`), path)
		require.Equal(t, 1, js[int](t, tab, `document.scripts.length`), path)
		require.Zero(t, js[int](t, tab, `document.images.length`), path)
		require.Zero(t, js[int](t, tab, `[...document.querySelectorAll("*")].filter(e => [...e.attributes].some(a => a.name.startsWith("on"))).length`), path)
		require.Zero(t, js[int](t, tab, `[...document.links].filter(a => a.origin !== location.origin || !a.pathname.startsWith("/ops/outbox/")).length`), path)
		require.Equal(t, 1, js[int](t, tab, `document.querySelectorAll("main").length`), path)
	}
}
