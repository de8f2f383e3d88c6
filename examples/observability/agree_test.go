package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/outboxgo/outbox/outboxops"
)

// The test of this file is here because it needs the metrics as Prometheus gets them, and the command line: neither
// outboxotel and the exporter, which this example links, may be linked by the module of the command, nor can that be
// imported. It is built.

// agreement is a schema in which all has failed at once that can fail, with every view that operators have of it.
type agreement struct {
	t       *testing.T
	db      *pgxpool.Pool
	schema  string
	id      string
	kafka   []kgo.Opt
	admin   *kadm.Client
	rec     *outbox.Recorder
	events  *outbox.Registry
	tel     *telemetry
	program string

	relays  []*outbox.Relay
	readers []*outbox.Consumer
	workers []*outbox.Worker
	early   *alertLog // of a monitor that runs from before anything failed
	cut     *alertLog // of the relay that Kafka is cut off from; it alerts to deliveries too, as the first of the relays
	mended  atomic.Bool
	sold    sync.Map // ids of orders that the group sales has handled
}

// staleAfter is when all views of this test call an event stale.
const staleAfter = time.Second

// far is when what has failed is tried again: not during the test.
const far = time.Hour

// The events: an order, one whose topic is missing, one whose topic accepts nothing, and one of another producer.
type (
	agreed   struct{ ID, Filler string }
	homeless struct{ ID string }
	shut     struct{ ID string }
	imported struct{ ID string }
)

func (e agreed) OccurredAt() time.Time   { return time.Now() }
func (e homeless) OccurredAt() time.Time { return time.Now() }
func (e shut) OccurredAt() time.Time     { return time.Now() }
func (e imported) OccurredAt() time.Time { return time.Now() }
func (e agreed) key() string             { return strings.TrimRight(e.ID, "0123456789") + "-" + e.ID[:1] }
func (e homeless) key() string           { return "one" }
func (e shut) key() string               { return e.ID }
func (e imported) key() string           { return e.ID }

// alertLog is an Alerter that keeps what it gets.
type alertLog struct{ testenv.Kept[outbox.Alert] }

// Alert implements [outbox.Alerter].
func (l *alertLog) Alert(_ context.Context, a outbox.Alert) error {
	l.Add(a)
	return nil
}

// of returns the alerts of a kind that are not over.
func (l *alertLog) of(kind outbox.AlertKind) (some []outbox.Alert) {
	for _, a := range l.All() {
		if a.Kind == kind && !a.Over {
			some = append(some, a)
		}
	}
	return some
}

func newAgreement(t *testing.T) *agreement {
	t.Helper()
	brokers := testenv.RealBrokers(t)
	db, schema := testenv.Schema(t)
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	a := &agreement{t: t, db: db, schema: schema, id: uuid.NewString()[:8], early: &alertLog{}, cut: &alertLog{},
		kafka: []kgo.Opt{kgo.SeedBrokers(brokers...), kgo.MetadataMinAge(100 * time.Millisecond)}} // which creates no topics
	testenv.CreateTopic(t, brokers, a.topic("orders"), 1, "max.message.bytes", "20000")
	testenv.CreateTopic(t, brokers, a.topic("orders.dlq"), 1)
	testenv.CreateTopic(t, brokers, a.topic("shut"), 1, "message.timestamp.before.max.ms", "0") // records linger, so all are too old
	testenv.CreateTopic(t, brokers, a.topic("imports"), 1)
	var err error
	a.admin, err = kadm.NewOptClient(a.kafka...)
	require.NoError(t, err)
	t.Cleanup(a.admin.Close)
	a.events, err = outbox.NewRegistry("agree",
		outbox.Event("agree.order.v1", "Order", agreed.key).Topic(a.topic("orders")),
		outbox.Event("agree.homeless.v1", "Homeless", homeless.key).Topic(a.topic("missing")),
		outbox.Event("agree.shut.v1", "Shut", shut.key).Topic(a.topic("shut")),
		outbox.Event("agree.imported.v1", "Imported", imported.key).Topic(a.topic("imports")))
	require.NoError(t, err)
	a.rec, err = outbox.NewRecorder(a.events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	a.tel, err = newTelemetry(config{interval: time.Millisecond, stale: staleAfter})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, a.tel.shutdown(context.Background())) })
	a.program = filepath.Join(t.TempDir(), "outbox")
	out, err := exec.CommandContext(t.Context(), "go", "build", "-o", a.program, "github.com/outboxgo/outbox/cmd/outbox").CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Cleanup(func() {
		if t.Failed() { // as operators see it
			for _, args := range [][]string{{"status"}, {"failures", "count"}, {"consumers"}} {
				t.Log(a.command(args...))
			}
		}
	})
	return a
}

