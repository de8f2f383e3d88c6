package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// Inspector tells how relays stand, what is recorded, and which transactions are
// open, from the database alone: any process may have one. It changes nothing. It is
// safe for concurrent use.
type Inspector struct {
	db  *pgxpool.Pool
	sql inspectorSQL
}

// inspectorSQL are the statements of [Inspector], in their schema.
type inspectorSQL struct {
	relays, moves, transactions, topics, partitions string
	events, event, tail                             string
}

// InspectorConfig says where to look. It may be zero.
type InspectorConfig struct {
	// Schema of the tables. Empty means public.
	Schema string
}

// NewInspector returns a view of what is in db. It does no I/O; closing db stays
// with the caller.
func NewInspector(db *pgxpool.Pool, cfg InspectorConfig) (*Inspector, error) {
	cfg.Schema = cmp.Or(cfg.Schema, pg.DefaultSchema)
	err := check.Schema(cfg.Schema)
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: inspector config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Inspector{db: db, sql: inspectorSQL{
		relays: in(sqlRelays), moves: in(sqlMoves), transactions: in(sqlTransactions), topics: in(sqlRecordedTopics),
		partitions: in(sqlPartitionSizes),
		events:     in(sqlEvents), event: in(sqlEvent), tail: in(sqlTail),
	}}, nil
}

// RelayStatus is how a relay stands.
type RelayStatus struct {
	// Name of the relay.
	Name string
	// Holder is who leads: host, process id and a random part. Empty means nobody.
	Holder string
	// Epoch grows with every change of holder.
	Epoch int64
	// LeaseUntil is when the lease expires unless it is renewed, or when it did;
	// zero if it was given back, or never taken.
	LeaseUntil time.Time
	// MovedAt is when the cursor moved last; zero if it has no cursor yet.
	MovedAt time.Time

	// Pending is how many committed events it has not tried to send, counted up to
	// 100,000.
	Pending int64
	// PendingMore is set if there are more than Pending.
	PendingMore bool
	// Oldest is when the transaction of the first pending event began; zero if none is
	// pending. A transaction that was open for long makes it old at its commit.
	Oldest time.Time

	// Waiting, Failed, Parked and Dead are how many rows of outbox_failed have the
	// status.
	Waiting, Failed, Parked, Dead int64
	// ParkedKeys is how many keys wait, HeldKeys how many of them for an operator.
	ParkedKeys, HeldKeys int64
}

const maxPendingCount = 100_000

// sqlRelays takes its shape from sqlOpen, and is to be run under pg.PlannerSettings.
const sqlRelays = newestCursors + `, known AS MATERIALIZED (
    SELECT relay AS name FROM stands UNION SELECT name FROM {schema}.outbox_lease
)
SELECT n.name, CASE WHEN l.expires_at > clock_timestamp() THEN l.holder ELSE '' END, coalesce(l.epoch, 0),
       CASE WHEN isfinite(l.expires_at) THEN l.expires_at END, c.created_at, p.events,
       (SELECT created_at FROM {schema}.outbox WHERE id = p.first),
       f.waiting, f.failed, f.parked, f.dead, f.parked_keys, f.held_keys
  FROM known AS n
  LEFT JOIN {schema}.outbox_lease AS l ON l.name = n.name
  LEFT JOIN stands AS c ON c.relay = n.name
 CROSS JOIN LATERAL (
       SELECT count(*) AS events, min(id) AS first FROM (
             (SELECT id FROM {schema}.outbox
               WHERE xid >= pg_snapshot_xmax(c.snapshot) AND xid <= '18446744073709551615'::xid8
                 AND NOT coalesce(id <= c.last_processed_id AND pg_visible_in_snapshot(xid, c.window_snapshot), false)
               ORDER BY xid, id LIMIT $1)
               UNION ALL
              SELECT late.id FROM pg_snapshot_xip(c.snapshot) AS x
               CROSS JOIN LATERAL (SELECT id FROM {schema}.outbox
                                    WHERE xid >= x AND xid <= x
                                      AND NOT coalesce(id <= c.last_processed_id AND pg_visible_in_snapshot(xid, c.window_snapshot), false)
                                    ORDER BY xid, id LIMIT $1) AS late
       ) AS w) AS p
 CROSS JOIN LATERAL (
       SELECT count(*) FILTER (WHERE status = 'waiting') AS waiting, count(*) FILTER (WHERE status = 'failed') AS failed,
              count(*) FILTER (WHERE status = 'parked') AS parked, count(*) FILTER (WHERE status = 'dead') AS dead,
              count(DISTINCT parking_key) FILTER (WHERE status <> 'dead' OR held) AS parked_keys,
              count(DISTINCT parking_key) FILTER (WHERE held) AS held_keys
         FROM {schema}.outbox_failed WHERE relay = n.name AND status IN ('waiting', 'failed', 'parked', 'dead')) AS f
 ORDER BY n.name`

