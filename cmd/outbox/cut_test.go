package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// cutShop has a worker and a consumer of group stats, which only one of them may run.
type cutShop struct {
	*commandFixture
	events  *outbox.Registry
	handler outbox.Handler
}

func newCutShop(t *testing.T) *cutShop {
	t.Helper()
	d := &cutShop{commandFixture: newShop(t)}
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	d.exec(t, `CREATE TABLE {s}.effect (key text)`)
	var err error
	d.events, err = outbox.NewRegistry("test", outbox.Event("test.thing.happened.v1", "Thing", happened.aggregateID).Topic(d.topic))
	require.NoError(t, err)
	insert := `INSERT INTO ` + pgx.Identifier{d.schema, "effect"}.Sanitize() + ` VALUES ($1)`
	d.handler = outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, h happened, _ outbox.Metadata) error {
		_, err := tx.Exec(ctx, insert, h.Key)
		return err
	})
	return d
}

func (d *cutShop) config() outbox.HandlerConfig {
	return outbox.HandlerConfig{Schema: d.schema, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart}
}

func (d *cutShop) worker(t *testing.T) (stop func()) {
	t.Helper()
	w, err := outbox.NewWorker(d.db, d.events, "stats", outbox.WorkerConfig{HandlerConfig: d.config(), PollInterval: 20 * time.Millisecond}, d.handler)
	require.NoError(t, err)
	return testenv.Run(t, w.Run)
}

func (d *cutShop) consumer(t *testing.T) (stop func()) {
	t.Helper()
	c, err := outbox.NewConsumer(d.db, testenv.KafkaOpts(d.brokers), d.events, "stats", outbox.ConsumerConfig{HandlerConfig: d.config()}, d.handler)
	require.NoError(t, err)
	stop = testenv.Run(t, c.Run)
	require.Eventually(t, func() bool {
		var status struct{ Groups []subscriptionJSON }
		d.json(t, &status, exitOK, "cut", "status")
		return status.Groups[0].HasConsumer
	}, testenv.Patience, 10*time.Millisecond)
	return stop
}