// topic returns the name of a topic of this test, and group that of a group.
func (a *agreement) topic(name string) string { return "agree-" + a.id + "-" + name }
func (a *agreement) group(name string) string { return name + "-" + a.id }

// quiet discards what is logged.
var quiet = slog.New(slog.DiscardHandler)

// relay runs a relay.
func (a *agreement) relay(name string, kafka []kgo.Opt, cfg outbox.RelayConfig) (stop func()) {
	a.t.Helper()
	cfg.Schema, cfg.Name, cfg.Logger, cfg.PollInterval = a.schema, name, quiet, 50*time.Millisecond
	cfg.DeliveryTimeout, cfg.Lease = time.Second, 10*time.Second
	r, err := outbox.NewRelay(a.db, kafka, a.tel.Relay(cfg))
	require.NoError(a.t, err)
	a.relays = append(a.relays, r)
	stop = testenv.Run(a.t, r.Run)
	a.eventually(func() bool {
		return a.count(`SELECT count(*) FROM {s}.outbox_cursor WHERE relay = $1`, name) > 0
	}, "relay %s has no cursor", name)
	return stop
}

// consumer runs a consumer of a group whose handler refuses some events.
func (a *agreement) consumer(name string, cfg outbox.ConsumerConfig, handler outbox.Handler, opts ...kgo.Opt) *outbox.Consumer {
	a.t.Helper()
	cfg.Schema, cfg.Logger, cfg.From = a.schema, quiet, outbox.FromStart
	cfg.Retry = outbox.RetryPolicy{RetryWait: far, MaxRetryWait: far, MaxOutage: -1}
	c, err := outbox.NewConsumer(a.db, append(slices.Clone(a.kafka), opts...), a.events, a.group(name), a.tel.Consumer(a.group(name), cfg), handler)
	require.NoError(a.t, err)
	a.readers = append(a.readers, c)
	testenv.Run(a.t, c.Run)
	a.eventually(func() bool { return c.Health().Partitions == 1 }, "group %s has no partition", name)
	return c
}

func (a *agreement) eventually(met func() bool, msg string, args ...any) {
	a.t.Helper()
	require.Eventuallyf(a.t, met, testenv.Patience, 50*time.Millisecond, msg, args...)
}

// count returns what a statement, in which {s} is the schema, counts.
func (a *agreement) count(sql string, args ...any) (n int64) {
	a.t.Helper()
	require.NoError(a.t, a.db.QueryRow(a.t.Context(), strings.ReplaceAll(sql, "{s}", pgx.Identifier{a.schema}.Sanitize()), args...).Scan(&n))
	return n
}

func (a *agreement) commit(events ...outbox.DomainEvent) {
	a.t.Helper()
	for _, e := range events { // each in a transaction of its own, so that their order is that of commits
		require.NoError(a.t, pgx.BeginFunc(a.t.Context(), a.db, func(tx pgx.Tx) error { return a.rec.Record(a.t.Context(), tx, e) }))
	}
}

// command runs the command line, which must succeed, and returns what it writes.
func (a *agreement) command(args ...string) string {
	a.t.Helper()
	cmd := exec.Command(a.program, args...)
	cmd.Env = []string{"HOME=" + a.t.TempDir(), "DATABASE_URL=" + a.db.Config().ConnString(), "KAFKA_BROKERS=" + strings.Join(testenv.Brokers(a.t), ",")}
	cmd.Args = append(cmd.Args, "--schema", a.schema)
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	require.NoError(a.t, err, "%v: %s%s", args, out, &errs)
	return string(out)
}

// monitor alerts to a log until stop is called.
func (a *agreement) monitor(to *alertLog) (stop func()) {
	a.t.Helper()
	m, err := outboxops.NewMonitor(a.db, outboxops.MonitorConfig{Schema: a.schema, Logger: quiet, Alerts: a.alerts(to)})
	require.NoError(a.t, err)
	return testenv.Run(a.t, m.Run)
}

func (a *agreement) alerts(to outbox.Alerter) outbox.AlertConfig {
	return outbox.AlertConfig{Alerter: to, Interval: 100 * time.Millisecond, ReportInterval: 100 * time.Millisecond, DeadThreshold: 1, StaleAfter: staleAfter, StalePending: 1}
}

