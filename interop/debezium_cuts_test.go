package interop

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

func (m *changeover) exec(sql string, args ...any) {
	m.Helper()
	_, err := m.db.Exec(context.Background(), sql, args...)
	require.NoError(m, err)
}

// slot makes the slot of a connector that the test plays.
func (m *changeover) slot() {
	m.Helper()
	m.exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, m.name)
	m.Cleanup(func() { m.exec(`SELECT pg_drop_replication_slot($1)`, m.name) })
}

// confirm plays a connector that confirms all there is.
func (m *changeover) confirm() {
	m.Helper()
	m.exec(`SELECT pg_logical_slot_get_binary_changes($1, NULL, NULL, 'proto_version', '1', 'publication_names', $2)`, m.name, m.publication)
}

func (m *changeover) commit(id string, version int64) {
	m.Helper()
	ctx := context.Background()
	require.NoError(m, pgx.BeginFunc(ctx, m.db, func(tx pgx.Tx) error { return m.record(ctx, tx, oracle.Event{ID: id, Key: "a", Version: version}) }))
}

// cutsAmongTables has a publication that names other tables as well: they go on, and the relay does not wait for
// them. One that has outbox in a way that no cut can take back is refused, and nothing is changed.
func cutsAmongTables(d *debezium) {
	m, ctx := newChangeover(d), context.Background()
	m.slot()
	m.exec(`CREATE TABLE "Shop".ledger (id bigserial, entry text)`)
	m.exec(`ALTER PUBLICATION shop_events ADD TABLES IN SCHEMA "Shop"`)
	require.ErrorIs(d, m.cuts.FromDebezium(ctx, m.cut, why), outboxops.ErrCutRefused, "Debezium would go on with outbox")
	m.exec(`ALTER PUBLICATION shop_events DROP TABLES IN SCHEMA "Shop"`)
	m.exec(`ALTER PUBLICATION shop_events ADD TABLE "Shop".ledger`)
	m.commit("before", 1)
	require.NoError(d, m.cuts.FromDebezium(ctx, m.cut, why))
	require.ErrorIs(d, m.cuts.BeginRelay(ctx, m.cut, why), outboxops.ErrCutRefused, "one event is not confirmed")
	m.confirm()
	m.exec(`INSERT INTO "Shop".ledger (entry) VALUES ('after'), ('the cut')`)
	require.NoError(d, m.cuts.BeginRelay(ctx, m.cut, why))
	m.relay()
	m.exec(`ALTER PUBLICATION shop_events ADD TABLES IN SCHEMA "Shop"`)
	require.ErrorIs(d, m.cuts.ToDebezium(ctx, m.cut, why), outboxops.ErrCutRefused, "it has the events already")
	m.exec(`ALTER PUBLICATION shop_events DROP TABLES IN SCHEMA "Shop"`)
	require.NoError(d, m.cuts.ToDebezium(ctx, m.cut, why))
}

