package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// Inspector reads the state of relays, recorded events and open transactions. It uses only the database, so
// any process may have one. It changes nothing. It is safe for concurrent use.
type Inspector struct {
	db       *pgxpool.Pool
	schema   string
	sql      inspectorSQL
	recorded reader // of outbox
	types    tables.TypeCounter

	searchFor time.Duration
}

// inspectorSQL are the statements of [Inspector], in their schema.
type inspectorSQL struct {
	relays, progress, transactions, topics, partitions string
	events, event, tail, tailRead, tailBare            string
	sent                                               string
	timeline                                           timelineSQL
}

// InspectorConfig names the schema of the tables, and limits payloads.
type InspectorConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// MaxRead bounds, in bytes, each read of a payload and of headers. A larger payload is [ErrUnreadable].
	// Zero means 104,857,600 (100 MiB).
	MaxRead int
}

// NewInspector returns an Inspector of db. It does no I/O. The caller closes db.
func NewInspector(db *pgxpool.Pool, cfg InspectorConfig) (*Inspector, error) {
	cfg.MaxRead = cmp.Or(cfg.MaxRead, maxRead)
	if err := errors.Join(checkDB(db, &cfg.Schema), check.NotNegative("MaxRead", cfg.MaxRead)); err != nil {
		return nil, fmt.Errorf("outbox: inspector config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Inspector{db: db, schema: cfg.Schema, recorded: newReader(db, cfg.Schema, "outbox", cfg.MaxRead), types: tables.NewTypeCounter(db, cfg.Schema), searchFor: searchFor, sql: inspectorSQL{
		relays: in(tables.SQLRelays), progress: in(sqlProgress), transactions: in(sqlTransactions), topics: in(sqlRecordedTopics),
		partitions: in(sqlPartitionSizes),
		events:     in(sqlEvents), event: in(sqlEvent), tail: in(sqlTail), tailRead: in(sqlTailRead), tailBare: in(sqlTailBare),
		sent: in(tables.SQLSent), timeline: newTimelineSQL(cfg.Schema),
	}}, nil
}

// Relays returns the relays of the schema, sorted by name: those that have a cursor or
// ever took a lease.
func (i *Inspector) Relays(ctx context.Context) ([]outbox.RelayStatus, error) {
	relays, err := tables.Relays(ctx, i.db, i.sql.relays)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect relays: %w", orNotMigrated(err))
	}
	all := make([]outbox.RelayStatus, len(relays))
	for n, r := range relays {
		all[n] = relayStatusOf(r)
	}
	return all, nil
}

func relayStatusOf(r tables.Relay) outbox.RelayStatus {
	s := outbox.RelayStatus{
		Name: r.Name, Holder: r.Holder, Epoch: r.Epoch, LeaseUntil: r.LeaseUntil, MovedAt: r.MovedAt, CursorTopic: r.CursorTopic, Transaction: r.Transaction,
		Pending: r.Pending, PendingMore: r.PendingMore, Oldest: r.Oldest,
		Waiting: r.Waiting, Failed: r.Failed, Parked: r.Parked, Dead: r.Dead, ParkedKeys: r.ParkedKeys, HeldKeys: r.HeldKeys,
	}
	if said := r.Said; said != nil {
		b, since := said.RelayBreaker()
		s.Said = &outbox.RelayState{At: said.At, KafkaAt: said.KafkaAt, Works: said.Works, Reasons: said.Reasons, Breaker: outbox.BreakerState(b), BreakerSince: since}
		for _, o := range said.Outages {
			s.Said.Outages = append(s.Said.Outages, outbox.Outage(o))
		}
	}
	return s
}

// Stale counts events that were recorded longer than after ago and are not finished, by relay or consumer
// group, status and type. They may be in outbox, in outbox_failed, or deliveries that are not done. Dead
// events are not counted. Oldest is the time at which the oldest event was recorded.
func (i *Inspector) Stale(ctx context.Context, after time.Duration) ([]outbox.EventCount, error) {
	var positions tables.Positions
	var counts []tables.EventCount
	clock, err := pg.ReadClock(ctx, i.db)
	if err == nil {
		positions, err = tables.ReadPositions(ctx, i.db, i.sql.relays)
	}
	if err == nil {
		of := tables.Owners{Relays: positions.Relays, Groups: positions.Workers, Deliveries: true}
		counts, err = i.types.Stale(ctx, clock.Now().Add(-after), of, tables.MaxCounted)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect what waits for too long: %w", orNotMigrated(err))
	}
	all := make([]outbox.EventCount, len(counts))
	for n, c := range counts {
		all[n] = outbox.EventCount(c)
	}
	return all, nil
}

// RelayProgress is the work of a relay in a span of time.
type RelayProgress struct {
	// At is the end of the span.
	At time.Time
	// Events is the number of ids by which the cursor moved. It is about the number of events, because
	// rolled back transactions leave gaps.
	Events int64
	// Latency is the time from the start of a transaction until its event was in Kafka and the cursor
	// behind it. It is measured for the last event of the span; 0 if it is unknown.
	Latency time.Duration
}