// refuse returns an error for some events: until they are dead, or one that is to be tried again.
func (a *agreement) refuse(id, dead, later string) error {
	switch {
	case strings.HasPrefix(id, dead) && !a.mended.Load():
		return outbox.RetryAfter(errors.New("refused each time"), time.Millisecond)
	case strings.HasPrefix(id, later):
		return errors.New("refused for now")
	}
	return nil
}

// failAll has everything fail at once, and waits until nothing moves any more.
func (a *agreement) failAll() {
	a.t.Helper()
	a.monitor(a.early)
	a.relay("gone", a.kafka, outbox.RelayConfig{})()
	a.relay("cut", []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, outbox.RelayConfig{Alerts: a.alerts(a.cut),
		Breaker: outbox.BreakerConfig{Window: 1, OpenFor: far}})
	a.relay("main", a.kafka, outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxRetries: 1, RetryWait: 10 * time.Millisecond, MaxRetryWait: 10 * time.Millisecond}, RetryInterval: 50 * time.Millisecond,
		Alerts: outbox.AlertConfig{Alerter: &alertLog{}}})

	a.consumer("sales", outbox.ConsumerConfig{}, outbox.HandleNoTx("SALE_COUNTED", func(_ context.Context, e agreed, _ outbox.Metadata) error {
		if err := a.refuse(e.ID, "unsaleable", "later"); err != nil {
			return err
		}
		a.sold.Store(e.ID, true)
		return nil
	}))
	a.consumer("stats", outbox.ConsumerConfig{}, outbox.HandleNoTx("CALLED", func(context.Context, agreed, outbox.Metadata) error {
		time.Sleep(110 * time.Millisecond) // ten failures take longer than a second
		return errors.New("the service is away")
	}))
	still := a.consumer("still", outbox.ConsumerConfig{}, outbox.HandleNoTx("READ", func(context.Context, agreed, outbox.Metadata) error { return nil }))
	require.Contains(a.t, a.command("consumer", "pause", "--group", a.group("still"), "--reason", "the stock is counted", "--operator", "kim"), "pause: all topics")
	a.eventually(func() bool { return strings.Contains(strings.Join(still.Health().Reasons, ";"), "paused by kim") }, "the group does not know that it is paused")
	a.consumer("imports", outbox.ConsumerConfig{}, outbox.HandleNoTx("IMPORTED", func(context.Context, imported, outbox.Metadata) error { return nil }))
	mails, err := outbox.NewWorker(a.db, a.events, a.group("mails"), a.tel.Worker(a.group("mails"), outbox.WorkerConfig{PollInterval: 50 * time.Millisecond,
		HandlerConfig: outbox.HandlerConfig{Schema: a.schema, Logger: quiet, Retry: outbox.RetryPolicy{RetryWait: far, MaxRetryWait: far, MaxOutage: -1}, From: outbox.FromStart}}),
		outbox.HandleNoTx("MAIL_SENT", func(_ context.Context, e agreed, _ outbox.Metadata) error {
			return a.refuse(e.ID, "unmailable", "slow")
		}))
	require.NoError(a.t, err)
	a.workers = append(a.workers, mails)
	testenv.Run(a.t, mails.Run)
	a.watch()

	var events []outbox.DomainEvent
	for i := range 12 {
		events = append(events, agreed{ID: string(rune('a'+i)) + "-good"})
	}
	for _, id := range []string{"unmailable1", "unmailable2", "unsaleable1", "later1", "later2", "later3", "slow1", "slow2"} {
		events = append(events, agreed{ID: id})
	}
	events = append(events, agreed{ID: "x-large", Filler: noise(30_000)}, agreed{ID: "y-large", Filler: noise(30_000)},
		homeless{"1"}, homeless{"2"}, homeless{"3"}, shut{"1"}, shut{"2"})
	a.commit(events...)
	a.produceForeign()

	a.eventually(func() bool { return a.count(`SELECT count(*) FROM {s}.outbox_failed`) == 7 && a.rows("dead") == 2 }, "no failed events")
	a.eventually(func() bool { return a.hasReason("the breaker of action CALLED is open") }, "the breaker of the action is not open")
	a.eventually(func() bool { return a.relays[1].Health().Breaker == outbox.BreakerOpen }, "the breaker of the relay is not open")
	a.awaitQuiet()
}

