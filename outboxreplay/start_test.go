package outboxreplay_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxreplay"
)

var (
	startEvents = flag.Int("start.events", 20_000, "archived events with which groups start")
	startRate   = flag.Int("start.rate", 500, "events that are recorded in a second meanwhile")
)

// Variables for the child process, which starts a group until it is killed.
const (
	childVar  = "OUTBOXREPLAY_TEST_DATABASE"
	schemaVar = "OUTBOXREPLAY_TEST_SCHEMA"
	groupVar  = "OUTBOXREPLAY_TEST_GROUP"
	topicVar  = "OUTBOXREPLAY_TEST_TOPIC" // empty: a group of workers
	brokerVar = "OUTBOXREPLAY_TEST_BROKER"
)

func startUntilKilled() {
	db, err := pgxpool.New(background, os.Getenv(childVar))
	if err == nil {
		_, err = startOf(db, os.Getenv(schemaVar), os.Getenv(groupVar), os.Getenv(topicVar), os.Getenv(brokerVar), nil)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// startOf starts a group, or goes on with that.
func startOf(db *pgxpool.Pool, schema, group, topic, broker string, change func(*outboxreplay.StartConfig)) (outboxreplay.StartReport, error) {
	table, err := outboxarchive.NewTable(db, outboxarchive.TableConfig{Schema: schema, OutboxSchema: schema})
	if err != nil {
		return outboxreplay.StartReport{}, err
	}
	cfg := outboxreplay.StartConfig{Group: group, Archive: table, Schema: schema, Audit: audit}
	if topic != "" {
		cfg.Topics = []string{topic}
	}
	if change != nil {
		change(&cfg)
	}
	return outboxreplay.StartGroup(background, db, testenv.KafkaOpts([]string{broker}), cfg)
}

// startFixture has an archive, and a table with the number of the last sale of each product that a group has handled.
type startFixture struct {
	*replayFixture
	table    *outboxarchive.Table
	products int
	mu       sync.Mutex
	numbers  []int // of the last sale of each product
	wrong    testenv.Kept[string]
}

func newStartFixture(t testing.TB, archived int) *startFixture {
	t.Helper()
	f := &startFixture{replayFixture: newFixture(t, largeEnough), products: min(1000, max(1, archived/20))}
	var err error
	f.table, err = outboxarchive.NewTable(f.db, outboxarchive.TableConfig{Schema: f.schema, OutboxSchema: f.schema})
	require.NoError(t, err)
	require.NoError(t, f.table.Ensure(background))
	f.exec(t, `CREATE TABLE {schema}.last_sale (product text PRIMARY KEY, number int NOT NULL)`)
	f.exec(t, `INSERT INTO {schema}.last_sale SELECT 'p' || i, 0 FROM generate_series(0, $1::int - 1) AS i`, f.products)
	const atOnce = 100_000
	for from := 0; from < archived; from += atOnce {
		f.exec(t, `
INSERT INTO {schema}.outbox_archive (id, event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, topic, occurred_at, created_at, size)
SELECT nextval('{schema}.outbox_id_seq'), gen_random_uuid(), $1, 'shop', 'Product', 'p' || i % $2::int,
       jsonb_build_object('Product', 'p' || i % $2::int, 'Number', i / $2::int + 1), 'application/json', $3, now(), now(), 40
  FROM generate_series($4::int, $5::int) AS i`, saleType, f.products, f.topic, from, min(from+atOnce, archived)-1)
	}
	f.numbers = make([]int, f.products)
	for i := range f.numbers {
		f.numbers[i] = (archived + f.products - 1 - i) / f.products
	}
	return f
}

func (f *startFixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := f.db.Exec(background, pg.InSchema(sql, f.schema), args...)
	require.NoError(t, err)
}

// write records sales of random products until stop is called. If it falls behind the rate, it catches up.
func (f *startFixture) write(t testing.TB, rng *rand.Rand, rate int) (stop func()) {
	t.Helper()
	return testenv.Run(t, func(ctx context.Context) error {
		const inTx = 10
		for next := time.Now(); ctx.Err() == nil; {
			sales := make([]sale, inTx)
			f.mu.Lock()
			for i := range sales {
				p := rng.IntN(f.products)
				f.numbers[p]++
				sales[i] = sale{Product: fmt.Sprintf("p%d", p), Number: f.numbers[p]}
			}
			f.mu.Unlock()
			f.record(t, sales...)
			next = next.Add(inTx * time.Second / time.Duration(rate))
			wait.Sleep(ctx, time.Until(next))
		}
		return nil
	})
}

// handle is the handler of the groups. Its effect fails unless the sale is the next one of its product.
func (f *startFixture) handle() outbox.Handler {
	update := pg.InSchema(`
UPDATE {schema}.last_sale AS l SET number = n.last FROM unnest($1::text[], $2::int[], $3::int[]) AS n (product, first, last)
 WHERE l.product = n.product AND l.number = n.first - 1`, f.schema)
	return outbox.HandleBatch("COUNT", func(ctx context.Context, tx pgx.Tx, events []outbox.Received[sale]) error {
		at := map[string]int{}
		var products []string
		var first, last []int
		for _, e := range events {
			i, known := at[e.Event.Product]
			if !known {
				i, at[e.Event.Product] = len(products), len(products)
				products, first, last = append(products, e.Event.Product), append(first, e.Event.Number), append(last, e.Event.Number-1)
			}
			if e.Event.Number != last[i]+1 {
				f.wrong.Add(fmt.Sprintf("%v after %d", e.Event, last[i]))
			}
			last[i] = e.Event.Number
		}
		tag, err := tx.Exec(ctx, update, products, first, last)
		if err == nil && int(tag.RowsAffected()) != len(products) {
			f.wrong.Add(fmt.Sprintf("%d of %d are not next: %v %v", len(products)-int(tag.RowsAffected()), len(products), products, first))
		}
		return err
	})
}

// quick are the settings of retention that archive what was just sent.
func (f *startFixture) quick() outbox.RetentionConfig {
	return outbox.RetentionConfig{PublishedFor: time.Second, CursorsFor: 100 * time.Millisecond, Archive: f.table.Archive}
}

func (f *startFixture) handlerConfig() outbox.HandlerConfig {
	return outbox.HandlerConfig{Schema: f.schema, Logger: slog.New(slog.DiscardHandler)}
}

// group runs a process of a group: a worker, or a consumer.
func (f *startFixture) group(t testing.TB, group string, kafka bool) (stop func()) {
	t.Helper()
	if kafka {
		c, err := outbox.NewConsumer(f.db, testenv.KafkaOpts(f.brokers), f.events, group, outbox.ConsumerConfig{HandlerConfig: f.handlerConfig()}, f.handle())
		require.NoError(t, err)
		return testenv.Run(t, c.Run)
	}
	w, err := outbox.NewWorker(f.db, f.events, group, outbox.WorkerConfig{HandlerConfig: f.handlerConfig(), Retention: f.quick()}, f.handle())
	require.NoError(t, err)
	return testenv.Run(t, w.Run)
}

// started returns the outbox id up to which a group that is starting has its events, or -1.
func (f *startFixture) started(t testing.TB, group string) (through int64) {
	t.Helper()
	err := f.db.QueryRow(background, pg.InSchema(`SELECT coalesce(started, -1) FROM {schema}.event_subscription WHERE consumer_group = $1`, f.schema), group).Scan(&through)
	if errors.Is(err, pgx.ErrNoRows) {
		return -1
	}
	require.NoError(t, err)
	return through
}

// missing returns how many sales the group has not handled yet.
func (f *startFixture) missing(t testing.TB) (n int) {
	t.Helper()
	products := make([]string, f.products)
	for i := range products {
		products[i] = fmt.Sprintf("p%d", i)
	}
	f.mu.Lock()
	numbers := slices.Clone(f.numbers)
	f.mu.Unlock()
	require.NoError(t, f.db.QueryRow(background, pg.InSchema(`
SELECT coalesce(sum(n.number - l.number), 0) FROM unnest($1::text[], $2::int[]) AS n (product, number) JOIN {schema}.last_sale AS l USING (product)`, f.schema),
		products, numbers).Scan(&n))
	return n
}

// A new group gets the archived events, and those that are recorded and archived meanwhile, each once and in order per
// key, although the process that starts it is killed three times.
func TestStartGroup(t *testing.T) {
	testenv.Long(t)
	for _, kafka := range []bool{false, true} {
		name := map[bool]string{false: "workers", true: "consumers"}[kafka]
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testStartGroup(t, kafka)
		})
	}
}

