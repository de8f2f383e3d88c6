package cursor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
)

// A relay that sends exactly once has its position in Kafka: a record names a row of outbox_cursor, by id and
// token, and says how far the window of that row was sent. So that the two go together, each row is written with
// synchronous_commit, and the relay continues from a record only if its row is there: otherwise a failover has lost
// commits, and what was sent cannot be told from what was not. What the rows say besides the position goes into
// their columns as settings, so that all statements that write positions serve both modes.

var (
	// ErrMode means that the relay has to be configured for the mode of its position, or for another topic.
	ErrMode = errors.New("the relay is not configured as its position was written")
	// ErrDisagree means that the position in Kafka and the rows here do not belong together.
	ErrDisagree = errors.New("the cursor topic and PostgreSQL do not belong together")
)

// exactly is what a row says besides the position.
type exactly struct {
	topic     string
	confirmed Confirmed
	next      int64  // number of the next transaction
	token     string // of the row that was written last
}

// Confirmed is what Kafka has confirmed.
type Confirmed struct {
	// Batch is the number of the newest transaction. If it is 0 or less, there was none since the mode was turned on,
	// and the newest record in the topic had the number -Batch then.
	Batch int64
	Row   int64 // the newest row up to whose position everything is confirmed; 0: the row that is written
}

// UseTopic turns the mode on: the rows name a topic. The store then belongs to one goroutine at a time, but for
// reads of windows.
func (c *Store) UseTopic(topic string) { c.exactly = &exactly{topic: topic} }

// Confirm sets what the next rows say: what is confirmed, and the number of the next transaction.
func (c *Store) Confirm(now Confirmed, next int64) { c.exactly.confirmed, c.exactly.next = now, next }

// Token returns the token of the row that was written last.
func (c *Store) Token() string { return c.exactly.token }

// checkMode returns ErrMode if the position is in a topic that the relay does not use.
func (c *Store) checkMode(p Position) error {
	switch {
	case c.exactly == nil && p.Topic != "":
		return fmt.Errorf("%w: it sends exactly once, with the cursor topic %s; configure that topic, or end the mode with outbox relay --exactly-once %s --end-mode kafka", ErrMode, p.Topic, p.Topic)
	case c.exactly != nil && p.Topic != "" && p.Topic != c.exactly.topic:
		return fmt.Errorf("%w: its cursor topic is %s and not %s; configure that topic, or end the mode with outbox relay --exactly-once %s --end-mode kafka", ErrMode, p.Topic, c.exactly.topic, p.Topic)
	}
	return nil
}

// exactlySettings are SQLSettings for rows that have to be as durable as the events.
const exactlySettings = pg.PlannerSettings + `, set_config('synchronous_commit', 'on', true), set_config('outbox.cursor_topic', $1::text, true),
       set_config('outbox.token', $2::text, true), set_config('outbox.confirmed_batch', $3::text, true),
       set_config('outbox.confirmed_row', $4::text, true), set_config('outbox.batch', $5::text, true)`

// write runs a statement that may write a row of outbox_cursor.
func (c *Store) write(ctx context.Context, db pg.BatchSender, read func(pgx.Rows) error, sql string, args ...any) error {
	e := c.exactly
	if e == nil {
		return pg.Query(ctx, db, SQLSettings, read, sql, args...)
	}
	token := rand.Text()
	err := pg.QueryWith(ctx, db, exactlySettings, []any{e.topic, token, orEmpty(e.confirmed.Batch), orEmpty(e.confirmed.Row), orEmpty(e.next)}, read, sql, args...)
	if err == nil {
		e.token = token
	}
	return err
}

func orEmpty(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// Identity is [tables.Identity].
func (c *Store) Identity(ctx context.Context) (systemID int64, database string, err error) {
	return tables.Identity(ctx, c.db)
}

// sqlMode reads the newest row: its topic, and whether Kafka has confirmed a transaction since the relay uses the
// topic.
const sqlMode = `
SELECT coalesce(cursor_topic, ''), coalesce(batch, 0) FROM {schema}.outbox_cursor
 WHERE relay = $1::text ORDER BY id DESC LIMIT 1`

// HasBegun reports whether Kafka must have a record of the relay. The error may be ErrMode.
func (c *Store) HasBegun(ctx context.Context) (bool, error) {
	var p Position
	var batch int64
	err := pg.QueryRow(ctx, c.db, c.sqlMode, c.Relay).Scan(&p.Topic, &batch)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("load cursor: %w", err)
	}
	return p.Topic != "" && batch > 0, c.checkMode(p)
}

