package itest

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Of several sources with the same id in a batch, the first one has the key: what comes
// later may be taken back when the worker stops, and the note of the first has to stay,
// because the others are looked for behind it.
func TestFirstSourceHasTheKey(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	for round := range 3 {
		group := fmt.Sprint("group ", round)
		keys := make([]handling.NoteKey, 500)
		for i := range keys {
			keys[i] = handling.NoteKey{
				AggregateType: "t", AggregateID: fmt.Sprint(i % 7), Action: "a", Source: fmt.Sprint("source ", rand.N(1_000_000), i),
			}
		}
		var want []string
		notes := handling.NewNotes(db, schema, group)
		require.NoError(t, notes.InTx(t.Context(), new(handling.Activity), keys, false, func(*pgx.Batch) {}, func(_ handling.Tx, fresh map[handling.NoteKey]bool) error {
			require.Len(t, fresh, len(keys))
			for _, k := range keys[:7] { // they are done
				delete(fresh, k)
				want = append(want, k.Source)
			}
			return nil
		}))
		var left []string
		sql := `SELECT array_agg(event_source ORDER BY aggregate_id) FROM {schema}.event_handled WHERE consumer_group = $1`
		require.NoError(t, db.QueryRow(t.Context(), pg.InSchema(sql, schema), group).Scan(&left))
		require.Equal(t, want, left)
	}
}
