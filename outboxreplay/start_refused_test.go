package outboxreplay_test

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxreplay"
)

// start starts a group of the fixture's schema within a time.
func (f *startFixture) start(within time.Duration, group string, change func(*outboxreplay.StartConfig)) (outboxreplay.StartReport, error) {
	cfg := outboxreplay.StartConfig{Group: group, Archive: f.table, Schema: f.schema, Audit: audit}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithTimeout(background, within)
	defer cancel()
	return outboxreplay.StartGroup(ctx, f.db, testenv.KafkaOpts(f.brokers), cfg)
}

// A group that has begun is not new, and is left as it is.
func TestStartGroupThatHasBegun(t *testing.T) {
	t.Parallel()
	f := newStartFixture(t, 10)
	for _, kafka := range []bool{false, true} {
		group := map[bool]string{false: "workers", true: "consumers"}[kafka] + f.topic
		stop := f.group(t, group, kafka)
		table := map[bool]string{false: "event_subscription", true: "consumer_start"}[kafka]
		require.Eventually(t, func() bool { return f.count(t, table+" WHERE consumer_group = '"+group+"'") > 0 }, testenv.Patience, 10*time.Millisecond)
		stop()
		_, err := f.start(testenv.Patience, group, nil)
		require.ErrorIs(t, err, outboxreplay.ErrGroupBegun)
	}
	f.exec(t, `INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('noted', 't', 'i', 'a')`)
	_, err := f.start(testenv.Patience, "noted", nil)
	require.ErrorIs(t, err, outboxreplay.ErrGroupBegun)
	require.Zero(t, f.count(t, "outbox_audit"))
}

// A start is refused if events may be missing, and if there is no archive. A dry run changes nothing.
func TestStartGroupWithoutAllEvents(t *testing.T) {
	t.Parallel()
	f := newStartFixture(t, 10)
	dry := func(c *outboxreplay.StartConfig) { c.DryRun = true }
	report, err := f.start(testenv.Patience, "new", dry)
	require.NoError(t, err)
	require.Equal(t, outboxreplay.StartReport{First: 1, Archived: 10}, report)
	f.exec(t, `CREATE TABLE {schema}.kept AS SELECT * FROM {schema}.outbox_archive; DELETE FROM {schema}.outbox_archive WHERE id > 7`)
	_, err = f.start(testenv.Patience, "new", dry)
	require.ErrorIs(t, err, outboxreplay.ErrIncomplete)
	require.ErrorContains(t, err, "the archive ends with outbox id 7, outbox is empty, and ids up to 10 are drawn")
	f.exec(t, `DELETE FROM {schema}.outbox_archive`)
	_, err = f.start(testenv.Patience, "new", dry)
	require.ErrorContains(t, err, "the archive ends with outbox id 0, outbox is empty, and ids up to 10 are drawn")
	f.exec(t, `INSERT INTO {schema}.outbox_archive SELECT * FROM {schema}.kept`)
	f.record(t, numbered(1)...)
	_, err = f.start(testenv.Patience, "new", dry)
	require.NoError(t, err)
	f.exec(t, `DELETE FROM {schema}.outbox_archive WHERE id > 8`)
	_, err = f.start(testenv.Patience, "new", dry)
	require.ErrorIs(t, err, outboxreplay.ErrIncomplete)
	require.ErrorContains(t, err, "the archive ends with outbox id 8, and outbox begins with 11")
	f.exec(t, `DELETE FROM {schema}.outbox_archive WHERE id = 1`)
	_, err = f.start(testenv.Patience, "new", nil)
	require.ErrorContains(t, err, "the first one has outbox id 2, not 1")
	_, err = f.start(testenv.Patience, "new", func(c *outboxreplay.StartConfig) { c.DryRun, c.Incomplete = true, true })
	require.NoError(t, err)
	require.Zero(t, f.count(t, "event_subscription"))
	f.exec(t, `DROP TABLE {schema}.outbox_archive`)
	_, err = f.start(testenv.Patience, "new", nil)
	require.ErrorIs(t, err, outboxarchive.ErrNoTable)
}

