package worker

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// fanOut reads the events behind the cursor of a group and inserts their deliveries, in the transaction
// that moves the cursor. It belongs to the goroutine of the dispatcher, but for confirm.
//
// A group has no leader: each process locks the group for the transaction of a round. The lock must be
// taken before the statement that reads events, and that statement must be the first of the transaction
// that takes a transaction id. Then no transaction that its snapshot calls finished has a higher id, so a
// crash cannot give out such an id again. Therefore the lock is an advisory lock, and the transaction
// writes nothing before that statement.
//
// A row of the cursor is identified by its id and its epoch. Here an epoch is a random number, because
// there is no lease whose epoch could be used.
type fanOut struct {
	db        *pgxpool.Pool
	group     string
	cursors   *cursor.Store
	store     *delivery.Store
	plan      planFunc
	own       []string    // routes of this process
	seen      knownRoutes // own, and those of other processes
	routes    groupRoutes
	log       *slog.Logger
	lock      int64         // the advisory lock of the group
	unordered bool          // the workers of the group keep no order
	grace     time.Duration // for which a stop does not cut off a round, see [delivery.Rules.StopGrace]
	bare      bool          // PostgreSQL could not print a row: the next round reads no payloads

	subscribed time.Time // when begin has stored the routes of this process
	budget     int64     // bytes of payloads that the round under way may read

	pos     cursor.Position
	known   bool           // pos is the position that was read or written last
	unpaged cursor.Unpaged // ranges of the open window whose ids have not been read
	ids     cursor.IDSet   // ids of the open window that have not been read

	sqlLock, sqlSubscription, sqlSubscribe, sqlRoutes, sqlSeed string
	sqlOpen, sqlNext, sqlLeaveGroup, sqlForget                 string
}

// planFunc appends the deliveries that an event needs.
type planFunc = func(planned []delivery.New, e eventHead) []delivery.New

// eventHead has the columns of an event that decide its deliveries, and those that name it in a log line.
type eventHead struct {
	id                               int64
	eventType, topic, key, aggregate string
	eventID, aggregateType           string
}

// destination returns the topic to which a relay would send the event. A row that no Recorder has written
// may have a type without a topic.
func (e eventHead) destination() (string, error) {
	if e.topic != "" {
		return e.topic, nil
	}
	if !check.HasTopic(e.eventType) {
		return "", &envelope.FieldError{EventType: e.eventType, Index: -1, Field: "event_type", Err: check.ErrMalformed}
	}
	return check.TopicOf(e.eventType), nil
}

// recordKey returns the key of the record that a relay would send.
func (e eventHead) recordKey() string { return cmp.Or(e.key, e.aggregate) }

func newFanOut(
	db *pgxpool.Pool, schema, group string, own []string, store *delivery.Store, grace time.Duration, log *slog.Logger,
	plan planFunc,
) *fanOut {
	in := func(sql string) string { return pg.InSchema(sql, schema) }
	return &fanOut{
		db: db, group: group, cursors: cursor.NewStore(db, schema, tables.WorkerPrefix+group), store: store, plan: plan,
		own: own, log: log, lock: fanOutLock(schema, group), grace: grace,
		sqlLock: in(sqlFanOutLock), sqlSubscription: in(sqlSubscription), sqlSubscribe: in(sqlSubscribe), sqlRoutes: in(sqlRoutes),
		sqlSeed: in(sqlSeedGroup), sqlOpen: in(sqlFanOut), sqlNext: in(sqlFanOutNext),
		sqlLeaveGroup: in(sqlLeaveGroup), sqlForget: in(sqlForget),
	}
}

