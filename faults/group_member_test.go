package faults

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxsql"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// memberVar makes this test's program a member of a consumer group: it holds a
// memberSpec as JSON.
const memberVar = "OUTBOX_FAULTS_MEMBER"

// memberSpec says how a member reaches the servers and what it does.
type memberSpec struct {
	Postgres string
	Brokers  []string
	KafkaVia string // where connections to any of them really go
	Topic    string
	Group    string
	Balancer string // see -faults.balancer
	// Session is the session timeout; 0 means the default of this and of other times.
	Session time.Duration
	// Retry is how likes are tried again, see failures.
	Retry outbox.RetryPolicy
	Diary string // the file that says what it has seen
}

// runMember is the whole life of a member.
func runMember(value string) error {
	var s memberSpec
	return runAsChild(memberVar, value, &s, &s.Postgres, s.run)
}

func (s *memberSpec) run(ctx context.Context, db *pgxpool.Pool) error {
	d, err := openDiary(s.Diary)
	if err != nil {
		return err
	}
	events, err := shopEvents(s.Topic)
	if err != nil {
		return err
	}
	consumer, err := outbox.NewConsumer(db, s.kafkaOpts(d), events, s.Group, s.config(d),
		outbox.OncePer(outbox.Handle("SALES_COUNT_INCREASED", addSale),
			func(e orderPaid, _ outbox.Metadata) (string, string) { return "Order", e.Order }),
		outbox.OncePer(outboxsql.HandleBatch(viewAction, addViews),
			func(e productViewed, m outbox.Metadata) (string, string) {
				return "ProductView", e.Product + "_" + m.ID
			}),
		outbox.WithRetry(outboxsql.Handle(likeAction, addLike), s.Retry),
		outbox.HandleNoTx("ORDER_SEEN", see[orderPaid](d)),
		outbox.HandleNoTx("VIEW_SEEN", see[productViewed](d)),
		outbox.HandleNoTx("LIKE_SEEN", see[productLiked](d)),
	)
	if err != nil {
		return err
	}
	asked := make(chan time.Time, 1) // when it was told to end
	context.AfterFunc(ctx, func() { asked <- time.Now() })
	if err := consumer.Run(ctx); err != nil {
		return err
	}
	return d.note("stopped %d", time.Since(<-asked).Milliseconds())
}

// config makes polls small, so that a member is mostly in a transaction. Waits are short,
// unless the defaults are to be kept, and the longest handling is longer than anybody is
// frozen. A new group begins at the end, which would be seen if a partition that is not
// new to the group began there.
func (s memberSpec) config(d *diary) outbox.ConsumerConfig {
	cfg := outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{
			Retry: outbox.RetryPolicy{RetryWait: 5 * time.Millisecond},
			Hooks: outbox.ConsumerHooks{
				Repeated: func(outbox.Metadata, string) { d.must("skipped") },
				Conflicted: func(_ outbox.Metadata, _ string, err error) {
					if isSerializationFailure(err) {
						d.must("conflict")
					}
				},
				Failed: func(m outbox.Metadata, action string, err error, _ bool) {
					if m.Kafka == nil {
						d.must("failed %s %s without a record: %v", action, m.ID, err)
					} else if !errors.Is(err, errHiccup) && !errors.Is(err, errDownstream) && !isGone(err) {
						d.must("failed %s %s/%d/%d: %v", action, m.Kafka.Topic, m.Kafka.Partition, m.Kafka.Offset, err)
					}
				},
			},
			MaxPoll: 20,
		},
	}
	if s.Session > 0 {
		cfg.MaxPollInterval = 30 * time.Second
	}
	return cfg
}

// kip848 is the balancer that is Kafka's own.
const kip848 = "kip848"

// kafkaOpts are franz-go's defaults but for the balancer.
func (s memberSpec) kafkaOpts(d *diary) []kgo.Opt {
	opts := []kgo.Opt{kgo.SeedBrokers(s.Brokers...), kafkaVia(s.KafkaVia), kgo.WithHooks(assignments{d})}
	if s.Session > 0 {
		opts = append(opts, kgo.SessionTimeout(s.Session), kgo.HeartbeatInterval(heartbeat))
	}
	switch s.Balancer {
	case kip848:
		return append(opts, kgo.ServerSideBalancer())
	case "eager":
		return append(opts, kgo.Balancers(kgo.RangeBalancer()))
	}
	return opts
}

// assignments notes when a member is given partitions, under every protocol: then it asks
// for their offsets.
type assignments struct{ diary *diary }

// OnBrokerWrite implements kgo.HookBrokerWrite.
func (a assignments) OnBrokerWrite(_ kgo.BrokerMetadata, key int16, _ int, _, _ time.Duration, err error) {
	if err == nil && key == kmsg.OffsetFetch.Int16() {
		a.diary.must("given")
	}
}

// diary is a file of lines. A process that is killed leaves in it what it wrote.
type diary struct{ file *os.File }

func openDiary(name string) (*diary, error) {
	file, err := os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	return &diary{file}, err
}