// Relays returns how the relays of the schema stand, sorted by name: those that have
// a cursor or ever took a lease.
func (i *Inspector) Relays(ctx context.Context) (all []RelayStatus, err error) {
	err = pg.Query(ctx, i.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		all, err = pgx.CollectRows(rows, scanRelay)
		return err
	}, i.sql.relays, maxPendingCount+1)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect relays: %w", err)
	}
	return all, nil
}

func scanRelay(row pgx.CollectableRow) (r RelayStatus, err error) {
	var until, moved, oldest pgtype.Timestamptz
	err = row.Scan(&r.Name, &r.Holder, &r.Epoch, &until, &moved, &r.Pending, &oldest,
		&r.Waiting, &r.Failed, &r.Parked, &r.Dead, &r.ParkedKeys, &r.HeldKeys)
	r.LeaseUntil, r.MovedAt, r.Oldest = until.Time, moved.Time, oldest.Time
	if r.Pending > maxPendingCount {
		r.Pending, r.PendingMore = maxPendingCount, true
	}
	return r, err
}

// Move is what a relay did in a span of time.
type Move struct {
	// At is the end of the span.
	At time.Time
	// Events is by how many ids the cursor moved: about the number of events, because
	// rolled back transactions leave gaps.
	Events int64
	// Latency is how long it was from the start of a transaction until its event was
	// in Kafka and the cursor behind it, of one event, the last of the span; 0 if
	// none is known.
	Latency time.Duration
}

// sqlMoves looks at the newest row of each span. Its highest_id may be that of rows
// before it; when that was reached is the time of the first of them. The last column is
// where the relay stood at the beginning.
const sqlMoves = `
SELECT g.at, coalesce(m.highest_id, 0), reached.created_at - (SELECT o.created_at FROM {schema}.outbox AS o WHERE o.id = m.highest_id),
       (SELECT coalesce((SELECT highest_id FROM {schema}.outbox_cursor WHERE relay = $1::text AND created_at <= $2::timestamptz
                          ORDER BY created_at DESC, id DESC LIMIT 1),
                        (SELECT highest_id FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY relay, id LIMIT 1), 0))
  FROM generate_series($2::timestamptz + $4::interval, $3::timestamptz, $4::interval) AS g (at)
  LEFT JOIN LATERAL (SELECT id, highest_id FROM {schema}.outbox_cursor
                      WHERE relay = $1::text AND created_at > g.at - $4::interval AND created_at <= g.at
                      ORDER BY created_at DESC, id DESC LIMIT 1) AS m ON true
  LEFT JOIN LATERAL (SELECT id FROM {schema}.outbox_cursor
                      WHERE relay = $1::text AND id <= m.id AND highest_id < m.highest_id
                      ORDER BY relay DESC, id DESC LIMIT 1) AS before ON true
  LEFT JOIN LATERAL (SELECT created_at FROM {schema}.outbox_cursor
                      WHERE relay = $1::text AND id > before.id ORDER BY relay, id LIMIT 1) AS first ON true
  LEFT JOIN LATERAL (SELECT first.created_at WHERE first.created_at > g.at - $4::interval) AS reached ON true
 ORDER BY g.at`

const maxMoves = 10_000

