package delivery

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// ErrLost means that another process has the row, because its lease had expired and the row was taken over.
// Then this process must not handle the rows behind it in its key. It releases them.
var ErrLost = errors.New("delivery is with another process")

// codeStale is the last_error_code of a row that was taken over.
const codeStale = "stale"

// Store reads and writes the deliveries of a group for one process.
type Store struct {
	db      *pgxpool.Pool
	waits   *pg.Waits // of the pool
	schema  string
	group   string
	process string       // begins the holder of each claim
	claims  atomic.Int64 // number of claims so far
	lease   time.Duration
	records bool // it is the store of a consumer, see ForRecords

	claimedUnseen atomic.Bool // a claim whose answer was lost may have claimed rows, see Dispatcher.releaseUnknown

	floors   floors
	yielded  yielded
	renewals renewals
	due      scanBounds[claimScan]
	expiring scanBounds[struct{}]

	sqlInsert, sqlClaim, sqlRemaining, sqlReadPayload, sqlOwn, sqlOthers, sqlBegin, sqlRenew, sqlExpired, sqlTakeOver     string
	sqlFinish, sqlLock, sqlLockRows, sqlFail, sqlRelease, sqlPromote, sqlPromoteBehind, sqlHeadless                       string
	sqlPark, sqlBlockedFromNow, sqlBlocked, sqlFollowers, sqlReplayed, sqlYieldHead, sqlRetryable, sqlRetryDead, sqlStrip string
	sqlPassIDs, sqlCheck, sqlCheckRecords, sqlSaveSuccesses, sqlWitness, sqlWaitsFor                                      string
	sqlRenewMember, sqlRemoveMember, sqlHandledElsewhere, sqlUnhandled, sqlForgetMembers                                  string
	sqlTakeDeadLetter, sqlDeadLetterTried, sqlDueAgain, sqlReleaseFree                                                    string
}

// NewStore returns a store for the deliveries of a group. Process is the name of this process, and lease
// the duration of claims and renewals.
func NewStore(db *pgxpool.Pool, schema, group, process string, lease time.Duration) *Store {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &Store{
		db: db, waits: pg.WaitsOf(db), schema: schema, group: group, process: process, lease: lease,
		due: scanBounds[claimScan]{share: 20, rare: time.Minute},
		// No row comes late here, because leases expire long after they are written.
		expiring: scanBounds[struct{}]{share: 100, rare: 10 * time.Minute},

		sqlInsert: in(sqlInsert), sqlClaim: in(sqlClaim), sqlRemaining: in(sqlRemaining), sqlReadPayload: in(sqlReadPayload),
		sqlOwn: in(sqlOwn), sqlOthers: in(sqlOthers), sqlBegin: in(sqlBegin), sqlRenew: in(sqlRenew), sqlExpired: in(sqlExpired),
		sqlTakeOver: in(sqlTakeOver), sqlFinish: in(sqlFinish), sqlLock: in(sqlLock), sqlLockRows: in(sqlLockRows),
		sqlFail: in(sqlFail), sqlRelease: in(sqlRelease), sqlReleaseFree: in(sqlReleaseFree), sqlPromote: in(sqlPromote), sqlHeadless: in(sqlHeadless),
		sqlPromoteBehind: in(sqlPromoteBehind), sqlPark: in(sqlPark), sqlBlockedFromNow: in(sqlBlockedFromNow),
		sqlBlocked: in(sqlBlocked), sqlFollowers: in(sqlFollowers), sqlReplayed: in(sqlReplayed), sqlYieldHead: in(sqlYieldHead),
		sqlRetryable: in(sqlRetryable), sqlRetryDead: in(sqlRetryDead),
		sqlRenewMember: in(sqlRenewMember), sqlRemoveMember: in(sqlRemoveMember), sqlHandledElsewhere: in(sqlHandledElsewhere),
		sqlUnhandled: in(tables.SQLUnhandled), sqlForgetMembers: in(sqlForgetMembers),
		sqlPassIDs: in(sqlPassIDs), sqlCheck: in(sqlCheck), sqlCheckRecords: in(sqlCheckRecords),
		sqlSaveSuccesses: in(sqlSaveSuccesses), sqlWitness: in(sqlWitness), sqlWaitsFor: in(sqlWaitsFor),
		sqlTakeDeadLetter: in(sqlTakeDeadLetter), sqlDeadLetterTried: in(sqlDeadLetterTried), sqlDueAgain: in(sqlDueAgain), sqlStrip: in(sqlStrip),
	}
}