// months moves the first three of ten archived events to a month, and the next three to the month behind it. Both have
// expired.
func (f *startFixture) months(t testing.TB) {
	t.Helper()
	f.exec(t, `SELECT {schema}.outbox_archive_prepare(ARRAY['2011-01-02', '2011-02-02']::timestamptz[])`)
	f.exec(t, `UPDATE {schema}.outbox_archive SET created_at = CASE WHEN id <= 3 THEN '2011-01-02'::timestamptz ELSE '2011-02-02' END WHERE id <= 6`)
}

// A month that a group has still to get does not expire, and one that it has got does.
func TestStartGroupKeepsMonths(t *testing.T) {
	t.Parallel()
	f := newStartFixture(t, 10)
	f.months(t)
	_, err := f.start(time.Second, "new", nil)
	require.ErrorIs(t, err, context.DeadlineExceeded, "it waits for a process of the group")
	dropped, err := f.table.Expire(background, audit)
	require.ErrorIs(t, err, outboxops.ErrStatus)
	require.ErrorContains(t, err, "group new is starting, and has got its events up to outbox id 0 of 3")
	require.Empty(t, dropped)
	f.exec(t, `UPDATE {schema}.event_subscription SET started = 3`)
	dropped, err = f.table.Expire(background, audit)
	require.ErrorContains(t, err, "group new is starting, and has got its events up to outbox id 3 of 6")
	require.Len(t, dropped, 1)
	require.Equal(t, 7, f.count(t, "outbox_archive"))
	f.exec(t, `SELECT {schema}.outbox_finish_start('new', 3)`)
	dropped, err = f.table.Expire(background, audit)
	require.NoError(t, err)
	require.Len(t, dropped, 1)
}

