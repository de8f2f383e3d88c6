package outbox

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Of several sources with the same id in a batch, the first one has the key: what comes
// later may be taken back when the worker stops, and the note of the first has to stay,
// because the others are looked for behind it.
func TestFirstSourceHasTheKey(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	require.NoError(t, Migrate(t.Context(), db, MigrateConfig{Schema: schema}))
	s := newHandledStore(db, schema, "g")
	conn, err := db.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	for range 3 {
		keys := make([]handledKey, 500)
		for i := range keys {
			keys[i] = handledKey{"t", fmt.Sprint(i % 7), "a", fmt.Sprint("source ", rand.N(1_000_000), i)}
		}
		tx, fresh, err := s.begin(t.Context(), conn.Conn(), keys, false)
		require.NoError(t, err)
		require.Len(t, fresh, len(keys))
		var want []string
		for _, k := range keys[:7] { // they are done
			delete(fresh, k)
			want = append(want, k.source)
		}
		require.NoError(t, s.unmarkAll(t.Context(), tx.Own(), fresh))
		var left []string
		require.NoError(t, tx.Own().QueryRow(t.Context(), pg.InSchema(`SELECT array_agg(event_source ORDER BY aggregate_id) FROM {schema}.event_handled`, schema)).Scan(&left))
		require.Equal(t, want, left)
		tx.Rollback(t.Context())
	}
}
