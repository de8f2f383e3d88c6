package outboxops

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/pg"
)

// Cuts moves consumer groups from their workers to Kafka, and back, while all of them run. A cut is a point
// in the history of the database. Workers handle the events on one side of it, and a relay sends the events
// on the other side. The events behind the cut begin when all events before it are handled. Cuts is safe
// for concurrent use.
//
// To Kafka: start the consumers of the groups, and call ToKafka with a new relay. Then start the relay: it
// stands by. A new relay that starts before the call sends all events from the first, and ToKafka returns
// [ErrCutRefused]. The workers go on until they have handled the events in front of the cut. Await waits for
// that, and Finish lets the relay begin. Then stop the workers. Await does not wait for dead deliveries: if
// they are requeued afterwards, workers or consumers handle them, and the later events of their keys wait.
//
// To PostgreSQL: stop the relay, and call ToPostgres. Then start the workers of the groups: they wait,
// while the consumers go on until they have handled the records of the relay. Await waits for that, and
// Finish lets the workers begin. Then stop the consumers. If the relay is not stopped before, it repeats at
// most its batch in flight. Such repeats concern only handlers without a transaction.
//
// All groups that get their events from a relay are moved together. Cancel reverts a cut that is not
// finished.
//
// FromDebezium, BeginRelay and ToDebezium move between Debezium and a relay; consumers stay as they are.
type Cuts struct {
	db                                                *pgxpool.Pool
	list, topics, toKafka, toPostgres, finish, cancel string
	fromDebezium, toDebezium, beginRelay, unconfirmed string
}

// CutsConfig names the schema of the tables. It may be zero.
type CutsConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string
}

// NewCuts returns access to the groups in db. It does no I/O; closing db stays with the caller.
func NewCuts(db *pgxpool.Pool, cfg CutsConfig) (*Cuts, error) {
	if err := checkDB(db, &cfg.Schema); err != nil {
		return nil, fmt.Errorf("outbox: cuts config: %w", err)
	}
	in := func(sql string) string { return pg.InSchema(sql, cfg.Schema) }
	return &Cuts{
		db: db, list: in(sqlSubscriptions), topics: in(sqlTopicsOfGroup), toKafka: in(sqlCutToKafka), toPostgres: in(sqlCutToPostgres), finish: in(sqlFinishCut), cancel: in(sqlCancelCut),
		fromDebezium: in(sqlCutFromDebezium), toDebezium: in(sqlCutToDebezium), beginRelay: in(sqlBeginRelay), unconfirmed: in(sqlUnconfirmed),
	}, nil
}

// SubscriptionState is the source of a consumer group's events.
type SubscriptionState string

const (
	// SubscriptionActive groups get all events from their workers.
	SubscriptionActive SubscriptionState = "active"
	// SubscriptionLeaving groups get the events in front of the cut from their workers.
	SubscriptionLeaving SubscriptionState = "leaving"
	// SubscriptionLeft groups get their events from Kafka; workers finish open deliveries.
	SubscriptionLeft SubscriptionState = "left"
	// SubscriptionReturning groups get the events in front of the cut from Kafka; their workers
	// wait.
	SubscriptionReturning SubscriptionState = "returning"
	// SubscriptionStarting groups get the events of an archive first (outboxreplay.StartGroup); their workers
	// and consumers wait.
	SubscriptionStarting SubscriptionState = "starting"
)

// Subscription is a consumer group for which a worker has run, or that was moved to workers.
type Subscription struct {
	// Group is its name.
	Group string
	// State is the source of its events.
	State SubscriptionState
	// ChangedAt is since when.
	ChangedAt time.Time
	// Relay is the relay of the cut; empty for an active group.
	Relay string
	// Open is the number of deliveries that are not done and not dead. Dead is the number of dead
	// deliveries that are not resolved. Both are counted up to 10,000.
	Open, Dead int64
	// HasConsumer is set if consumers of the group have stored the offsets at which they begin to read, for each
	// handler that its workers have, or had until an hour before ChangedAt.
	HasConsumer bool
}

const maxSubscriptionCount = 10_000

