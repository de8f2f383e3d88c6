package cursor_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A transaction that has recorded much and stays open does not delay the others. Each poll walked all of its
// rows, because the index on (xid, id) has them.
func TestUncommittedRowsCostNothing(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d, ctx := newFixture(t), context.Background()
	l, p := d.loaded(t)
	d.PassUncommitted(t, cursor.SQLSettings, func(snapshot string) []testenv.Statement {
		d.Exec(t, `
			INSERT INTO {schema}.outbox_cursor (last_processed_id, snapshot, highest_id, system_identifier, epoch)
			SELECT 0, $1::text::pg_snapshot, 0, system_identifier, $2 FROM pg_control_system()`, snapshot, l.Epoch)
		var err error
		p, err = d.cursors.Load(ctx, l)
		require.NoError(t, err)
		require.Equal(t, snapshot, p.Base)
		require.NoError(t, d.DB.QueryRow(ctx, `SELECT pg_current_snapshot()::text`).Scan(&p.Window))
		u, err := cursor.UnpagedOf(p)
		require.NoError(t, err)
		var first, last []string
		for _, r := range u.Ranges {
			first, last = append(first, strconv.FormatUint(r.First, 10)), append(last, strconv.FormatUint(r.Last, 10))
		}
		return []testenv.Statement{
			{Name: "load", Types: "(text)", SQL: d.cursors.SQLLoad, Args: "('default')"},
			{Name: "sequence", Types: "(text)", SQL: d.cursors.SQLSequence, Args: "('default')"},
			{Name: "poll", Types: "(text, text, bigint, bigint, pg_snapshot, xid8, bigint, bool, bigint, bigint, bigint, timestamptz, bigint, bigint, bigint, bigint, bytea)", SQL: d.cursors.SQLOpen,
				Args: fmt.Sprintf(`('default', '%s', %d, %d, '%s', '%s', 1000, false, %d, %d, %d, '%s', 1048576, %d, NULL, NULL, NULL)`, l.Holder, l.Epoch, p.CursorID, p.Base,
					tables.SnapshotMax(p.Base), p.Last, p.Highest, p.SystemID, p.Server.Format(time.RFC3339Nano), p.Epoch)},
			{Name: "page", Types: "(bigint, text, bigint, timestamptz, text[], text[], bigint, bigint, bigint, pg_snapshot)", SQL: d.cursors.SQLPage,
				Args: fmt.Sprintf(`(%d, 'default', %d, '%s', '{%s}', '{%s}', 0, 50000, 0, '%s')`, p.CursorID, p.Epoch, p.Server.Format(time.RFC3339Nano),
					strings.Join(first, ","), strings.Join(last, ","), p.Window)},
		}
	})
}
