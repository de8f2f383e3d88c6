package outboxops

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// Cuts moves consumer groups from their workers to Kafka, and back, while all of them run. A cut is
// a point in the history of the database: workers handle the events on one side of it,
// a relay sends those on the other, each event once. It is safe for concurrent use.
//
// To Kafka: start the consumers of the groups, and a relay of a new name, which may be started before
// or after. ToKafka makes the cut, and keeps the relay waiting; the workers go on until they have
// handled what is in front of the cut. Await waits for that, and Finish lets the relay begin. Then stop the
// workers. Dead deliveries do not count: requeued ones are handled by workers only, while one runs.
//
// To PostgreSQL: start the workers of the groups. ToPostgres makes the cut, with which the relay stops; the
// consumers go on until they have handled what it has sent. Await waits for that, and Finish
// lets the workers begin. Then stop the consumers and the relay. All groups that read what the relay sends
// have to be moved together, or they get nothing any more.
type Cuts struct {
	db                                *pgxpool.Pool
	list, toKafka, toPostgres, finish string
}

// CutsConfig says where the tables are. It may be zero.
type CutsConfig struct {
	// Schema of the tables. Empty means public.
	Schema string
}

// NewCuts returns access to the groups in db. It does no I/O; closing db stays with the caller.
func NewCuts(db *pgxpool.Pool, cfg CutsConfig) (*Cuts, error) {
	if err := checkDB(db, &cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: cuts config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Cuts{db: db, list: in(sqlSubscriptions), toKafka: in(sqlCutToKafka), toPostgres: in(sqlCutToPostgres), finish: in(sqlFinishCut)}, nil
}

// SubscriptionState says from where a consumer group gets its events.
type SubscriptionState string

const (
	// SubscriptionActive groups get all events from their workers.
	SubscriptionActive SubscriptionState = "active"
	// SubscriptionLeaving groups get from their workers what is in front of the cut.
	SubscriptionLeaving SubscriptionState = "leaving"
	// SubscriptionLeft groups get their events from Kafka; workers finish what is open.
	SubscriptionLeft SubscriptionState = "left"
	// SubscriptionReturning groups get from Kafka what is in front of the cut; their workers wait.
	SubscriptionReturning SubscriptionState = "returning"
)

// Subscription is a consumer group for which a worker has run.
type Subscription struct {
	// Group is its name.
	Group string
	// State says from where it gets its events.
	State SubscriptionState
	// ChangedAt is since when.
	ChangedAt time.Time
	// Relay is that of the cut; empty for an active group.
	Relay string
	// Open is how many deliveries are not done and not dead, counted up to 10,000. Dead ones are
	// those that nobody has resolved, likewise.
	Open, Dead int64
}

const maxSubscriptionCount = 10_000

// sqlSubscriptions counts up to $1 rows of a group and kind.
const sqlSubscriptions = `
SELECT s.consumer_group, s.state, s.changed_at, coalesce(s.relay, ''),
       (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d WHERE d.consumer_group = s.consumer_group AND d.status = 'PROCESSING' LIMIT $1) AS r)
       + (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d
                                 WHERE d.consumer_group = s.consumer_group AND d.status IN ('PENDING', 'PARKED') AND d.resolution IS NULL LIMIT $1) AS r),
       (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d
                               WHERE d.consumer_group = s.consumer_group AND d.status = 'DEAD' AND d.resolution IS NULL LIMIT $1) AS r)
  FROM {schema}.event_subscription AS s
 ORDER BY s.consumer_group`

// List returns the groups for which workers have run, sorted by name.
func (c *Cuts) List(ctx context.Context) (all []Subscription, err error) {
	err = pg.Query(ctx, c.db, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Subscription, err error) {
			err = row.Scan(&s.Group, &s.State, &s.ChangedAt, &s.Relay, &s.Open, &s.Dead)
			s.Open, s.Dead = min(s.Open, maxSubscriptionCount), min(s.Dead, maxSubscriptionCount)
			return s, err
		})
		return err
	}, c.list, maxSubscriptionCount)
	if err != nil {
		return nil, fmt.Errorf("outbox: list subscriptions: %w", orNotMigrated(err))
	}
	return all, nil
}

const (
	sqlCutToKafka    = `SELECT {schema}.outbox_cut_to_kafka($1, $2, $3, $4)::text`
	sqlCutToPostgres = `SELECT {schema}.outbox_cut_to_postgres($1, $2, $3, $4)::text`
	sqlFinishCut     = `SELECT {schema}.outbox_finish_cut($1, $2, $3)::text`
)

// ToKafka cuts active groups off from their workers: these take the events up to this moment, and the
// relay begins behind it once Finish is called. The relay must be a new one.
func (c *Cuts) ToKafka(ctx context.Context, groups []string, relay string, why AuditInfo) error {
	return c.cut(ctx, "cut to Kafka", c.toKafka, groups, relay, why)
}