func (d *cutShop) newRelay(t *testing.T, name string) (stop func()) {
	t.Helper()
	r, err := outbox.NewRelay(d.db, testenv.KafkaOpts(d.brokers), outbox.RelayConfig{Name: name, Schema: d.schema, PollInterval: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	return testenv.Run(t, r.Run)
}

func (d *cutShop) effects(t *testing.T, want string) {
	t.Helper()
	var got string
	require.Eventually(t, func() bool {
		require.NoError(t, d.db.QueryRow(background, `SELECT coalesce(string_agg(key, ' ' ORDER BY key), '') FROM `+pgx.Identifier{d.schema, "effect"}.Sanitize()).Scan(&got))
		return got == want
	}, testenv.Patience, 10*time.Millisecond, got)
}

type cutDoc struct {
	Action, Relay string
	DryRun        bool `json:"dry_run"`
	Finished      bool
	Groups        []any
	NotReady      []string `json:"not_ready"`
	Notes         []string
}

// A group is moved to Kafka and back by commands.
func TestCutCommands(t *testing.T) {
	t.Parallel()
	d := newCutShop(t)
	require.Equal(t, "No worker has run for any group.\n", d.ok(t, "cut", "status"))
	a := d.call(t, "cut", "to-kafka", "--group", "stats", "--relay", "r")
	require.Equal(t, exitProblems, a.code, a.err)
	require.Equal(t, "- the workers handle what was committed before this moment, and take nothing more\n- relay r waits for them, and then sends what comes after\n"+
		"- the consumers handle what it sends\nnot ready: no worker has run for group stats\nNothing is changed.\n", a.out)

	stopWorker := d.worker(t)
	d.record(t, "a", "b")
	d.effects(t, "a b")
	stopWorker()
	d.record(t, "c")
	d.change = terminal
	text := d.ok(t, "cut", "to-kafka", "--group", "stats", "--relay", "r")
	requireNarrow(t, text)
	require.Regexp(t, `(?m)^stats +active +\S+( s)? +0 +0 +no$`, text)
	require.Contains(t, text, "note: consumers of group stats have not begun to read each of its topics: the\ncut is not finished before\n")
	require.Contains(t, text, "Nothing is changed yet; --yes does it.\n")
	require.Contains(t, d.ok(t, "cut", "status"), "active")
	d.change = nil

	// The group has no worker: the wait is interrupted, and the cut canceled.
	d.change = func(e *env) { e.now = func() time.Time { return time.Now().Add(time.Hour) } }
	ctx, cancel := context.WithTimeout(background, 2*time.Second)
	a = d.callWithin(t, ctx, "cut", "to-kafka", "--group", "stats", "--relay", "r", "--yes", "--reason", "we have Kafka now")
	cancel()
	d.change = nil
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "waiting for stats: its workers have not taken all events\n")
	require.Contains(t, a.err, "The cut is made, and not finished: outbox cut finish --relay r")
	a = d.call(t, "cut", "finish", "--relay", "r", "--no-wait", "--reason", "now")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "the workers of group stats have not taken all events in front of the cut")
	require.Equal(t, "canceled: the groups of relay r go on as before\n", d.ok(t, "cut", "cancel", "--relay", "r", "--reason", "no worker runs"))
	require.Contains(t, d.call(t, "cut", "cancel", "--relay", "r", "--reason", "again").err, "there is no cut at relay r")

	stopWorker = d.worker(t)
	stopConsumer := d.consumer(t)
	stopRelay := d.newRelay(t, "r")
	var doc cutDoc
	d.json(t, &doc, exitOK, "cut", "to-kafka", "--group", "stats", "--relay", "r", "--yes", "--reason", "we have Kafka now")
	require.Equal(t, cutDoc{Action: "to-kafka", Relay: "r", Finished: true, Groups: []any{"stats"}, Notes: []string{}}, doc)
	stopWorker()
	d.record(t, "d")
	d.effects(t, "a b c d")
	require.Regexp(t, `(?m)^stats +left +\S+( s)? +0 +0 +yes +r$`, d.ok(t, "cut", "status"))

	doc = cutDoc{}
	d.json(t, &doc, exitProblems, "cut", "to-kafka", "--group", "stats,nobody", "--relay", "r")
	require.Equal(t, []string{"no worker has run for group nobody", "group stats is left already, at relay r", "relay r has begun already: it takes another name"}, doc.NotReady)
	doc = cutDoc{}
	d.json(t, &doc, exitProblems, "cut", "to-postgres", "--group", "new", "--relay", "r")
	require.Equal(t, []string{"group stats gets its events from relay r, too, and would get none any more"}, doc.NotReady)
	doc = cutDoc{}
	d.json(t, &doc, exitProblems, "cut", "to-postgres", "--group", "stats", "--relay", "q")
	require.Equal(t, []string{"group stats gets its events from relay r", "there is no relay q that sends"}, doc.NotReady)
	doc = cutDoc{}
	d.json(t, &doc, exitOK, "cut", "to-postgres", "--group", "stats", "--relay", "r")
	const others = "groups that keep their state in other databases are not known here, and get nothing more from relay r"
	require.Equal(t, others, doc.Notes[0])
	require.Contains(t, doc.Notes[1], "relay r runs (")
	stopRelay()
	d.record(t, "e")
	d.exec(t, `INSERT INTO {s}.consumer_start (consumer_group, topic, topic_id, partition) VALUES ('mail', 'orders', gen_random_uuid(), -1)`)
	doc = cutDoc{}
	d.json(t, &doc, exitProblems, "cut", "to-postgres", "--group", "stats", "--relay", "r", "--yes", "--reason", "Kafka goes")
	const mail = "group mail reads from Kafka, too, and would get nothing more: move it too, or name it with --leave-behind"
	require.Equal(t, []string{mail}, doc.NotReady)
	d.exec(t, `INSERT INTO {s}.event_subscription (consumer_group, state, started) VALUES ('mail', 'starting', 0)`)
	doc = cutDoc{}
	d.json(t, &doc, exitProblems, "cut", "to-postgres", "--group", "stats", "--relay", "r")
	require.Equal(t, []string{mail}, doc.NotReady, "it reads from Kafka once it has the events of the archive")
	d.exec(t, `DELETE FROM {s}.event_subscription WHERE consumer_group = 'mail'`)
	text = d.ok(t, "cut", "to-postgres", "--group", "stats", "--relay", "r", "--leave-behind", "mail", "--yes", "--no-wait", "--reason", "Kafka goes")
	require.Equal(t, "note: group mail reads from Kafka, too, and gets nothing more from here\nnote: "+others+"\n"+
		"The cut is made. outbox cut finish --relay r --reason TEXT waits for what is in front of it.\n", text)
	d.worker(t)
	require.Equal(t, "finished: the cut at relay r\n", d.ok(t, "cut", "finish", "--relay", "r", "--reason", "Kafka goes"))
	stopConsumer()
	d.effects(t, "a b c d e")
	require.Contains(t, d.call(t, "cut", "finish", "--relay", "r", "--early", "--reason", "again").err, "there is no cut at relay r")
	var status struct{ Groups []subscriptionJSON }
	d.json(t, &status, exitOK, "cut", "status")
	require.Equal(t, []string{"stats", "active", ""}, []string{status.Groups[0].Group, status.Groups[0].State, status.Groups[0].Relay})

	delete(d.vars, "KAFKA_BROKERS")
	for args, text := range map[string]string{
		"cut to-kafka --relay r":                                                 "--group is missing",
		"cut to-kafka --group a":                                                 "--relay is missing",
		"cut to-kafka --group a --relay r --yes":                                 "--reason is missing",
		"cut to-postgres --group a --relay r --yes --reason x":                   "which Kafka?",
		"cut finish --reason x":                                                  "--relay is missing",
		"cut finish --relay r":                                                   "--reason is missing",
		"cut finish --relay r --no-wait --early --reason x":                      "do not go together",
		"cut cancel --reason x":                                                  "--relay is missing",
		"cut cancel --relay r":                                                   "--reason is missing",
		"cut to-kafka --group a --relay r --rleay q":                             `did you mean "--relay"?`,
		"cut to-kafka --group a --relay r --yes --no-wait --operator x --json x": "is too much",
	} {
		a := d.call(t, strings.Fields(args)...)
		require.Equal(t, exitUsage, a.code, args)
		require.Contains(t, a.err, text, args)
	}
}