// A month that expires between the look at the archive and the cut is missed at the beginning.
func TestStartGroupWhileAMonthExpires(t *testing.T) {
	t.Parallel()
	f := newStartFixture(t, 10)
	f.months(t)
	cut, err := f.db.Begin(background)
	require.NoError(t, err)
	defer func() { _ = cut.Rollback(background) }()
	_, err = cut.Exec(background, `SELECT pg_advisory_xact_lock(hashtextextended('outbox.rebase.' || $1, 0))`, f.schema)
	require.NoError(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := f.start(testenv.Patience, "new", nil)
		done <- err
	}()
	require.Eventually(t, func() bool {
		var waits bool
		err := f.db.QueryRow(background, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '%outbox_start_group%')`, f.schema).Scan(&waits)
		require.NoError(t, err)
		return waits
	}, testenv.Patience, 10*time.Millisecond)
	dropped, err := f.table.Expire(background, audit)
	require.NoError(t, err)
	require.Len(t, dropped, 2)
	require.NoError(t, cut.Rollback(background))
	err = <-done
	require.ErrorIs(t, err, outboxreplay.ErrIncomplete)
	require.ErrorContains(t, err, "the first one has outbox id 7, not 1")
	_, err = f.start(testenv.Patience, "new", nil)
	require.ErrorIs(t, err, outboxreplay.ErrIncomplete, "nor does another call go on")
	_, err = f.start(time.Second, "new", func(c *outboxreplay.StartConfig) { c.Incomplete = true })
	require.ErrorIs(t, err, context.DeadlineExceeded, "it waits for a process of the group")
	f.exec(t, `TRUNCATE {schema}.outbox_archive`)
	_, err = f.start(testenv.Patience, "new", nil)
	require.ErrorContains(t, err, "there are none up to the cut, outbox id 10")
}

// A role that may not read the sequence of ids knows from the positions of relays which ids are drawn.
func TestStartGroupWithoutASequence(t *testing.T) {
	testenv.Direct(t)
	t.Parallel()
	f := newStartFixture(t, 10)
	role := "starter_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	f.exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() { f.exec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	f.exec(t, `GRANT USAGE ON SCHEMA {schema} TO `+role+`; GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO `+role)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.Database = f.db.Config().ConnConfig.Database
		cfg.ConnConfig.RuntimeParams["role"] = role
	})
	dry := func(c *outboxreplay.StartConfig) { c.DryRun = true }
	start := func() error {
		_, err := startOf(db, f.schema, "new", "", f.brokers[0], dry)
		return err
	}
	require.NoError(t, start())
	f.exec(t, `INSERT INTO {schema}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch) VALUES ('r', 9, '1:1:', 12, 1, 1), ('s', 9, '1:1:', 11, 1, 1)`)
	require.ErrorContains(t, start(), "the archive ends with outbox id 10, outbox is empty, and ids up to 12 are drawn")
}

// The topics of all handlers have to be named, because the others would be read from another place.
func TestStartGroupWithoutATopic(t *testing.T) {
	t.Parallel()
	f := newStartFixture(t, 10)
	testenv.CreateTopic(t, f.brokers, "other-"+f.topic, 1)
	topics := func(c *outboxreplay.StartConfig) { c.Topics = []string{"other-" + f.topic} }
	_, err := f.start(time.Second, "new-"+f.topic, topics)
	require.ErrorIs(t, err, context.DeadlineExceeded, "it waits for a process of the group")
	f.group(t, "new-"+f.topic, true)
	_, err = f.start(testenv.Patience, "new-"+f.topic, topics)
	require.ErrorContains(t, err, "group new-"+f.topic+" has handlers for topic "+f.topic+", which was not named when it was started")
	require.Zero(t, f.count(t, "event_delivery"))
}

// What was committed after the cut does not come from the archive, however low its id is. What was committed before
// does not come from Kafka or outbox. Failed events are tried again, and later ones of their key wait. Tombstones stay
// tombstones.
func TestStartGroupAtACut(t *testing.T) {
	t.Parallel()
	for _, kafka := range []bool{false, true} {
		t.Run(map[bool]string{false: "workers", true: "consumers"}[kafka], func(t *testing.T) {
			t.Parallel()
			testStartAtACut(t, kafka)
		})
	}
}

func testStartAtACut(t *testing.T, kafka bool) {
	f := newStartFixture(t, 10)
	f.exec(t, `UPDATE {schema}.outbox_archive SET payload = NULL, content_type = '' WHERE id = 5`)
	slow, err := f.db.Begin(background)
	require.NoError(t, err)
	defer slow.Rollback(background)
	require.NoError(t, f.rec.Record(background, slow, sale{Product: "slow", Number: 1}))
	f.record(t, sale{Product: "p0", Number: 11})
	topics := func(c *outboxreplay.StartConfig) {
		c.Incomplete = true // the slow transaction has the id behind the archive
		if kafka {
			c.Topics = []string{f.topic}
		}
	}
	_, err = f.start(time.Second, "new-"+f.topic, topics)
	require.ErrorIs(t, err, context.DeadlineExceeded, "it waits for a process of the group")
	require.NoError(t, slow.Commit(background))
	f.record(t, sale{Product: "p0", Number: 12}, sale{Product: "slow", Number: 2})
	f.relay(t, outbox.Binary, nil)

	var handled testenv.Kept[sale]
	failed := false
	handler := outbox.Handle("COUNT", func(_ context.Context, _ pgx.Tx, e sale, m outbox.Metadata) error {
		if m.Tombstone {
			e = sale{Product: m.Subject, Number: 5}
		}
		if e.Product == "p0" && e.Number == 3 && !failed {
			failed = true
			return context.DeadlineExceeded
		}
		handled.Add(e)
		return nil
	})
	cfg := outbox.HandlerConfig{Schema: f.schema, Logger: slog.New(slog.DiscardHandler), Retry: outbox.RetryPolicy{RetryWait: 100 * time.Millisecond}, MaxPoll: 1}
	run := runnerOf(t, f.db, f, kafka, cfg, handler)
	testenv.Run(t, run)
	report, err := f.start(testenv.Patience, "new-"+f.topic, topics)
	require.NoError(t, err)
	require.EqualValues(t, 11, report.Deliveries, "not that of the slow transaction")
	require.Eventually(t, func() bool { return len(handled.All()) >= 14 }, testenv.Patience, 10*time.Millisecond)
	next := map[string]int{}
	for _, e := range handled.All() {
		next[e.Product]++
		require.Equal(t, next[e.Product], e.Number, "%v", handled.All())
	}
	require.Equal(t, map[string]int{"p0": 12, "slow": 2}, next)
	require.Equal(t, 1, f.count(t, "outbox_audit WHERE action = 'start-group' AND consumer_group = 'new-"+f.topic+"'"))
}

// runnerOf returns the Run of a worker or a consumer of the group.
func runnerOf(t *testing.T, db *pgxpool.Pool, f *startFixture, kafka bool, cfg outbox.HandlerConfig, h outbox.Handler) func(context.Context) error {
	t.Helper()
	if kafka {
		c, err := outbox.NewConsumer(db, testenv.KafkaOpts(f.brokers), f.events, "new-"+f.topic, outbox.ConsumerConfig{HandlerConfig: cfg}, h)
		require.NoError(t, err)
		return c.Run
	}
	w, err := outbox.NewWorker(db, f.events, "new-"+f.topic, outbox.WorkerConfig{HandlerConfig: cfg}, h)
	require.NoError(t, err)
	return w.Run
}

// damage has PostgreSQL lose the payload of an event.
func (f *startFixture) damage(t *testing.T, table string, id int64) {
	t.Helper()
	testenv.UpdateEvents(t, f.db, pg.InSchema(`UPDATE {schema}.`+table+` SET payload = to_jsonb($1::text) WHERE id = $2`, f.schema), random(20_000), id)
	var name string
	require.NoError(t, f.db.QueryRow(background, pg.InSchema(`SELECT c.relname FROM {schema}.`+table+` AS o JOIN pg_class AS c ON c.oid = o.tableoid WHERE o.id = $1`, f.schema), id).Scan(&name))
	testenv.Damage(t, f.db, f.schema, name)
}

// An archived event that cannot be read ends a start behind the events in front of it. With Incomplete the group gets
// all others. One that is recorded behind the cut is none of the start's.
func TestStartGroupWithAnUnreadableEvent(t *testing.T) {
	t.Parallel()
	f := newStartFixture(t, 30)
	f.damage(t, "outbox_archive", 15)
	_, err := f.start(time.Second, "new", nil)
	require.ErrorIs(t, err, context.DeadlineExceeded, "it waits for a process of the group")
	f.record(t, numbered(1)...)
	f.damage(t, "outbox", 31)

	stop := f.group(t, "new", false)
	_, err = f.start(testenv.Patience, "new", nil)
	require.ErrorIs(t, err, outboxreplay.ErrIncomplete)
	require.ErrorContains(t, err, "event of outbox id 15: ")
	require.EqualValues(t, 14, f.started(t, "new"))
	require.Equal(t, 14, f.count(t, "event_delivery"))
	report, err := f.start(testenv.Patience, "new", func(c *outboxreplay.StartConfig) { c.Incomplete = true })
	require.NoError(t, err)
	require.EqualValues(t, 15, report.Deliveries)
	require.Equal(t, 1, report.NotRead)
	require.EqualValues(t, 15, report.Failed[0].OutboxID)
	var unreadable *outboxarchive.ReadError
	require.ErrorAs(t, report.Failed[0].Err, &unreadable)
	stop()
	require.Equal(t, 29, f.count(t, "event_delivery WHERE position <= 30"))
	require.Equal(t, 1, f.count(t, "event_subscription WHERE state = 'active'"))
}