// InKafka is the newest record of a relay.
type InKafka struct {
	Number int64 // 0: there is none
	System int64 // cluster whose relay wrote it; 0: it does not say so
	Row    int64
	Token  string
	Last   int64
	Again  []int64
}

// sqlAgree reads the newest row of a relay, the row that it names as confirmed, whether a row with an id and a
// token is there, and whether any row is from a cluster. A row from another cluster has another meaning. A number below
// 0 is that of a record which was in the topic before the mode was turned on: the row that this record names may still
// be there.
const sqlAgree = `
SELECT n.id, n.system_identifier, coalesce(n.cursor_topic, '') <> '', greatest(n.batch, 0), greatest(-n.batch, 0), coalesce(n.confirmed, n.id), r.id,
       coalesce(r.system_identifier = n.system_identifier, false),
       EXISTS (SELECT FROM {schema}.outbox_cursor WHERE relay = $1::text AND system_identifier = $4)
  FROM (SELECT * FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1) AS n
  LEFT JOIN LATERAL (SELECT id, system_identifier FROM {schema}.outbox_cursor WHERE relay = $1::text AND id = $2 AND token = $3::text) AS r ON true`

// knownRow is what sqlAgree reads.
type knownRow struct {
	newest      int64 // row
	system      int64 // its cluster
	on          bool  // its position is in the topic
	batch       int64 // that Kafka had confirmed; 0: none since the mode was turned on
	before      int64 // number of the newest record then
	confirmed   int64 // row
	named       pgtype.Int8
	sameCluster bool // of the named row and the newest one
	fromThere   bool // a row is from the cluster of the record
}

func (c *Store) known(ctx context.Context, r InKafka) (k knownRow, err error) {
	err = pg.QueryRow(ctx, c.db, c.sqlAgree, c.Relay, r.Row, r.Token, r.System).
		Scan(&k.newest, &k.system, &k.on, &k.batch, &k.before, &k.confirmed, &k.named, &k.sameCluster, &k.fromThere)
	if err != nil {
		return k, fmt.Errorf("load cursor: %w", err)
	}
	return k, nil
}

// agreement says where a relay continues.
type agreement struct {
	newest int64
	from   int64 // row
	last   pgtype.Int8
	begins bool
}

const unknownSince = "; what was sent since then is not known here. See the page about exactly once for what to do"

// agree finds the row from which a relay continues.
func (c *Store) agree(ctx context.Context, r InKafka) (a agreement, err error) {
	k, err := c.known(ctx, r)
	if err != nil {
		return a, err
	}
	a.newest = k.newest
	a.begins = !k.on || k.batch == 0 && r.Number <= k.before // there was never a record since the mode was turned on
	if err := c.checkOwner(k, r, a.begins); err != nil {
		return a, err
	}
	switch named := k.named.Valid && k.sameCluster; {
	case a.begins:
		a.from = a.newest
	case r.Number < k.batch:
		return a, fmt.Errorf("%w: the newest record in %s is that of transaction %d, and Kafka had confirmed transaction %d: the topic was deleted, created again or truncated%s",
			ErrDisagree, c.exactly.topic, r.Number, k.batch, unknownSince)
	case named:
		a.from, a.last = r.Row, pgtype.Int8{Int64: r.Last, Valid: true}
	case r.Number == k.batch:
		a.from = k.confirmed
	case k.named.Valid:
		return a, fmt.Errorf("%w: the database was restored from another cluster, which has sent transaction %d, and only %d is known here%s",
			ErrDisagree, r.Number, max(k.batch, k.before), unknownSince)
	default:
		return a, c.lacksRow(r)
	}
	return a, nil
}

// checkOwner returns ErrDisagree if the newest record is one that this relay must not replace. That of another
// database, which has the same name in another cluster, has the same key: a relay goes on only from a record of a
// cluster that its rows come from, and begins only beside one of its own. And a relay that seems to begin has lost its
// rows of the mode if the record names a row that is newer than all here: the end of the mode writes a row behind it.
func (c *Store) checkOwner(k knownRow, r InKafka, begins bool) error {
	switch {
	case r.System != 0 && (!k.fromThere || begins && r.System != k.system):
		return fmt.Errorf("%w: the newest record of this relay in %s was written from cluster %d, and this database is in cluster %d: give each a cursor topic of its own",
			ErrDisagree, c.exactly.topic, r.System, k.system)
	case !k.on && r.Row > k.newest:
		return c.lacksRow(r)
	}
	return nil
}

func (c *Store) lacksRow(r InKafka) error {
	return fmt.Errorf("%w: PostgreSQL lacks row %d of outbox_cursor, which the newest record in %s names: a failover or a restore has lost commits%s",
		ErrDisagree, r.Row, c.exactly.topic, unknownSince)
}

