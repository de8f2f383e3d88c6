package outboxtest

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

var leftTests = []struct {
	name string
	// change is SQL over the events 1, 2 and 3, of which 1 and 2 were committed
	// before the call. before, first and second are the snapshots around them.
	change string
	want   []int64
}{
	{"no cursor", ``, []int64{1, 2}},
	{"nothing attempted", cursor(`('default', :before, NULL, 0)`), []int64{1, 2}},
	{"one attempted", cursor(`('default', :first, NULL, 1)`), []int64{2}},
	{"all attempted", cursor(`('default', :second, NULL, 2)`), nil},
	{"a window is open", cursor(`('default', :before, :second, 0)`), []int64{1, 2}},
	{"a window is half drained", cursor(`('default', :before, :second, 1)`), []int64{2}},
	{"a window is drained", cursor(`('default', :before, :second, 2)`), nil},
	{"a window beyond", cursor(`('default', :before, pg_current_snapshot(), 2)`), nil},
	{"a window of fewer with higher ids", cursor(`('default', :before, :first, 9)`), []int64{2}},
	{"the newest rules", cursor(`('default', :second, NULL, 2), ('default', :first, NULL, 2)`), []int64{2}},
	{"another relay's", cursor(`('other', :second, NULL, 2)`), []int64{1, 2}},
	{"another cluster's", cursor(`('default', :second, NULL, 2)`) + `UPDATE outbox_cursor SET system_identifier = 1`, []int64{1, 2}},
	{"another cluster's behind ours", cursor(`('default', :second, NULL, 2), ('default', :second, NULL, 2)`) +
		`UPDATE outbox_cursor SET system_identifier = 1 WHERE id = (SELECT max(id) FROM outbox_cursor)`, []int64{1, 2}},

	{"waiting", attempted + `UPDATE outbox_failed SET status = 'waiting' WHERE outbox_id = 2`, []int64{2}},
	{"failed", attempted + `UPDATE outbox_failed SET status = 'failed' WHERE outbox_id = 2`, []int64{2}},
	{"parked", attempted + `UPDATE outbox_failed SET status = 'parked' WHERE outbox_id = 2`, []int64{2}},
	{"dead comes first", attempted + `UPDATE outbox_failed SET status = CASE outbox_id WHEN 2 THEN 'dead' ELSE 'parked' END`, []int64{2, 1}},
	{"resolved", attempted, nil},
	{"failed for another relay", attempted + `UPDATE outbox_failed SET status = 'failed', relay = 'other'`, nil},
	{"failed and committed later", attempted + `UPDATE outbox_failed SET status = 'failed' WHERE outbox_id = 3`, nil},
	{"failed and purged", attempted + `UPDATE outbox_failed SET status = 'failed'; DELETE FROM outbox`, []int64{1, 2, 3}},
	{"purged", `DELETE FROM outbox`, nil},
}

// cursor returns SQL that inserts rows (relay, snapshot, window_snapshot,
// last_processed_id).
func cursor(values string) string {
	return `
INSERT INTO outbox_cursor (relay, snapshot, window_snapshot, last_processed_id, system_identifier, highest_id, epoch)
SELECT v.relay, v.snapshot::pg_snapshot, v.window_snapshot::pg_snapshot, v.last, s.system_identifier, 0, 1
  FROM pg_control_system() AS s, (VALUES ` + values + `) AS v (relay, snapshot, window_snapshot, last);
`
}

// attempted leaves all events behind the cursor, and in outbox_failed.
var attempted = cursor(`('default', pg_current_snapshot(), NULL, 3)`) + `
INSERT INTO outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id,
       payload, content_type, occurred_at, created_at, status)
SELECT id, 't/k', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, created_at, 'resolved'
  FROM outbox;
`

// What is left is what a relay means by its cursor and by outbox_failed.
func TestLeft(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	for _, tt := range leftTests {
		t.Run(tt.name, func(t *testing.T) {
			testenv.Direct(t) // a setting of a session
			ctx := context.Background()
			db, schema := testenv.Schema(t)
			require.NoError(t, outbox.Migrate(ctx, db, outbox.MigrateConfig{Schema: schema}))
			conn, err := db.Acquire(ctx)
			require.NoError(t, err)
			defer conn.Release()
			do := func(sql string) {
				_, err := conn.Conn().PgConn().Exec(ctx, sql).ReadAll()
				require.NoError(t, err)
			}
			do(`SET search_path = ` + pgx.Identifier{schema}.Sanitize())
			defer do(`RESET search_path`)
			snapshot := func() string {
				b, err := newBacklog(ctx, db, outbox.RelayConfig{Schema: schema})
				require.NoError(t, err)
				return "'" + b.until + "'"
			}
			event := func() {
				do(`INSERT INTO outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
					VALUES (gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', now())`)
			}
			before := snapshot()
			event()
			first := snapshot()
			event()
			b, err := newBacklog(ctx, db, outbox.RelayConfig{Schema: schema})
			require.NoError(t, err)
			event()
			do(strings.NewReplacer(":before", before, ":first", first, ":second", "'"+b.until+"'").Replace(tt.change))
			left, err := b.left(ctx, nil)
			require.NoError(t, err)
			var ids []int64
			for _, p := range left {
				ids = append(ids, p.id)
			}
			require.Equal(t, tt.want, ids)
		})
	}
}