// ForRecords makes the store one of a consumer, which inserts rows with [Store.Park].
func (s *Store) ForRecords() *Store {
	s.records, s.sqlCheck = true, s.sqlCheckRecords
	return s
}

// newHolder returns a holder for a new claim, which is locked_by in its rows. Each claim has its own,
// because a crash of PostgreSQL may forget the claim and the row: then the id is assigned again, and the
// same process may claim it.
func (s *Store) newHolder() string { return s.process + "/" + strconv.FormatInt(s.claims.Add(1), 10) }

// settings run before the other statements of a transaction.
const settings = pg.PlannerSettings + `, ` + pg.TextFormats + `, set_config('lock_timeout', '5s', true), set_config('idle_in_transaction_session_timeout', '10s', true), ` +
	pg.NoTransactionTimeout

// sqlCheck fails if the tables do not exist, or lack columns that this release needs.
const sqlCheck = `
SELECT d.id, d.order_key, d.held, d.dead_letter_owed, d.record, d.failed_at, m.reasons
  FROM {schema}.event_delivery AS d, {schema}.event_subscription AS s, {schema}.event_member AS m, {schema}.event_success AS w LIMIT 0`

// sqlCheckRecords is sqlCheck for a store of records, which needs no subscriptions.
const sqlCheckRecords = `
SELECT d.id, d.order_key, d.held, d.dead_letter_owed, d.record, d.failed_at, m.reasons
  FROM {schema}.event_delivery AS d, {schema}.event_member AS m, {schema}.event_success AS w LIMIT 0`

// Check returns an error if the tables cannot be used.
func (s *Store) Check(ctx context.Context) error {
	_, err := s.db.Exec(ctx, s.sqlCheck)
	return err
}

// Conditions of a row d of event_delivery, as its indexes have them. A head is a row for which the parked
// rows of its key wait. An open row is a head or parked.
const (
	head = `(d.status IN ('PENDING', 'PROCESSING') OR d.held)`
	open = `(d.status IN ('PENDING', 'PARKED', 'PROCESSING') OR d.held)`
)

// ofKey is the condition that a row d belongs to a key. It is a range. With an equation, PostgreSQL would
// conclude that the order of ids is also the order of keys and ids. If the table is empty while its
// statistics say otherwise, PostgreSQL would then choose the primary key. It would read all rows for as
// long as it keeps the plan.
func ofKey(key string) string { return `d.order_key >= ` + key + ` AND d.order_key <= ` + key }

// ofKeyFrom is the condition that a row d belongs to a key and that its id is not below one. See ofKey.
func ofKeyFrom(key, id string) string {
	return `(d.order_key, d.id) >= (` + key + `, ` + id + `) AND d.order_key <= ` + key
}

// transact runs statements in a transaction, in a single round trip.
func (s *Store) transact(ctx context.Context, queue func(*pgx.Batch)) error {
	return Transact(ctx, s.db, queue)
}

// transactAsync is transact for changes that a crash of PostgreSQL may forget. It does not wait for the
// disk. If the crash forgets the transaction, it also forgets all later commits.
func (s *Store) transactAsync(ctx context.Context, queue func(*pgx.Batch)) error {
	return s.transact(ctx, func(b *pgx.Batch) {
		b.Queue(`SELECT set_config('synchronous_commit', 'off', true)`)
		queue(b)
	})
}

// Transact runs statements in a READ COMMITTED transaction, in a single round trip, with the settings for
// statements on event_delivery. These statements take the ids of the rows that they change as an array,
// because PostgreSQL looks up each element in the primary key. With a join, a plan made for an empty table
// would read the whole table.
//
// The error is a [*pg.LockError] if a lock was not free in time.
func Transact(ctx context.Context, db *pgxpool.Pool, queue func(*pgx.Batch)) error {
	end := pg.WaitsOf(db).Begin()
	conn, err := pg.Acquire(ctx, db)
	if err != nil {
		return end(err)
	}
	defer conn.Release()
	return end(transactOn(ctx, conn, queue))
}

// transactOn is Transact on a connection or a pool.
func transactOn(ctx context.Context, db pg.BatchSender, queue func(*pgx.Batch)) error {
	var b pgx.Batch
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	b.Queue(settings)
	queue(&b)
	b.Queue("COMMIT")
	return db.SendBatch(ctx, &b).Close()
}

// affected returns the callback of a statement in a batch that notes how many rows it has affected.
func affected(rows *int64) func(pgconn.CommandTag) error {
	return func(tag pgconn.CommandTag) error {
		*rows = tag.RowsAffected()
		return nil
	}
}