// ToPostgres ends a relay at this moment, and has the workers of groups begin behind it once
// Finish is called. Nothing may wait in outbox_failed that the relay would still send.
func (c *Cuts) ToPostgres(ctx context.Context, groups []string, relay string, why AuditInfo) error {
	return c.cut(ctx, "cut to PostgreSQL", c.toPostgres, groups, relay, why)
}

func (c *Cuts) cut(ctx context.Context, what, sql string, groups []string, relay string, why AuditInfo) error {
	var errs []error
	if len(groups) == 0 {
		errs = append(errs, fmt.Errorf("groups %w", outbox.ErrEmpty))
	}
	for _, g := range groups {
		if err := check.Text(g, maxGroup); err != nil {
			errs = append(errs, fmt.Errorf("group %.300q %w", g, err))
		}
	}
	if err := check.Text(relay, maxRelay); err != nil {
		errs = append(errs, fmt.Errorf("relay %.300q %w", relay, err))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("outbox: %s: %w", what, err)
	}
	if err := why.check(); err != nil {
		return err
	}
	return c.call(ctx, what, sql, groups, relay, why.Operator, why.Reason)
}

const (
	maxRelay = 100
)

// call calls a function under READ COMMITTED.
func (c *Cuts) call(ctx context.Context, what, sql string, args ...any) error {
	err := pgx.BeginTxFunc(ctx, c.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
	if err != nil {
		return fmt.Errorf("outbox: %s: %w", what, orNotMigrated(err))
	}
	return nil
}

// Finish lets the other side of the cut at a relay begin. Await says when.
func (c *Cuts) Finish(ctx context.Context, relay string, why AuditInfo) error {
	if err := why.check(); err != nil {
		return err
	}
	return c.call(ctx, "finish cut", c.finish, relay, why.Operator, why.Reason)
}

// CutProgress is what has to be handled in front of a cut.
type CutProgress struct {
	// Groups are those of the cut.
	Groups []Subscription
	// Records is how many records groups have still to read from Kafka.
	Records int64
}

// IsDone reports whether nothing has to be handled any more.
func (p CutProgress) IsDone() bool {
	for _, g := range p.Groups {
		if g.State == SubscriptionLeaving || g.State == SubscriptionLeft && g.Open > 0 {
			return false
		}
	}
	return p.Records == 0
}

// ErrNoCut says that there is no group with a cut at a relay.
var ErrNoCut = errors.New("outbox: there is no cut at this relay")

// Await waits until what is in front of the cut at a relay is handled, or ctx ends, and calls progress each
// second; nil is not called. It needs Kafka to see what returning groups have read.
func (c *Cuts) Await(ctx context.Context, opts []kgo.Opt, relay string, progress func(CutProgress)) error {
	client, err := kafka.NewClient(opts)
	if err != nil {
		return fmt.Errorf("outbox: await cut: %w", err)
	}
	defer client.Close()
	for {
		p, err := c.progress(ctx, client, relay)
		if err != nil {
			return fmt.Errorf("outbox: await cut: %w", err)
		}
		if progress != nil {
			progress(p)
		}
		if p.IsDone() {
			return nil
		}
		if wait.Sleep(ctx, time.Second); ctx.Err() != nil {
			return fmt.Errorf("outbox: await cut: %w", context.Cause(ctx))
		}
	}
}

func (c *Cuts) progress(ctx context.Context, client *kgo.Client, relay string) (p CutProgress, err error) {
	all, err := c.List(ctx)
	if err != nil {
		return p, err
	}
	for _, s := range all {
		if s.Relay != relay {
			continue
		}
		p.Groups = append(p.Groups, s)
		if s.State != SubscriptionReturning {
			continue
		}
		unread, err := unreadBy(ctx, client, s.Group)
		if err != nil {
			return p, err
		}
		p.Records += unread
	}
	if len(p.Groups) == 0 {
		return p, fmt.Errorf("%w: %s", ErrNoCut, relay)
	}
	return p, nil
}

// unreadBy returns how many records are behind the committed offsets of a group, in the partitions in
// which it has some.
func unreadBy(ctx context.Context, client *kgo.Client, group string) (records int64, err error) {
	committed, err := kafka.AllGroupOffsets(ctx, client, group)
	if err != nil {
		return 0, err
	}
	wanted := map[kafka.Partition]int64{}
	for p := range committed {
		wanted[p] = kafka.EndOffset
	}
	ends, err := kafka.ListOffsets(ctx, client, kafka.Uncommitted, wanted)
	if err != nil {
		return 0, err
	}
	for p, end := range ends {
		records += max(0, end-committed[p])
	}
	return records, nil
}