// sqlSubscriptions counts up to $1 rows of a group and kind.
const sqlSubscriptions = `
SELECT s.consumer_group, s.state, s.changed_at, coalesce(s.relay, ''),
       (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d WHERE d.consumer_group = s.consumer_group AND d.status = 'PROCESSING' LIMIT $1) AS r)
       + (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d
                                 WHERE d.consumer_group = s.consumer_group AND d.status IN ('PENDING', 'PARKED') AND d.resolved_at IS NULL LIMIT $1) AS r),
       (SELECT count(*) FROM (SELECT FROM {schema}.event_delivery AS d
                               WHERE d.consumer_group = s.consumer_group AND d.status = 'DEAD' AND d.resolved_at IS NULL LIMIT $1) AS r),
       EXISTS (SELECT FROM {schema}.consumer_start AS c WHERE c.consumer_group = s.consumer_group)
       AND NOT EXISTS (SELECT FROM jsonb_each(s.routes) AS r (route, confirmed)
                        WHERE r.confirmed::numeric > extract(epoch FROM s.changed_at - interval '1 hour')
                          AND NOT (EXISTS (SELECT FROM {schema}.consumer_start AS c
                                            WHERE c.consumer_group = s.consumer_group AND c.topic = split_part(r.route, E'\n', 2))
                               AND EXISTS (SELECT FROM {schema}.consumer_handler AS h
                                            WHERE h.consumer_group = s.consumer_group AND h.event_type = split_part(r.route, E'\n', 1)
                                              AND h.topic = split_part(r.route, E'\n', 2) AND h.action = split_part(r.route, E'\n', 3))))
  FROM {schema}.event_subscription AS s
 ORDER BY s.consumer_group`

// List returns the groups for which workers have run, sorted by name.
func (c *Cuts) List(ctx context.Context) (all []Subscription, err error) {
	err = pg.Query(ctx, c.db, pg.PlannerSettings, func(rows pgx.Rows) (err error) {
		all, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (s Subscription, err error) {
			err = row.Scan(&s.Group, &s.State, &s.ChangedAt, &s.Relay, &s.Open, &s.Dead, &s.HasConsumer)
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
	sqlCutToKafka    = `SELECT {schema}.outbox_cut_to_kafka($1::text[], $2::text, $3::text, $4::text)::text`
	sqlCutToPostgres = `SELECT {schema}.outbox_cut_to_postgres($1::text[], $2::text, $3::text[], $4::text, $5::text)::text`
	sqlFinishCut     = `SELECT {schema}.outbox_finish_cut($1::text, $2::boolean, $3::text, $4::text)`
	sqlCancelCut     = `SELECT {schema}.outbox_cancel_cut($1::text, $2::text, $3::text)`
)

// ErrNoCut means that a relay has no cut: none was made, or it is finished or canceled.
var ErrNoCut = errors.New("there is no cut at this relay")

// ErrCutRefused means that the state of groups or a relay does not allow a cut, or that events in front of
// the cut are not handled yet. The text says which.
var ErrCutRefused = errors.New("the cut is refused")

// ToKafka cuts active groups off from their workers. The workers take the events up to this moment, and the
// relay begins behind it once Finish is called. The relay must be new, or its groups must have been moved
// back. The error is [ErrCutRefused] if groups or relay are in another state.
func (c *Cuts) ToKafka(ctx context.Context, groups []string, relay string, why AuditInfo) error {
	const what = "cut to Kafka"
	if err := checkCut(groups, relay); err != nil {
		return fmt.Errorf("outbox: %s: %w", what, err)
	}
	return c.call(ctx, what, c.toKafka, why, groups, relay)
}

// ToPostgres ends a relay at this moment. The workers of groups begin behind it once Finish is called.
// Groups must be all groups that get their events from the relay, even if no worker has run yet for some of
// them. Other groups of this database that read in Kafka get nothing any more, unless another relay sends too:
// behind must name them. Groups that keep their state elsewhere are not known here.
//
// The error is [ErrCutRefused] if a group is missing, or if outbox_failed has events that the relay would still
// send.
func (c *Cuts) ToPostgres(ctx context.Context, groups []string, relay string, behind []string, why AuditInfo) error {
	const what = "cut to PostgreSQL"
	if err := errors.Join(checkCut(groups, relay), checkGroups("leave behind: group", behind)); err != nil {
		return fmt.Errorf("outbox: %s: %w", what, err)
	}
	return c.call(ctx, what, c.toPostgres, why, groups, relay, behind)
}

func checkCut(groups []string, relay string) error {
	errs := []error{checkRelay(relay), checkGroups("group", groups)}
	if len(groups) == 0 {
		errs = append(errs, fmt.Errorf("groups %w", outbox.ErrEmpty))
	}
	return errors.Join(errs...)
}

func checkGroups(what string, groups []string) error {
	var errs []error
	for _, g := range groups {
		if err := check.Text(g, maxGroup); err != nil {
			errs = append(errs, fmt.Errorf("%s %.300q %w", what, g, err))
		}
	}
	return errors.Join(errs...)
}

const maxRelay = 100

func checkRelay(name string) error {
	if err := check.Text(name, maxRelay); err != nil {
		return fmt.Errorf("relay %.300q %w", name, err)
	}
	return nil
}

// cutSettings let a cut wait for the transactions in front of it. The functions set the other timeouts.
const cutSettings = `SELECT ` + pg.NoTransactionTimeout

// call calls a function with the audit behind its arguments.
func (c *Cuts) call(ctx context.Context, what, sql string, why AuditInfo, args ...any) error {
	if err := why.check(); err != nil {
		return err
	}
	err := pgx.BeginTxFunc(ctx, c.db, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, cutSettings); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql, append(args, why.Operator, why.Reason)...)
		return err
	})
	if err != nil {
		return fmt.Errorf("outbox: %s: %w", what, orNotMigrated(cutError(err)))
	}
	return nil
}