// cutsAtOnce has several operators make the same cut, while transactions with savepoints, and prepared ones, are open.
func cutsAtOnce(d *debezium) {
	m, ctx := newChangeover(d), context.Background()
	m.slot()
	tx, err := d.db.Begin(ctx)
	require.NoError(d, err)
	point, err := tx.Begin(ctx)
	require.NoError(d, err)
	require.NoError(d, m.record(ctx, point, oracle.Event{ID: "undone", Key: "a", Version: 1}))
	require.NoError(d, point.Rollback(ctx))
	point, err = tx.Begin(ctx)
	require.NoError(d, err)
	require.NoError(d, m.record(ctx, point, oracle.Event{ID: "prepared", Key: "a", Version: 1}))
	require.NoError(d, point.Commit(ctx))
	_, err = tx.Exec(ctx, `PREPARE TRANSACTION '`+m.name+`'`)
	require.NoError(d, err)
	require.NoError(d, tx.Rollback(ctx))
	short, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
	defer cancel()
	require.ErrorContains(d, m.cuts.FromDebezium(short, m.cut, why), "lock timeout")
	m.exec(`COMMIT PREPARED '` + m.name + `'`)

	require.Equal(d, 1, m.atOnce(m.cuts.FromDebezium))
	require.ErrorContains(d, m.cuts.BeginRelay(ctx, m.cut, why), "has not confirmed 1 events")
	m.confirm()
	require.Equal(d, 1, m.atOnceOf(outboxops.ErrNoCut, m.cuts.BeginRelay))
	m.commit("relayed", 2)
	m.relay()
	require.Eventually(d, func() bool { return m.arrived.Has("relayed") }, testenv.Patience, 20*time.Millisecond)
	m.exec(`INSERT INTO "Shop".outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, headers, occurred_at,
			created_at, retry_count, last_error, error_class, status, relay, next_retry_at)
		SELECT id, 'Key/a', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, coalesce(topic, 't'), headers, occurred_at, created_at, 1, 'x', 'x', 'waiting', 'main', 'infinity'
		  FROM "Shop".outbox ORDER BY id DESC LIMIT 1`)
	err = m.cuts.ToDebezium(ctx, m.cut, why)
	require.ErrorIs(d, err, outboxops.ErrCutRefused)
	require.ErrorContains(d, err, "in outbox_failed that it still has to send")
	m.commit("after", 3)
	require.Eventually(d, func() bool {
		var n int
		require.NoError(d, m.db.QueryRow(ctx, `SELECT count(*) FROM "Shop".outbox_failed WHERE status = 'parked'`).Scan(&n))
		return n == 1 || m.arrived.Has("after")
	}, testenv.Patience, 20*time.Millisecond, "the relay goes on")
	m.exec(`DELETE FROM "Shop".outbox_failed`)
	require.Equal(d, 1, m.atOnceOf(outboxops.ErrCutRefused, m.cuts.ToDebezium))
	require.True(d, m.arrived.Has("relayed"))
	require.False(d, m.arrived.Has("prepared"), "it is Debezium's")
	p, err := m.cuts.DebeziumProgress(ctx, m.cut)
	require.NoError(d, err)
	require.Zero(d, p.Unconfirmed)
}

func (m *changeover) atOnce(move func(context.Context, outboxops.DebeziumCut, outboxops.AuditInfo) error) int {
	return m.atOnceOf(outboxops.ErrCutRefused, move)
}

// atOnceOf has four do the same, and returns how many did it. The others have to get an error.
func (m *changeover) atOnceOf(rejected error, move func(context.Context, outboxops.DebeziumCut, outboxops.AuditInfo) error) (done int) {
	m.Helper()
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() { errs[i] = move(context.Background(), m.cut, why) })
	}
	wg.Wait()
	for _, err := range errs {
		if err == nil {
			done++
		} else if !errors.Is(err, rejected) && !errors.Is(err, outboxops.ErrNoCut) {
			require.NoError(m, err)
		}
	}
	return done
}

// cutsWithoutRights has an operator who may make the cut, and cannot see whether Debezium has
// finished: nothing is cut then, since no process would send the later events.
func cutsWithoutRights(d *debezium) {
	m, ctx := newChangeover(d), context.Background()
	require.ErrorIs(d, m.cuts.FromDebezium(ctx, m.cut, why), outboxops.ErrCutRefused, "there is no slot")
	m.slot()
	role := m.name + "_operator"
	m.exec(`CREATE ROLE ` + role)
	m.Cleanup(func() { m.exec(`DROP OWNED BY ` + role + `; DROP ROLE ` + role) })
	m.exec(`GRANT USAGE ON SCHEMA "Shop" TO ` + role)
	m.exec(`GRANT EXECUTE ON FUNCTION "Shop".outbox_cut_from_debezium, "Shop".outbox_begin_relay, "Shop".outbox_cut_to_debezium TO ` + role)
	cfg := m.db.Config()
	cfg.ConnConfig.RuntimeParams["role"] = role
	db, err := pgxpool.NewWithConfig(ctx, cfg)
	require.NoError(d, err)
	defer db.Close()
	cuts, err := outboxops.NewCuts(db, outboxops.CutsConfig{Schema: m.schema})
	require.NoError(d, err)
	require.ErrorContains(d, cuts.FromDebezium(ctx, m.cut, why), "permission denied to use replication slots")
	require.ErrorIs(d, m.cuts.BeginRelay(ctx, m.cut, why), outboxops.ErrNoCut)
	m.exec(`ALTER ROLE ` + role + ` REPLICATION`)
	require.NoError(d, cuts.FromDebezium(ctx, m.cut, why))
	require.NoError(d, cuts.BeginRelay(ctx, m.cut, why))
	m.relay()
	require.NoError(d, cuts.ToDebezium(ctx, m.cut, why))
}