func (d *diary) note(format string, args ...any) error {
	_, err := fmt.Fprintf(d.file, strings.ReplaceAll(format, "\n", " ")+"\n", args...)
	return err
}

// must is note where an error has nowhere to go.
func (d *diary) must(format string, args ...any) {
	if err := d.note(format, args...); err != nil {
		panic(err)
	}
}

// see is a handler without a transaction: it is called again for what is repeated.
func see[E outbox.DomainEvent](d *diary) func(context.Context, E, outbox.Metadata) error {
	return func(_ context.Context, _ E, m outbox.Metadata) error {
		return d.note("saw %s %d %d", m.Extensions[incarnation], m.Kafka.Partition, m.Kafka.Offset)
	}
}

// errHiccup fails the first try of some events, so that those that arrived together
// are handled one by one.
var errHiccup = errors.New("hiccup")

func hiccup(m outbox.Metadata) error {
	if m.Attempt == 1 && m.Kafka.Offset%307 == 0 {
		return errHiccup
	}
	return nil
}

// conflicts counts how often this process has had PostgreSQL roll an event back.
var conflicts sync.Map

// conflict has PostgreSQL roll the first tries of some events back, as a transaction at the level
// serializable may be: more often than a batch is repeated for, and less often than an event is. No
// event and no handler may be blamed for it.
func conflict(ctx context.Context, tx *sql.Tx, m outbox.Metadata) error {
	const times = 6
	if m.Kafka.Offset%101 != 0 {
		return nil
	}
	first, _ := conflicts.LoadOrStore(m.ID, new(atomic.Int32))
	if n, _ := first.(*atomic.Int32); n.Add(1) > times {
		return nil
	}
	_, err := tx.ExecContext(ctx, `DO $$ BEGIN RAISE EXCEPTION 'could not serialize access' USING ERRCODE = 'serialization_failure'; END $$`)
	return err
}

// isSerializationFailure reports whether an error is one of those. A deadlock is another
// conflict, and one that members get into by themselves.
func isSerializationFailure(err error) bool {
	failed, ok := errors.AsType[*pgconn.PgError](err)
	return ok && failed.Code == "40001"
}

// isGone reports whether an attempt was that of a member which was killed or frozen.
func isGone(err error) bool {
	var typed interface{ ErrorType() string }
	return errors.As(err, &typed) && typed.ErrorType() == "stale"
}

// The counts are not idempotent: what is handled twice is counted twice. The rows
// of products are locked as events come, so that members get into deadlocks. Behind that
// lock effects of likes and views are numbered in the order in which they are committed.
// Sales go through pgx, likes and views through database/sql.
const (
	sqlAddSale = `
INSERT INTO product_statistic AS s (product_id, sales_count, actions) VALUES ($1, $2, 1)
    ON CONFLICT (product_id) DO UPDATE SET sales_count = s.sales_count + excluded.sales_count, actions = s.actions + 1`
	sqlAddViews = `
WITH counted AS (
    INSERT INTO product_statistic AS s (product_id, view_count, actions)
    SELECT p, count(*), count(*) FROM unnest($1::text[]) AS p GROUP BY p ORDER BY p
        ON CONFLICT (product_id) DO UPDATE SET view_count = s.view_count + excluded.view_count, actions = s.actions + excluded.actions
 RETURNING product_id
)
INSERT INTO effect (action, product_id, sequence)
SELECT '` + viewAction + `', e.product, e.sequence FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS e (product, sequence, n)
 WHERE e.product IN (SELECT product_id FROM counted) ORDER BY e.n`
	sqlAddLike = `
WITH counted AS (
    INSERT INTO product_statistic AS s (product_id, like_count, actions) VALUES ($1, $2, 1)
        ON CONFLICT (product_id) DO UPDATE SET like_count = s.like_count + excluded.like_count, actions = s.actions + 1
 RETURNING product_id
)
INSERT INTO effect (action, product_id, sequence) SELECT '` + likeAction + `', product_id, $3::bigint FROM counted`
)

func addSale(ctx context.Context, tx pgx.Tx, e orderPaid, m outbox.Metadata) error {
	select {
	case <-time.After(e.Pause):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	_, err := tx.Exec(ctx, sqlAddSale, e.Product, e.Quantity)
	return errors.Join(err, hiccup(m))
}

func addViews(ctx context.Context, tx *sql.Tx, events []outbox.Received[productViewed]) error {
	products, sequences, failed := make([]string, len(events)), make([]int64, len(events)), error(nil)
	for i, e := range events {
		products[i] = e.Event.Product
		sequences[i] = sequenceOf(e.Metadata)
		failed = errors.Join(failed, hiccup(e.Metadata))
	}
	_, err := tx.ExecContext(ctx, sqlAddViews, products, sequences)
	return errors.Join(err, failed)
}

func addLike(ctx context.Context, tx *sql.Tx, e productLiked, m outbox.Metadata) error {
	if err := conflict(ctx, tx, m); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, sqlAddLike, e.Product, e.By, sequenceOf(m))
	return errors.Join(err, failDownstream(m))
}