// Moves returns what a relay did in each step of time up to now, oldest first, from
// the history of its cursor, which becomes coarse after an hour and goes as
// [RetentionConfig] says. Step is at least 1 s, and there are at most 10,000.
func (i *Inspector) Moves(ctx context.Context, relay string, since time.Time, step time.Duration) ([]Move, error) {
	now := time.Now()
	switch {
	case step < time.Second:
		return nil, fmt.Errorf("outbox: inspect moves: step is %v: at least 1 s", step)
	case now.Sub(since)/step > maxMoves:
		return nil, fmt.Errorf("outbox: inspect moves: %d steps of %v: at most %d", now.Sub(since)/step, step, maxMoves)
	}
	var moves []Move
	err := pg.Query(ctx, i.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		var at time.Time
		var reached, began, highest int64
		var latency pgtype.Interval
		_, err := pgx.ForEachRow(rows, []any{&at, &reached, &latency, &began}, func() error {
			highest = max(highest, began)
			m := Move{At: at, Events: max(0, reached-highest)}
			highest = max(highest, reached)
			if latency.Valid {
				m.Latency = time.Duration(latency.Microseconds)*time.Microsecond + time.Duration(latency.Days)*day
			}
			moves = append(moves, m)
			return nil
		})
		return err
	}, i.sql.moves, relay, now.Add(-now.Sub(since).Truncate(step)), now, step)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect moves: %w", err)
	}
	return moves, nil
}

// OpenTransaction is a transaction that has begun and not ended. None delays the
// events of others. Its own wait for its commit, and while it is open PostgreSQL
// cannot clean up after it: tables and their indexes grow.
type OpenTransaction struct {
	// PID is the process of the server; 0 for a prepared transaction.
	PID int
	// Prepared is the name of a prepared transaction, else empty.
	Prepared string
	// Database, User, Application and Client say whose it is.
	Database, User, Application, Client string
	// State is active, idle in transaction, or prepared, for example.
	State string
	// Since is when it began.
	Since time.Time
	// Query is the statement that runs, or the last one, at most 1,000 characters; empty
	// where the role may not see it (grant it pg_read_all_stats).
	Query string
	// Recording is set if it writes to outbox: its events wait for its commit.
	Recording bool
	// WaitsFor are the processes that hold the locks that it waits for.
	WaitsFor []int32
}

const sqlTransactions = `
SELECT a.pid, '', coalesce(a.datname, ''), coalesce(a.usename, ''), coalesce(a.application_name, ''), coalesce(host(a.client_addr), ''),
       coalesce(a.state, ''), a.xact_start, coalesce(left(a.query, 1000), ''),
       EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND l.relation = to_regclass('{schema}.outbox') AND l.mode = 'RowExclusiveLock'),
       CASE WHEN a.wait_event_type = 'Lock' THEN pg_blocking_pids(a.pid) END
  FROM pg_stat_activity AS a
 WHERE a.xact_start < clock_timestamp() - $1::interval AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
   AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL OR a.state LIKE 'idle in transaction%')
 UNION ALL
SELECT 0, p.gid, p.database, p.owner, '', '', 'prepared', p.prepared, '',
       EXISTS (SELECT FROM pg_locks AS t JOIN pg_locks AS l USING (virtualtransaction)
                WHERE t.locktype = 'transactionid' AND t.transactionid = p.transaction AND t.pid IS NULL AND l.pid IS NULL
                  AND l.relation = to_regclass('{schema}.outbox') AND l.mode = 'RowExclusiveLock'),
       NULL
  FROM pg_prepared_xacts AS p
 WHERE p.prepared < clock_timestamp() - $1::interval
 ORDER BY 8`

// Transactions returns the transactions of the cluster that have been open for at
// least so long, the oldest first.
func (i *Inspector) Transactions(ctx context.Context, openFor time.Duration) ([]OpenTransaction, error) {
	rows, err := i.db.Query(ctx, i.sql.transactions, openFor)
	if err == nil {
		var all []OpenTransaction
		if all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[OpenTransaction]); err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("outbox: inspect transactions: %w", err)
}