// fanOutLock returns the number of the advisory lock of a group.
func fanOutLock(schema, group string) int64 {
	sum := sha256.Sum256([]byte("outbox.event_subscription." + schema + "." + group))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// Limits of a round of fan-out: events, and their bytes by the column size.
const (
	maxFanOut      = 1000
	maxFanOutBytes = 16 << 20
)

// sqlFanOutSettings end the transaction of a process that is suspended while it has the lock. The commit
// does not wait for the disk: a crash that loses it loses everything that was committed later, too.
const sqlFanOutSettings = cursor.SQLSettings + `, ` + pg.TextFormats +
	`, set_config('lock_timeout', '10s', true), set_config('idle_in_transaction_session_timeout', '10s', true), ` + pg.NoTransactionTimeout

const (
	// sqlFanOutLock names the schema, by which [pg.Waits] finds statements.
	sqlFanOutLock   = `SELECT pg_advisory_xact_lock($1::bigint) /* {schema}.event_subscription */`
	sqlSubscription = `
SELECT (SELECT state FROM {schema}.event_subscription WHERE consumer_group = $1::text)`
)

// sqlSeedGroup inserts the first position of a group: before all transactions, or behind all transactions
// that have ended. highest_id is then the last id that was drawn: to find the highest id of a committed event,
// PostgreSQL would have to pass all uncommitted rows.
const sqlSeedGroup = `
INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
SELECT $1::text, 0, CASE WHEN $2::bool THEN '1:1:' ELSE pg_current_snapshot() END,
       CASE WHEN $2::bool THEN 0 ELSE coalesce((SELECT last_value FROM {schema}.outbox_id_seq WHERE is_called), 0) END,
       s.system_identifier, $3
  FROM pg_control_system() AS s
 WHERE NOT EXISTS (SELECT FROM {schema}.outbox_cursor WHERE relay = $1::text)`

// begin makes sure that the group has a position. A new group starts behind the events that exist, or with
// fromStart at the first event. A group whose position was lost starts at the first event too: no event may
// be skipped, and repeats are found in event_handled. The error is a noEventsError if the group gets none
// from outbox. Its routes are stored all the same, because the first worker that takes events once the group is
// back owes them to the handlers of all workers.
func (f *fanOut) begin(ctx context.Context, fromStart bool) error {
	const often = 30 * time.Second
	var state pgtype.Text
	moved := false
	err := f.transact(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if err := conn.QueryRow(ctx, f.sqlSubscription, f.group).Scan(&state); err != nil {
			return err
		}
		if moved = state.Valid && !getsEvents(state.String); moved && time.Since(f.subscribed) < often {
			return nil
		}
		if !moved {
			if _, err := conn.Exec(ctx, f.sqlSeed, f.cursors.Relay, fromStart || state.Valid, newEpoch()); err != nil {
				return err
			}
		}
		if err := f.subscribe(ctx, conn); err != nil {
			return err
		}
		f.subscribed = time.Now()
		return nil
	})
	if err == nil && moved {
		return &noEventsError{state.String}
	}
	return err
}

// confirm renews the routes of this process. Any goroutine may call it.
func (f *fanOut) confirm(ctx context.Context) error { return f.subscribe(ctx, f.db) }

func newEpoch() int64 { return rand.Int64N(1<<62) + 1 }

// noEventsError is the error of a group that gets no events from outbox. It has the state in event_subscription, or
// nothing if there is no row.
type noEventsError struct{ state string }

func (e *noEventsError) Error() string {
	return "consumer group gets no events from outbox, its state is " + e.state
}

// reason returns what Health says.
func (e *noEventsError) reason() string {
	switch e.state {
	case stateStarting:
		return "the group is starting: new events wait until outbox group start has ended, which makes the earlier deliveries"
	case stateReturning:
		return "the group comes back from Kafka: new events wait until its consumers have handled what Kafka has for them"
	}
	return "the group was moved to Kafka: only what was open is handled"
}

// States in event_subscription. A group gets events here in the first two.
const (
	stateActive    = "active"
	stateLeaving   = "leaving" // gets the events up to its cutover; the later ones come from Kafka
	stateLeft      = "left"
	stateReturning = "returning"
	stateStarting  = "starting"
)

func getsEvents(state string) bool { return state == stateActive || state == stateLeaving }

// transact calls do in a transaction that has the lock of the group, and commits.
func (f *fanOut) transact(ctx context.Context, do func(context.Context, *pgx.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, delivery.DispatchTimeout)
	defer cancel()
	conn, err := pg.Acquire(ctx, f.db)
	if err != nil {
		return err
	}
	defer conn.Release() // in a transaction, this closes the connection
	var b pgx.Batch
	f.queueBegin(&b)
	end := pg.WaitsOf(f.db).Begin()
	if err := end(conn.SendBatch(ctx, &b).Close()); err != nil {
		return err
	}
	if err := do(ctx, conn.Conn()); err != nil {
		_, _ = conn.Exec(ctx, "ROLLBACK") // without it, Release closes the connection
		return err
	}
	_, err = conn.Exec(ctx, "COMMIT")
	return err
}

// queueBegin queues the begin of a transaction that has the lock of the group.
func (f *fanOut) queueBegin(b *pgx.Batch) {
	b.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
	b.Queue(sqlFanOutSettings)
	b.Queue(f.sqlLock, f.lock)
}

// load reads the position of the group. The error is [cursor.ErrOtherCluster] if it comes from another
// cluster.
func (f *fanOut) load(ctx context.Context, db pg.BatchSender) error {
	ctx, cancel := context.WithTimeout(ctx, delivery.DispatchTimeout)
	defer cancel()
	pos, err := f.cursors.Newest(ctx, db)
	if err != nil {
		return err
	}
	f.moveTo(pos)
	return nil
}

// moveTo sets the position. If another process has gone on in the same window, the ids that were read of
// the window stay.
func (f *fanOut) moveTo(pos cursor.Position) {
	same := pos.Window != "" && pos.Window == f.pos.Window && pos.Base == f.pos.Base && pos.Last >= f.pos.Last
	f.pos, f.known = pos, true
	if same {
		f.ids.RemoveThrough(pos.Last)
		return
	}
	f.unpaged, f.ids = cursor.Unpaged{}, cursor.IDSet{}
	if pos.Window != "" {
		var err error
		if f.unpaged, err = cursor.UnpagedOf(pos); err != nil {
			f.known = false
		}
	}
}