// sqlContinue writes the row from which a relay continues. It removes the rows of outbox_failed of transactions
// that were aborted, above $7, and those of events that were sent again, $8. A relay that begins keeps them: their
// numbers were those of another time, and are removed. But of those above $7 the rows of events go that it reads again:
// a retrier would send these before the events that precede them. It waits for no row that another transaction has
// locked. It returns those of events that were sent again. The others are in the way, and it changes nothing: the
// session would park their events once more, in the same rows.
const sqlContinue = `
WITH newest AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_cursor WHERE relay = $1::text ORDER BY id DESC LIMIT 1
), held AS MATERIALIZED (
    SELECT l.epoch FROM newest,
           (SELECT epoch FROM {schema}.outbox_lease WHERE name = $1::text AND holder = $2::text AND epoch = $3 FOR SHARE) AS l
     WHERE newest.id = $4
), due AS MATERIALIZED (
    SELECT f.id, f.batch > $7 AND f.status <> 'resolved' AND (NOT $9::bool OR EXISTS (
           SELECT FROM {schema}.outbox AS o, {schema}.outbox_cursor AS s WHERE o.id = f.outbox_id AND s.id = $5 AND NOT ` + tables.Attempted + `)) AS goes
      FROM {schema}.outbox_failed AS f WHERE ` + rowsToChange + ` FOR UPDATE SKIP LOCKED
), blocks AS MATERIALIZED (
    SELECT f.id FROM {schema}.outbox_failed AS f WHERE ` + rowsToChange + ` AND f.id NOT IN (SELECT id FROM due)
), proof AS MATERIALIZED (
    SELECT epoch FROM held WHERE NOT EXISTS (SELECT FROM blocks)
), sent AS MATERIALIZED (
    SELECT f.id FROM {schema}.outbox_failed AS f
     WHERE f.id = ANY ($8::bigint[]) AND f.relay = $1::text AND f.status <> 'resolved' FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.outbox_failed
     WHERE id = ANY (ARRAY(SELECT id FROM due WHERE goes UNION ALL SELECT id FROM sent WHERE NOT $9::bool)) AND EXISTS (SELECT FROM proof)
), kept AS (
    UPDATE {schema}.outbox_failed SET batch = NULL
     WHERE id = ANY (ARRAY(SELECT id FROM due WHERE NOT goes)) AND EXISTS (SELECT FROM proof)
), written AS (
    INSERT INTO {schema}.outbox_cursor (relay, snapshot, window_snapshot, last_processed_id, highest_id, system_identifier, epoch)
    SELECT $1::text, c.snapshot, c.window_snapshot, coalesce($6::bigint, c.last_processed_id), greatest(c.highest_id, $6::bigint), c.system_identifier, proof.epoch
      FROM proof, {schema}.outbox_cursor AS c WHERE c.id = $5
    RETURNING id
)
SELECT coalesce((SELECT id FROM written), 0), ARRAY(SELECT id FROM blocks),
       coalesce(f.id, 0), coalesce(f.parking_key, ''), coalesce(f.outbox_id, 0), coalesce(f.event_id::text, '')
  FROM (SELECT) AS one
  LEFT JOIN LATERAL (SELECT id, parking_key, outbox_id, event_id FROM {schema}.outbox_failed
                      WHERE id = ANY ($8::bigint[]) AND relay = $1::text AND status <> 'resolved'
                        AND id NOT IN (SELECT id FROM sent) AND NOT $9::bool) AS f ON true`

// rowsToChange are the rows of aborted transactions, or all that have a number if the relay begins.
const rowsToChange = `f.relay = $1::text AND f.batch > CASE WHEN $9::bool THEN 0 ELSE $7::bigint END AND ($9 OR f.status <> 'resolved')`

// sqlLockedBy finds the sessions that have locked rows.
const sqlLockedBy = `
SELECT DISTINCT a.pid, coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(a.state, ''), a.xact_start
  FROM {schema}.outbox_failed AS f
  JOIN pg_locks AS l ON l.locktype = 'transactionid' AND l.granted AND l.transactionid = f.xmax
  JOIN pg_stat_activity AS a ON a.pid = l.pid
 WHERE f.id = ANY ($1::bigint[]) LIMIT 10`