// sqlProgress reads the newest row of each span. Its highest_id may already be in earlier rows; the first
// of these rows has the time at which it was reached. The last column is the position of the relay at the
// beginning.
const sqlProgress = `
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

const (
	maxProgress = 10_000
	day         = 24 * time.Hour
)

// Progress returns the work of a relay in each step of time up to now, by the clock of the database, oldest first. It
// reads the history of the relay's cursor. The history becomes coarse after an hour, and is removed as
// [outbox.RetentionConfig] says. Step is at least 1 s, and there are at most 10,000 steps.
func (i *Inspector) Progress(ctx context.Context, relay string, since time.Time, step time.Duration) ([]RelayProgress, error) {
	if step < time.Second {
		return nil, fmt.Errorf("outbox: inspect progress: step is %v: at least 1 s", step)
	}
	clock, err := pg.ReadClock(ctx, i.db)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect progress: %w", err)
	}
	now := clock.Now()
	if now.Sub(since)/step > maxProgress {
		return nil, fmt.Errorf("outbox: inspect progress: %d steps of %v: at most %d", now.Sub(since)/step, step, maxProgress)
	}
	var all []RelayProgress
	err = pg.Query(ctx, i.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		var at time.Time
		var reached, began, highest int64
		var latency pgtype.Interval
		_, err := pgx.ForEachRow(rows, []any{&at, &reached, &latency, &began}, func() error {
			highest = max(highest, began)
			p := RelayProgress{At: at, Events: max(0, reached-highest)}
			highest = max(highest, reached)
			if latency.Valid {
				p.Latency = time.Duration(latency.Microseconds)*time.Microsecond + time.Duration(latency.Days)*day
			}
			all = append(all, p)
			return nil
		})
		return err
	}, i.sql.progress, relay, now.Add(-now.Sub(since).Truncate(step)), now, step)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect progress: %w", orNotMigrated(err))
	}
	return all, nil
}

// OpenTransaction is a transaction that has begun and not ended. Its own events wait for its commit; it
// does not delay other events. While it is open, PostgreSQL cannot clean up rows that were removed since:
// tables and their indexes grow.
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
       EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = a.pid AND l.relation = to_regclass({outbox})::oid AND l.mode = 'RowExclusiveLock'),
       CASE WHEN a.wait_event_type = 'Lock' THEN pg_blocking_pids(a.pid) END
  FROM pg_stat_activity AS a
 WHERE a.xact_start < clock_timestamp() - $1::interval AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
   AND (a.backend_xid IS NOT NULL OR a.backend_xmin IS NOT NULL OR a.state LIKE 'idle in transaction%')
 UNION ALL
SELECT 0, p.gid, p.database, p.owner, '', '', 'prepared', p.prepared, '',
       EXISTS (SELECT FROM pg_locks AS t JOIN pg_locks AS l USING (virtualtransaction)
                WHERE t.locktype = 'transactionid' AND t.transactionid = p.transaction AND t.pid IS NULL AND l.pid IS NULL
                  AND l.relation = to_regclass({outbox})::oid AND l.mode = 'RowExclusiveLock'),
       NULL
  FROM pg_prepared_xacts AS p
 WHERE p.prepared < clock_timestamp() - $1::interval
 ORDER BY 8`

// Transactions returns the transactions of the cluster that have been open for at least openFor, the oldest
// first.
func (i *Inspector) Transactions(ctx context.Context, openFor time.Duration) ([]OpenTransaction, error) {
	all, err := pg.Collect(ctx, i.db, pgx.RowToStructByPos[OpenTransaction], i.sql.transactions, openFor)
	if err != nil {
		return nil, fmt.Errorf("outbox: inspect transactions: %w", orNotMigrated(err))
	}
	return all, nil
}

// TablePartition is a part of a table outbox that is partitioned by ranges of ids.
type TablePartition struct {
	// Name of its table.
	Name string
	// First is its lowest id, and Behind its highest id plus one. If it has no bound, they are the smallest
	// and the largest int64.
	First, Behind int64
	// Bytes is its size on disk, with its indexes.
	Bytes int64
	// Current is set for the partition of the newest event. The partitions behind it are made in advance.
	Current bool
}

// sqlPartitionSizes takes for the newest event the last one of the transaction with the highest id. The highest id of
// a committed event may be below those of very many uncommitted events.
const sqlPartitionSizes = `
SELECT name, first, behind, bytes, coalesce(newest >= first AND newest < behind, false)
  FROM (SELECT c.relname::text AS name, pg_catalog.pg_total_relation_size(c.oid) AS bytes,
               coalesce(substring(e.bound FROM 'FROM \(''?(-?\d+)')::bigint, -9223372036854775808) AS first,
               coalesce(substring(e.bound FROM 'TO \(''?(-?\d+)')::bigint, 9223372036854775807) AS behind
          FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
         CROSS JOIN LATERAL pg_get_expr(c.relpartbound, c.oid) AS e (bound)
         WHERE i.inhparent = to_regclass({outbox})::oid AND e.bound <> 'DEFAULT') AS p,
       (SELECT (SELECT o.id FROM (SELECT '1'::xid8 AS bound, pg_current_snapshot() AS snapshot) AS b
                 CROSS JOIN LATERAL (` + tables.Gaps + ` ORDER BY before DESC) AS g
                 CROSS JOIN LATERAL (SELECT id FROM {schema}.outbox WHERE ` + tables.InGap + ` ORDER BY xid DESC, id DESC LIMIT 1) AS o
                 LIMIT 1) AS newest) AS o
 ORDER BY first`

// Partitions returns the partitions of outbox, in the order of their ids; none of a
// plain table.
func (i *Inspector) Partitions(ctx context.Context) ([]TablePartition, error) {
	rows, err := i.db.Query(ctx, i.sql.partitions)
	if err == nil {
		var all []TablePartition
		if all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[TablePartition]); err == nil {
			return all, nil
		}
	}
	return nil, fmt.Errorf("outbox: inspect partitions: %w", orNotMigrated(err))
}
