package delivery

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
)

// ErrLost means that a row is not with this worker any more: its lease had expired, and another
// worker has taken it. Then this worker must not handle what it has behind it: it gives the rows
// of the key back with Return.
var ErrLost = errors.New("delivery is with another worker")

// CodeStale is the last_error_code of a row whose worker was gone.
const CodeStale = "stale"

// Store reads and writes the deliveries of a group for one worker.
type Store struct {
	db      *pgxpool.Pool
	group   string
	worker  string
	claims  atomic.Int64 // that were made
	lease   time.Duration
	records bool // it claims what came from Kafka, and nothing else

	floors   floors
	due      bounds[looking]
	expiring bounds[struct{}]

	sqlInsert, sqlClaim, sqlLeft, sqlPrint, sqlFinish, sqlRenew, sqlReturn, sqlFail, sqlExpire, sqlStale, sqlLock, sqlLockRows, sqlPromote, sqlPromoteBehind, sqlHeadless, sqlLook, sqlMine,
	sqlPark, sqlLockShared, sqlOwed, sqlOthers, sqlReplayed, sqlGiveTurn, sqlLookRecords, sqlDeadFor, sqlRetryDead string
}

// NewStore returns the deliveries of a group for a worker, which has what it claims for the time of
// a lease.
func NewStore(db *pgxpool.Pool, schema, group, worker string, lease time.Duration) *Store {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &Store{
		db: db, group: group, worker: worker, lease: lease,
		due:       bounds[looking]{share: 20, rare: time.Minute},
		expiring:  bounds[struct{}]{share: 100, rare: 10 * time.Minute}, // none comes late: leases end long after they are written
		sqlInsert: in(sqlInsert), sqlClaim: in(sqlClaim), sqlLeft: in(sqlLeft), sqlPrint: in(sqlPrint), sqlFinish: in(sqlFinish), sqlRenew: in(sqlRenew), sqlReturn: in(sqlReturn),
		sqlFail: in(sqlFail), sqlExpire: in(sqlExpire), sqlStale: in(sqlStale), sqlLock: in(sqlLock), sqlLockRows: in(sqlLockRows), sqlPromote: in(sqlPromote), sqlPromoteBehind: in(sqlPromoteBehind), sqlHeadless: in(sqlHeadless), sqlLook: in(sqlLook), sqlLookRecords: in(sqlLookRecords), sqlMine: in(sqlMine),
		sqlPark: in(sqlPark), sqlLockShared: in(sqlLockShared), sqlOwed: in(sqlOwed), sqlOthers: in(sqlOthers), sqlReplayed: in(sqlReplayed), sqlGiveTurn: in(sqlGiveTurn), sqlDeadFor: in(sqlDeadFor), sqlRetryDead: in(sqlRetryDead),
	}
}

// ForRecords has the store claim what came from Kafka, which [Store.Park] has inserted, and nothing else. Without
// it, it claims the rest.
func (s *Store) ForRecords() *Store {
	s.records, s.sqlLook = true, s.sqlLookRecords
	return s
}

// newHolder returns what locked_by is in the rows of a claim. Each claim has its own, because a crash of
// PostgreSQL may forget a claim, and with it the row: then the id may be another row's, and be claimed by this
// worker again.
func (s *Store) newHolder() string { return s.worker + "/" + strconv.FormatInt(s.claims.Add(1), 10) }

// settings precede the statements of a transaction.
const settings = pg.PlannerSettings + `, set_config('lock_timeout', '5s', true), set_config('idle_in_transaction_session_timeout', '10s', true)`

// sqlLook fails if the tables do not exist, or are of an earlier release.
const sqlLook = `
SELECT d.id, d.order_key, d.held, d.record FROM {schema}.event_delivery AS d, {schema}.event_subscription AS s LIMIT 0`

// sqlLookRecords is sqlLook for what came from Kafka.
const sqlLookRecords = `SELECT d.id, d.order_key, d.held, d.record FROM {schema}.event_delivery AS d LIMIT 0`

// Check reports why the tables cannot be used.
func (s *Store) Check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.sqlLook)
	return err
}

// Conditions of rows d of event_delivery, and of their indexes: head, that parked rows of its key
// wait for it; open, that it is head or parked.
const (
	head = `(d.status IN ('PENDING', 'PROCESSING') OR d.held)`
	open = `(d.status IN ('PENDING', 'PARKED', 'PROCESSING') OR d.held)`
)

// ofKey is the condition that a row d is of a key, and ofKeyFrom that its id is not below one, too. They are ranges: of an equation
// PostgreSQL concludes that rows in the order of their ids are in that of their keys and ids. While the table is empty, and statistics
// say that it was not, it would read these by the primary key for as long as it keeps the plan, all of them.
func ofKey(key string) string { return `d.order_key >= ` + key + ` AND d.order_key <= ` + key }

func ofKeyFrom(key, id string) string {
	return `(d.order_key, d.id) >= (` + key + `, ` + id + `) AND d.order_key <= ` + key
}

// transact runs statements in a transaction, in a single round trip.
func (s *Store) transact(ctx context.Context, queue func(*pgx.Batch)) error {
	return Transact(ctx, s.db, queue)
}

// transactAsync is transact for what may be forgotten by a crash of PostgreSQL: it does not wait for the disk, and all
// that is committed later is forgotten with it.
func (s *Store) transactAsync(ctx context.Context, queue func(*pgx.Batch)) error {
	return s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(`SELECT set_config('synchronous_commit', 'off', true)`)
		queue(b)
	})
}

// Transact runs statements in a transaction of READ COMMITTED, in a single round trip, with the settings that
// the statements on event_delivery need. The ids of the rows that these change are an array, because each of its elements
// is looked up in the index of the primary key. In a join, a plan that was made for an empty table reads all of it.
func Transact(ctx context.Context, db *pgxpool.Pool, queue func(*pgx.Batch)) error {
	var b pgx.Batch
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	b.Queue(settings)
	queue(&b)
	b.Queue("COMMIT")
	return db.SendBatch(ctx, &b).Close()
}
