package itest

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// A cut to Debezium counts what its relay has still to send while recording is blocked. Beside a transaction that is
// open for long, the many events that were sent since it began must not be read each time.
func TestPendingBesideAnOldTransaction(t *testing.T) {
	// Not parallel: it counts the buffers that PostgreSQL touches, and each transaction in progress adds some.
	testenv.Direct(t) // prepared statements
	h := newRelayFixture(t)
	old, err := h.db.Begin(background)
	require.NoError(t, err)
	defer old.Rollback(background)
	require.NoError(t, h.record(background, old, numbered("old", 1, 1)...))
	h.exec(t, `
		INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT gen_random_uuid(), 'test.oracle.happened.v1', 'test', 'Key', 'sent', '{}', 'application/json', now() FROM generate_series(1, 20000)`)
	at := func(window string, last int64) { // the relay has sent what is visible, or in a window up to an id
		h.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, window_snapshot, highest_id, system_identifier, epoch)
			SELECT 'default', $2, coalesce((SELECT snapshot FROM {s}.outbox_cursor WHERE $1 <> '' ORDER BY id DESC LIMIT 1), pg_current_snapshot()),
			       nullif($1, '')::pg_snapshot, 0, 0, 1`, window, last)
	}
	at("", 0)

	session, err := h.db.Acquire(background) // a new one would read the catalog first
	require.NoError(t, err)
	defer session.Release()
	pending := func() (n, buffers int) {
		var plan []byte
		sql := h.sql(`SELECT {s}.outbox_pending('default', 1000)`)
		require.NoError(t, session.QueryRow(background, "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+sql, pgx.QueryExecModeSimpleProtocol).Scan(&plan))
		var explained []struct {
			Plan struct {
				Hit  int `json:"Shared Hit Blocks"`
				Read int `json:"Shared Read Blocks"`
			}
		}
		require.NoError(t, json.Unmarshal(plan, &explained))
		require.NoError(t, session.QueryRow(background, sql).Scan(&n))
		return n, explained[0].Plan.Hit + explained[0].Plan.Read
	}
	pending() // what a session reads once
	n, buffers := pending()
	require.Zero(t, n)
	require.Less(t, buffers, 200, "20,000 events were sent since")

	require.NoError(t, old.Commit(background))
	h.commit(t, numbered("new", 1, 3)...)
	n, buffers = pending()
	require.Equal(t, 4, n, "the late event and three new ones")
	require.Less(t, buffers, 200)

	var window string
	var ids []int64
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT pg_current_snapshot()::text, array_agg(id ORDER BY id) FROM {s}.outbox WHERE aggregate_id IN ('old', 'new')`)).Scan(&window, &ids))
	for i, id := range append([]int64{0}, ids...) {
		at(window, id)
		n, _ = pending()
		require.Equal(t, len(ids)-i, n, "the window is drained up to id %d", id)
	}
	h.commit(t, numbered("newer", 1, 1)...)
	n, _ = pending()
	require.Equal(t, 1, n, "it is not of the window")
}