// blockedBy returns the error of rows that another transaction has locked.
func (c *Store) blockedBy(ctx context.Context, rowIDs []int64) error {
	locked := &pg.LockError{Err: fmt.Errorf("continue: rows %v of outbox_failed have to be changed first", rowIDs)}
	err := c.query(ctx, func(rows pgx.Rows) error {
		var h pg.Holder
		_, err := pgx.ForEachRow(rows, h.Fields(), func() error {
			locked.Holders = append(locked.Holders, h)
			return nil
		})
		return err
	}, c.sqlLockedBy, rowIDs)
	if err != nil {
		return fmt.Errorf("look for the holder of a lock: %w", err)
	}
	return locked
}

// Continued says where a relay continues.
type Continued struct {
	Position Position
	// Begins is set if Kafka has never had a record since the mode was turned on. Then the position of PostgreSQL
	// counts.
	Begins bool
	// Locked are rows of events that were sent, which could not be removed. They have their keys and the ids of their
	// events.
	Locked []FailedRow
}

// Continue returns the position from which the relay continues, in a new row: that of the newest record in Kafka,
// which must have been read after both transactional ids were initialized. Errors that an operator has to end are
// ErrMode and ErrDisagree. ErrOtherCluster means that the cursors may be rebased. A [pg.LockError] names sessions that
// have locked rows: the caller tries again, and nothing is sent meanwhile.
func (c *Store) Continue(ctx context.Context, l *lease.Lease, r InKafka) (Continued, error) {
	_, err := c.Load(ctx, l)
	if err != nil && !errors.Is(err, ErrOtherCluster) {
		return Continued{}, err
	}
	a, aerr := c.agree(ctx, r)
	if aerr != nil {
		return Continued{}, aerr
	}
	if err != nil {
		return Continued{}, err
	}
	now := Confirmed{Batch: r.Number}
	if a.begins {
		now.Batch = -r.Number
	}
	c.Confirm(now, r.Number+1)
	return c.continueFrom(ctx, l, r, a)
}

func (c *Store) continueFrom(ctx context.Context, l *lease.Lease, r InKafka, a agreement) (now Continued, err error) {
	again := r.Again
	if again == nil {
		again = []int64{}
	}
	var id int64
	var blocks []int64
	var eventID string
	var locked FailedRow
	err = c.write(ctx, c.db, func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&id, &blocks, &locked.Row, &locked.Key, &locked.ID, &eventID}, func() error {
			if locked.EventID = []byte(eventID); locked.Row != 0 {
				now.Locked = append(now.Locked, locked)
			}
			return nil
		})
		return err
	}, c.sqlContinue, c.Relay, l.Holder, l.Epoch, a.newest, a.from, a.last, r.Number, again, a.begins)
	if err != nil {
		return Continued{}, fmt.Errorf("continue: %w", err)
	}
	if len(blocks) > 0 {
		return Continued{}, c.blockedBy(ctx, blocks)
	}
	if id == 0 {
		return Continued{}, lease.ErrLeaseLost
	}
	now.Begins = a.begins
	if now.Position, err = c.Newest(ctx, c.db); err == nil && now.Position.CursorID != id {
		err = ErrStale
	}
	return now, err
}

// SaveExactly is [Failed.SaveResults] in a transaction that also writes a row at a position, which it proves first.
// It returns the id of the row.
func (c *Store) SaveExactly(ctx context.Context, f *Failed, l *lease.Lease, p Position, results []RetryResult, keep bool) (saved Saved, id int64, err error) {
	err = pgx.BeginTxFunc(ctx, c.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if id, err = c.moveIn(ctx, tx, l, p, nil); err != nil {
			return err
		}
		saved, err = f.saveIn(ctx, tx, l, results, keep)
		return err
	})
	return saved, id, err
}

// plain returns a store that writes rows without the mode. The end of the mode may fail and be repeated, so c keeps it.
func (c *Store) plain() *Store { return NewStore(c.db, c.schema, c.Relay) }

// End turns the mode off at a position that Continue has returned: from now on the newest row is the position.
func (c *Store) End(ctx context.Context, l *lease.Lease, p Position) error {
	_, err := c.plain().Move(ctx, l, p, nil)
	return err
}

// EndUnread is End where the topic is lost: at the position that Kafka had confirmed as far as PostgreSQL knows.
// What was sent since then is sent again. That position may be one in another cluster: the next leader rebases it.
func (c *Store) EndUnread(ctx context.Context, l *lease.Lease) error {
	k, err := c.known(ctx, InKafka{})
	if err != nil {
		return err
	}
	_, err = c.plain().continueFrom(ctx, l, InKafka{Number: max(k.batch, k.before)}, agreement{newest: k.newest, from: k.confirmed, begins: true})
	if errors.Is(err, ErrOtherCluster) { // the row is written
		return nil
	}
	return err
}