// awaitQuiet waits until handlers are done with what they can do.
func (a *agreement) awaitQuiet() {
	a.t.Helper()
	a.eventually(func() bool {
		lag := a.lag("stats")
		return a.lag("sales") == 0 && lag > 0 && lag+a.count(`SELECT count(*) FROM {s}.event_delivery WHERE consumer_group = $1`, a.group("stats")) == a.ends("orders") &&
			a.deliveries("mails", "dead") == 2 && a.owed("mails") == 2 && a.owed("sales") == 3 &&
			a.count(`SELECT count(*) FROM {s}.event_delivery WHERE status = 'PROCESSING'`) == 0 &&
			a.count(`SELECT count(*) FROM {s}.event_delivery WHERE consumer_group = $1 AND status = 'DONE'`, a.group("mails")) == 18
	}, "handlers are not done")
	require.Eventually(a.t, func() bool {
		return a.count(`SELECT count(*) FROM {s}.outbox WHERE created_at > now() - interval '2 s'`) == 0 &&
			a.count(`SELECT count(*) FROM {s}.event_delivery WHERE recorded_at > now() - interval '2 s'`) == 0
	}, testenv.Patience, 50*time.Millisecond, "all is stale")
}

func (a *agreement) rows(status string) int64 {
	return a.count(`SELECT count(*) FROM {s}.outbox_failed WHERE relay = 'main' AND status = $1`, status)
}

func (a *agreement) deliveries(group, status string) int64 {
	return a.count(`SELECT count(*) FROM {s}.event_delivery WHERE consumer_group = $1 AND status = $2 AND resolved_at IS NULL`, a.group(group), strings.ToUpper(status))
}

func (a *agreement) owed(group string) int64 {
	return a.deliveries(group, "pending") + a.deliveries(group, "parked")
}

// ends returns how many records a topic has had.
func (a *agreement) ends(topic string) (n int64) {
	a.t.Helper()
	ends, err := a.admin.ListEndOffsets(a.t.Context(), a.topic(topic))
	require.NoError(a.t, err)
	ends.Each(func(o kadm.ListedOffset) { n += o.Offset })
	return n
}

// lag returns how many records Kafka has for a group.
func (a *agreement) lag(group string) (n int64) {
	a.t.Helper()
	topic := map[string]string{"imports": "imports"}[group]
	if topic == "" {
		topic = "orders"
	}
	committed, err := a.admin.FetchOffsets(a.t.Context(), a.group(group))
	require.NoError(a.t, err)
	n = a.ends(topic)
	committed.Each(func(o kadm.OffsetResponse) { n -= max(0, o.At) })
	return n
}

func (a *agreement) hasReason(reason string) bool {
	return slices.ContainsFunc(a.readers, func(c *outbox.Consumer) bool { return strings.Contains(strings.Join(c.Health().Reasons, ";"), reason) })
}

// foreign is the key of a dead letter of which this database knows nothing.
const foreign = "foreign-f"

// produceForeign writes a dead letter as others do.
func (a *agreement) produceForeign() {
	a.t.Helper()
	r, err := a.rec.KafkaRecord(a.t.Context(), agreed{ID: "foreign"})
	require.NoError(a.t, err)
	r.Topic, r.Key = a.topic("orders.dlq"), []byte(foreign)
	for name, value := range map[string]string{
		outbox.DeadLetterOriginalTopic: a.topic("orders"), outbox.DeadLetterOriginalPartition: "0", outbox.DeadLetterOriginalOffset: "4711",
		outbox.DeadLetterGroup: a.group("sales"), outbox.DeadLetterAction: "SALE_COUNTED", outbox.DeadLetterError: "written elsewhere",
	} {
		r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: []byte(value)})
	}
	client, err := kgo.NewClient(a.kafka...)
	require.NoError(a.t, err)
	defer client.Close()
	require.NoError(a.t, client.ProduceSync(a.t.Context(), r).FirstErr())
}

// watch has the telemetry watch.
func (a *agreement) watch() {
	a.t.Helper()
	require.NoError(a.t, a.tel.WatchDatabase(a.db, a.schema))
	require.NoError(a.t, a.tel.WatchConsumers(a.readers...))
}

// newPage returns the operators' page of this process. It has asked Kafka nothing yet.
func (a *agreement) newPage() http.Handler {
	page, err := outboxadmin.New(a.db, outboxadmin.Config{Schema: a.schema, StaleAfter: staleAfter, Kafka: a.kafka, Logger: quiet,
		Authorize: func(*http.Request) (outboxadmin.Access, error) {
			return outboxadmin.Access{Operator: "kim", Role: outboxadmin.Operator}, nil
		},
		Health: func() (all []outbox.RelayHealth) {
			for _, r := range a.relays {
				all = append(all, r.Health())
			}
			return all[1:] // the first one has ended
		},
		Consumers: func() (all []outbox.ConsumerHealth) {
			for _, c := range a.readers {
				all = append(all, c.Health())
			}
			return all
		},
		Workers: func() (all []outbox.WorkerHealth) {
			for _, w := range a.workers {
				all = append(all, w.Health())
			}
			return all
		},
	})
	require.NoError(a.t, err)
	return page
}

