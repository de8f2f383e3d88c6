package faults

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// Logical replication brings rows of an outbox into another cluster's. With their
// transaction ids they would be sent again and again, or never: that is rejected, and
// PostgreSQL says by which constraint. Two ways are right: as new events, without their
// ids, and the whole schema, whose cursor is then rebased.
func TestReplicatedRows(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	const everyColumn = `FOR TABLE outbox`
	t.Run("with their transaction ids", func(t *testing.T) {
		t.Parallel()
		from, to := newReplica(t)
		from.commit(t, "on", 10)
		from.replicate(t, to, everyColumn)
		to.awaitLog(t, "outbox_xid_is_of_this_transaction")
		require.Zero(t, to.rows(t, "outbox"))
	})
	t.Run("as new events", func(t *testing.T) {
		t.Parallel()
		from, to := newReplica(t)
		if from.version(t) < 15 {
			return // a publication has no list of columns before
		}
		events := from.commit(t, "on", 10) // which the first copy brings
		from.replicate(t, to, `FOR TABLE outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, payload_bytes,
			content_type, topic, partition_key, headers, occurred_at) WITH (publish = 'insert')`)
		to.relay(t, slog.DiscardHandler)
		to.requireArrival(t, events)
		to.requireArrival(t, from.commit(t, "on", 10)) // and the changes
		require.Equal(t, 20, to.rows(t, "outbox"))
		to.awaitPolls(t)
		arrived, err := to.reader.Arrived()
		require.NoError(t, err)
		require.Len(t, arrived, 20, "each once")
	})
	t.Run("the whole schema", func(t *testing.T) {
		t.Parallel()
		from, to := newReplica(t)
		stop := from.relay(t, slog.DiscardHandler)
		from.requireArrival(t, from.commit(t, "on", 10))
		stop()
		rest := from.commit(t, "on", 10)
		to.exec(t, `ALTER DATABASE postgres SET outbox.keep_xid = 'on'`)
		from.replicate(t, to, `FOR TABLE outbox, outbox_cursor, outbox_failed`)
		rest = append(rest, from.commit(t, "on", 10)...)
		require.Eventually(t, func() bool {
			return to.rows(t, "outbox") == 30 && to.rows(t, "outbox_cursor") == from.rows(t, "outbox_cursor")
		}, testenv.Patience, 10*time.Millisecond)
		to.exec(t, `DROP SUBSCRIPTION copy`)
		to.exec(t, `ALTER DATABASE postgres RESET outbox.keep_xid`)
		to.exec(t, `SELECT setval('outbox_id_seq', 30), setval('outbox_cursor_id_seq', (SELECT max(id) FROM outbox_cursor))`)
		to.db.Reset()

		to.relay(t, slog.DiscardHandler)
		to.requireArrival(t, rest)
		to.requireArrival(t, to.commit(t, "on", 10))
		arrived, err := to.reader.Arrived()
		require.NoError(t, err)
		require.Len(t, arrived, 40, "each once")
	})
}

// newReplica returns a service whose rows can be replicated, and the same service with
// another, empty server.
func newReplica(t *testing.T) (from, to *site) {
	t.Helper()
	from = newSite(t)
	from.exec(t, `ALTER SYSTEM SET wal_level = 'logical'`)
	require.NoError(t, from.server.Restart(context.Background()))
	from.db.Reset()
	to = from.elsewhere(t, startServer(t, nil))
	to.open(t)
	to.topic, to.rec, to.reader = from.topic, from.rec, from.reader
	return from, to
}

// replicate makes a publication here and a subscription there.
func (s *site) replicate(t *testing.T, to *site, what string) {
	t.Helper()
	s.exec(t, `CREATE PUBLICATION copy `+what)
	to.exec(t, fmt.Sprintf(`CREATE SUBSCRIPTION copy CONNECTION '%s' PUBLICATION copy`, s.server.URL()))
	t.Cleanup(func() { // or the publisher would wait for it when it stops
		_, err := to.db.Exec(context.Background(), `DROP SUBSCRIPTION IF EXISTS copy`)
		require.NoError(t, err)
	})
}

func (s *site) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := s.db.Exec(context.Background(), sql)
	require.NoError(t, err, sql)
}

func (s *site) rows(t *testing.T, table string) (n int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(context.Background(), `SELECT count(*) FROM `+table).Scan(&n))
	return n
}

func (s *site) version(t *testing.T) (major int) {
	t.Helper()
	require.NoError(t, s.db.QueryRow(context.Background(), `SELECT current_setting('server_version_num')::int / 10000`).Scan(&major))
	return major
}

// awaitLog waits until the server has written something into its log.
func (s *site) awaitLog(t *testing.T, text string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(s.server.Tail(), text) }, testenv.Patience, 10*time.Millisecond)
}