// A dry run says that the relay of a cut to PostgreSQL takes no other group.
func TestPlanToKafkaAtRelayThatEnds(t *testing.T) {
	t.Parallel()
	plan := planToKafka(cutState{names: []string{"b"}, relay: "r", groups: map[string]outboxops.Subscription{
		"a": {Group: "a", State: outboxops.SubscriptionReturning, Relay: "r"},
		"b": {Group: "b", State: outboxops.SubscriptionActive, HasConsumer: true},
	}})
	require.Equal(t, []string{"a cut at relay r is not finished"}, plan.NotReady)
}

// Moves from and to Debezium report a missing publication or slot. The module interop tests complete moves,
// with Debezium.
func TestCutDebeziumCommands(t *testing.T) {
	t.Parallel()
	d := newCutShop(t)
	const names = " --relay r --publication p --slot no_such_slot"
	for args, text := range map[string]string{
		"cut from-debezium --publication p --slot s":          "--relay is missing",
		"cut from-debezium --relay r --slot s":                "--publication is missing",
		"cut to-debezium --relay r --publication p":           "--slot is missing",
		"cut to-debezium" + names + " --yes":                  "--reason is missing",
		"cut to-debezium" + names + " --resume":               "--resume",
		"cut from-debezium" + names + " --resume --yes":       "--reason is missing",
		"cut from-debezium" + names + " --yes --reason why x": "is too much",
	} {
		a := d.call(t, strings.Fields(args)...)
		require.Equal(t, exitUsage, a.code, args)
		require.Contains(t, a.err, text, args)
	}
	for _, args := range []string{"cut from-debezium" + names, "cut to-debezium" + names, "cut from-debezium" + names + " --resume --yes --reason why", "cut from-debezium" + names + " --yes --reason why"} {
		a := d.call(t, strings.Fields(args)...)
		require.Equal(t, exitError, a.code, args)
		require.Contains(t, a.err, `there is no replication slot "no_such_slot"`, args)
	}
	a := d.call(t, strings.Fields("cut to-debezium"+names+" --yes --reason why")...)
	require.Contains(t, a.err, "there is no publication p")
}
