package worker

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A transaction that has recorded much and stays open does not delay a round of fan-out, which walked all of its rows.
func TestUncommittedRowsCostNothing(t *testing.T) {
	testenv.Long(t)
	// Not parallel: it counts the buffers that PostgreSQL touches.
	testenv.Direct(t) // prepared statements
	d, ctx := testenv.NewTables(t), context.Background()
	f := newFanOut(d.DB, d.Schema, "bank", []string{"a.b.c.v1"}, nil, 0, slog.New(slog.DiscardHandler), nil)
	require.NoError(t, f.begin(ctx, false))
	d.PassUncommitted(t, sqlFanOutSettings, func(snapshot string) []testenv.Statement {
		d.Exec(t, `
			INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
			SELECT 'worker:bank', 0, $1::text::pg_snapshot, 0, system_identifier, 1 FROM pg_control_system()`, snapshot)
		require.NoError(t, f.load(ctx, d.DB))
		require.Equal(t, snapshot, f.pos.Base)
		return []testenv.Statement{
			{Name: "load", Types: "(text)", SQL: f.cursors.SQLLoad, Args: "('worker:bank')"},
			{Name: "fan-out", Types: "(text, text, xid8, bigint, bigint, bigint, bigint, timestamptz, text, bigint, bigint, bigint, bigint, bool)", SQL: sqlFanOut,
				Args: fmt.Sprintf(`('worker:bank', '%s', '%s', %d, %d, %d, %d, '%s', 'bank', 0, 0, %d, 1, false)`, f.pos.Base, tables.SnapshotMax(f.pos.Base),
					maxFanOut+1, maxFanOutBytes, f.pos.CursorID, f.pos.Epoch, f.pos.Server.Format(time.RFC3339Nano), f.pos.SystemID)},
			{Name: "new group", Types: "(text, bool, bigint)", SQL: sqlSeedGroup, Args: "('worker:new', false, 1)"},
		}
	})
}