func testStartGroup(t *testing.T, kafka bool) {
	seed := uint64(time.Now().UnixNano())
	rng := rand.New(rand.NewPCG(seed, 0))
	f := newStartFixture(t, *startEvents)
	group, topic := "view-"+uuid.NewString()[:8], ""
	if kafka {
		topic = f.topic
	}
	r, err := outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), outbox.RelayConfig{Schema: f.schema, PollInterval: 50 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler), Retention: f.quick()})
	require.NoError(t, err)
	testenv.Run(t, r.Run)
	writing := time.Now()
	stopWriter := f.write(t, rng, *startRate)
	f.await(t, "an event is archived", func() bool { return f.count(t, "outbox_archive") > *startEvents })

	began := time.Now()
	child := f.startChild(t, group, topic)
	f.await(t, "the cut is made", func() bool { return f.started(t, group) >= 0 })
	f.group(t, group, kafka)
	kills := 0
	for quarter := 1; quarter <= 3; quarter++ {
		at := int64(*startEvents * quarter / 4)
		f.await(t, fmt.Sprintf("%d events have deliveries", at), func() bool { return f.started(t, group) >= at })
		require.NoError(t, child.Process.Kill())
		require.ErrorContains(t, child.Wait(), "killed", "it has not ended by itself")
		kills++
		child = f.startChild(t, group, topic)
	}
	require.NoError(t, child.Wait())
	filled := time.Since(began)
	stopWriter()
	written := time.Since(writing)
	f.await(t, "all is handled", func() bool { return f.missing(t) == 0 })
	require.Empty(t, f.wrong.All())
	recorded := -*startEvents
	for _, n := range f.numbers {
		recorded += n
	}
	t.Logf("seed %d: %s, %d archived and %d recorded events (%.0f/s) handled once and in order, %d kills, started in %v, %.0f events/s",
		seed, t.Name(), *startEvents, recorded, float64(recorded)/written.Seconds(), kills, filled.Round(time.Millisecond), float64(*startEvents)/filled.Seconds())
	_, err = startOf(f.db, f.schema, group, topic, f.brokers[0], nil)
	require.ErrorIs(t, err, outboxreplay.ErrGroupBegun)
}

// await waits for a condition as long as something happens in a long run.
func (f *startFixture) await(t testing.TB, what string, met func() bool) {
	t.Helper()
	deadline := time.Now().Add(testenv.Patience + time.Duration(*startEvents)*2*time.Millisecond)
	for !met() {
		require.Empty(t, f.wrong.All())
		require.True(t, time.Now().Before(deadline), "waiting until %s; %d are missing", what, f.missing(t))
		time.Sleep(20 * time.Millisecond)
	}
}

// startChild starts a process that starts a group.
func (f *startFixture) startChild(t testing.TB, group, topic string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), childVar+"="+f.db.Config().ConnString(), schemaVar+"="+f.schema, groupVar+"="+group, topicVar+"="+topic,
		brokerVar+"="+strings.Join(f.brokers[:1], ","))
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}