// check requires all views to show the truth, but for what only others can know.
func (a *agreement) check() {
	a.t.Helper()
	truth := a.truth()
	late := &alertLog{}
	stop := a.monitor(late)
	// What is owed waits for too long, so the stale alert has it. Pauses, lag and breakers of actions are nothing to
	// alert to.
	const ofAction = "open breaker of action"
	assert.Equal(a.t, truth.without("owed", "retried", "lag", "paused", "dead letters", ofAction), a.alerted(late), "alerts")
	stop()
	assert.Equal(a.t, truth, a.onPage(), "page")
	page := a.newPage()
	assert.Equal(a.t, truth, a.inDocuments(a.get(page, "/api/relays"), a.get(page, "/api/overview"), a.get(page, "/api/failed/counts"), a.get(page, "/api/consumers")), "API")
	assert.Equal(a.t, truth, a.inDocuments(a.command("status", "--json", "--max-age", staleAfter.String()),
		a.command("failures", "count", "--json"), a.command("consumers", "--json")), "command line")
	assert.Contains(a.t, a.command("failures", "count"), fmt.Sprintf(", %d unresolved\n", truth["unresolved in all"]))
	assert.Regexp(a.t, fmt.Sprintf(`(?m)^main .* %d +%d +%d +%d$`, truth["waiting of main"], truth["failed of main"], truth["parked of main"], truth["dead of main"]), a.command("status"))
	assert.Regexp(a.t, fmt.Sprintf(`(?m)^%s +%s +1 +%d `, a.group("still"), a.topic("orders"), truth["lag of still"]), a.command("consumers"))
	// Prometheus has no metric of pauses and dead-letter topics, and counts what is tried again with what waits.
	assert.Equal(a.t, truth.without("retried", "paused", "dead letters"), a.inMetrics(), "Prometheus")
}

// All kinds of failures at once: a topic that is missing and one that accepts nothing, dead events, dead deliveries
// of a worker and of a consumer, with its dead letter, a dead letter of others, what waits and what is behind that,
// no leader, an open breaker of a relay and one of an action, a partition that cannot be read, and a paused group.
// Alerts, page, API, command line and Prometheus agree about each number. They do so again after the dead letters
// were replayed.
func TestViewsAgree(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	a := newAgreement(t)
	a.failAll()
	truth := a.truth()
	for name, want := range (numbers{
		"unresolved events": 7, "waiting of main": 3, "parked of main": 2, "dead of main": 2, "dead in all": 5, "dead of mails": 2, "dead of sales": 1,
		"owed to mails": 2, "owed to sales": 3, "pending of cut": 27, "lag of still": 20, "lag of imports": 0, "dead letters": 2, "paused groups": 1,
	}) {
		assert.Equal(t, want, truth[name], name)
	}
	a.eventually(func() bool {
		return a.early.died(outbox.AlertDead) == 2 && a.early.died(outbox.AlertDeadDeliveries) == 3 && a.cut.died(outbox.AlertDeadDeliveries) == 3
	}, "not all deaths are alerted to")
	a.check()

	list := a.command("dlq", "list", a.topic("orders.dlq"), "--json")
	require.Equal(t, 2, strings.Count(list, `"group": "`+a.group("sales")+`"`), list)
	require.Contains(t, list, "written elsewhere")
	a.mended.Store(true)
	require.Contains(t, a.command("dlq", "replay", a.topic("orders.dlq")), "would send 2")
	require.Contains(t, a.command("dlq", "replay", a.topic("orders.dlq"), "--key", foreign, "--yes", "--reason", "mended", "--operator", "test"), "sent 1,")
	a.eventually(func() bool { _, handled := a.sold.Load("foreign"); return handled && a.lag("sales") == 0 }, "the foreign dead letter is not handled")
	a.check()
	require.Contains(t, a.command("dlq", "replay", a.topic("orders.dlq"), "--class", "handler", "--yes", "--reason", "mended", "--operator", "test"), "sent 1,")
	a.eventually(func() bool { return a.deliveries("sales", "dead") == 0 && a.lag("sales") == 0 }, "the replay does not resolve the dead delivery")
	require.EqualValues(t, 2, a.ends("orders.dlq"), "Kafka keeps them")
	a.check()
}

// died returns how many deaths alerts of a kind are about.
func (l *alertLog) died(kind outbox.AlertKind) (n int) {
	for _, a := range l.of(kind) {
		n += a.Died
	}
	return n
}