// notInPrerequisiteState is the code of the functions for a wrong state of a group, a relay or a failure.
const notInPrerequisiteState = "55000"

// cutError gives errors of the functions a name.
func cutError(err error) error {
	const (
		inUse            = "55006"
		undefinedObject  = "42704"
		invalidParameter = "22023"
	)
	switch pg.Code(err) {
	case notInPrerequisiteState, inUse, invalidParameter:
		return fmt.Errorf("%w: %w", ErrCutRefused, err)
	case undefinedObject:
		return fmt.Errorf("%w: %w", ErrNoCut, err)
	}
	return err
}

// Finish lets the other side of the cut at a relay begin, if the events in front of the cut are handled, and
// if consumers of leaving groups have begun to read, see [Subscription.HasConsumer].
// Otherwise the error is [ErrCutRefused]; it may be [ErrNoCut]. For returning groups it asks Kafka for
// their offsets; for other groups opts may be nil.
func (c *Cuts) Finish(ctx context.Context, opts []kgo.Opt, relay string, why AuditInfo) error {
	all, err := c.List(ctx)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(all, func(s Subscription) bool { return s.Relay == relay && s.State == SubscriptionReturning }) {
		if err := c.checkRead(ctx, opts, relay); err != nil {
			return err
		}
	}
	return c.call(ctx, "finish cut", c.finish, why, relay, false)
}

// checkRead checks that returning groups have read their records in Kafka. It waits a little for offsets to
// be committed, because other producers may write to the topics too.
func (c *Cuts) checkRead(ctx context.Context, opts []kgo.Opt, relay string) error {
	look, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	unread := int64(-1)
	err := c.Await(look, opts, relay, func(p CutProgress) { unread = p.Unread() })
	if err != nil && ctx.Err() == nil && look.Err() != nil && unread > 0 {
		return fmt.Errorf("outbox: finish cut: %w: consumers have still to read %d records", ErrCutRefused, unread)
	}
	return err
}

// FinishEarly is Finish without some of its checks: it ignores open deliveries and unread records in front
// of the cut, and does not require that consumers have begun. The order of their keys is not kept then.
// Workers must still have taken all events in front of the cut.
func (c *Cuts) FinishEarly(ctx context.Context, relay string, why AuditInfo) error {
	return c.call(ctx, "finish cut", c.finish, why, relay, true)
}

// Cancel reverts a cut that is not finished: the groups continue as before the cut. No event is lost, and
// none comes from the other side. After a cut to Kafka, the relay keeps standing by, even if it is started
// later, until ToKafka names it again. After a cut to PostgreSQL, the relay continues. The error may be
// [ErrNoCut].
func (c *Cuts) Cancel(ctx context.Context, relay string, why AuditInfo) error {
	if err := checkRelay(relay); err != nil {
		return fmt.Errorf("outbox: cancel cut: %w", err)
	}
	return c.call(ctx, "cancel cut", c.cancel, why, relay)
}
