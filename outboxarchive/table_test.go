package outboxarchive_test

import (
	"context"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
)

// The table keeps each event of outbox column by column, and its record byte by byte.
func TestTable(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	table := f.table(t)
	f.mixed(t, newRand(t), 60)
	before, recorded := f.columns(t, "outbox"), f.recorded(t)
	f.archiveAll(t, table.Archive)
	require.Equal(t, before, f.columns(t, "outbox_archive"))
	archived := events(t, table, outboxarchive.Filter{})
	requireRecorded(t, recorded, archived)
	requireSent(t, f, archived)
}

// kafkaPlace is a part of an element of ArchivedEvent.Sent.
type kafkaPlace struct {
	Partition int32
	Offset    int64
}

// requireRecorded requires that an archive has what was recorded. Only an archive knows where events were sent.
func requireRecorded(t *testing.T, recorded, archived []outbox.ArchivedEvent) {
	t.Helper()
	archived = slices.Clone(archived)
	for i := range archived {
		archived[i].Sent = nil
	}
	require.Equal(t, recorded, archived)
}

// requireSent requires that the topic has exactly the records of events, in their order by key, and that these know
// where they are.
func requireSent(t *testing.T, f *archiveFixture, events []outbox.ArchivedEvent) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(f.brokers), kgo.ConsumeTopics(f.topic))...)
	require.NoError(t, err)
	defer client.Close()
	sent := map[string][]*kgo.Record{}
	for n := 0; n < len(events); {
		ctx, cancel := context.WithTimeout(background, testenv.Patience)
		fetches := client.PollFetches(ctx)
		cancel()
		require.NoError(t, fetches.Err())
		fetches.EachRecord(func(r *kgo.Record) { sent[string(r.Key)] = append(sent[string(r.Key)], r); n++ })
	}
	for _, e := range events {
		want, err := e.KafkaRecord(outbox.Binary)
		require.NoError(t, err)
		require.NotEmpty(t, sent[string(want.Key)])
		got := sent[string(want.Key)][0]
		sent[string(want.Key)] = sent[string(want.Key)][1:]
		require.Equal(t, want.Topic, got.Topic)
		require.Equal(t, string(want.Value), string(got.Value))
		require.Equal(t, want.Headers, got.Headers)
		var places []kafkaPlace
		require.NoError(t, json.Unmarshal(e.Sent, &places))
		require.Equal(t, []kafkaPlace{{got.Partition, got.Offset}}, places)
	}
}

// The rows of a partitioned outbox are archived before their partition is dropped, and again after a
// restart. The archive has each row once.
func TestTableOfPartitionedOutbox(t *testing.T) {
	t.Parallel()
	f := newFixtureOf(t, 20)
	table := f.table(t)
	f.mixed(t, newRand(t), 50)
	recorded := f.recorded(t)
	f.exec(t, `SELECT setval('{schema}.outbox_id_seq', 1000)`) // the partition of the last id is not dropped
	f.mixed(t, newRand(t), 1)
	relay, err := outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), f.quick(table.Archive))
	require.NoError(t, err)
	for range 2 {
		stop := testenv.Run(t, relay.Run)
		require.Eventually(t, func() bool { return f.count(t, "outbox") < 30 }, testenv.Patience, 10*time.Millisecond)
		stop()
	}
	require.GreaterOrEqual(t, f.count(t, "outbox_archive"), 21)
	requireRecorded(t, recorded, events(t, table, outboxarchive.Filter{})[:len(recorded)])
}

// archive archives events that are not in outbox.
func archive(t testing.TB, db *pgxpool.Pool, table *outboxarchive.Table, events ...outbox.ArchivedEvent) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(background, db, func(tx pgx.Tx) error { return table.Archive(background, tx, events) }))
}

func (f *archiveFixture) numbered(rng *rand.Rand, id int, at time.Time) outbox.ArchivedEvent {
	e := f.event(rng, id, at)
	e.OutboxID = int64(id)
	return e
}

func utc(text string) time.Time {
	at, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		panic(err)
	}
	return at
}

var monthTests = []struct{ at, partition string }{
	{"2026-02-28T23:59:59.999999Z", "outbox_archive_2026_02"},
	{"2026-03-01T00:00:00Z", "outbox_archive_2026_03"},
	{"2026-03-01T13:00:00+13:00", "outbox_archive_2026_03"},
	{"2026-03-01T12:59:59+13:00", "outbox_archive_2026_02"},
	{"2026-02-28T19:00:00-05:00", "outbox_archive_2026_03"},
	{"2024-02-29T12:00:00Z", "outbox_archive_2024_02"},
	{"2025-12-31T23:59:59.999999Z", "outbox_archive_2025_12"},
	{"2026-01-01T00:00:00Z", "outbox_archive_2026_01"},
	{"1999-07-04T00:00:00Z", "outbox_archive_1999_07"},
	{"0001-01-01T00:00:00Z", "outbox_archive_0001_01"},
}

// An event is in the partition of its month in UTC, in any time zone of a session. A missing partition is
// made.
func TestTableMonths(t *testing.T) {
	t.Parallel()
	for _, zone := range []string{"UTC", "Pacific/Auckland", "America/New_York"} {
		t.Run(zone, func(t *testing.T) {
			t.Parallel()
			f, rng := newFixture(t), newRand(t)
			f.table(t)
			db := testenv.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["TimeZone"] = zone })
			table, err := outboxarchive.NewTable(db, f.config())
			require.NoError(t, err)
			for i, tt := range monthTests {
				archive(t, db, table, f.numbered(rng, i, utc(tt.at)))
				var partition string
				require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT c.relname FROM {schema}.outbox_archive AS a JOIN pg_class AS c ON c.oid = a.tableoid WHERE id = $1`), i).Scan(&partition))
				require.Equal(t, tt.partition, partition, tt.at)
			}
			partitions, err := table.Partitions(background)
			require.NoError(t, err)
			for _, p := range partitions {
				require.Equal(t, p.Name, "outbox_archive_"+p.From.UTC().Format("2006_01"))
				require.True(t, p.From.UTC().AddDate(0, 1, 0).Equal(p.Until), p.Name)
			}
			got := events(t, table, outboxarchive.Filter{Since: utc("2026-03-01T00:00:00Z"), Until: utc("2026-04-01T00:00:00Z")})
			require.Len(t, got, 3)
		})
	}
}

// Ensure makes partitions in advance, beginning with the oldest event. Many processes may call it at once.
func TestTableEnsure(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.insert(t, f.event(newRand(t), 1, time.Now().AddDate(0, -4, 0)))
	table, err := outboxarchive.NewTable(f.db, f.config())
	require.NoError(t, err)
	_, err = table.Partitions(background)
	require.ErrorIs(t, err, outboxarchive.ErrNoTable)
	err = pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error { return table.Archive(background, tx, f.recorded(t)) })
	require.ErrorIs(t, err, outboxarchive.ErrNoTable)
	var all sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		all.Go(func() { errs[i] = table.Ensure(background) })
	}
	all.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	partitions, err := table.Partitions(background)
	require.NoError(t, err)
	require.GreaterOrEqual(t, len(partitions), 8)
	require.Equal(t, time.Now().UTC().AddDate(0, -4, 0).Format("2006_01"), strings.TrimPrefix(partitions[0].Name, "outbox_archive_"))
}

// Relays that need the same new partition wait for each other. No event is lost.
func TestTableByManyRelays(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	table := f.table(t)
	var all sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		var batch []outbox.ArchivedEvent
		for n := range 36 {
			batch = append(batch, f.numbered(rng, i*1000+n, time.Date(2001, time.Month(n+1), 1, 0, 0, 0, 0, time.UTC)))
		}
		all.Go(func() {
			errs[i] = pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error { return table.Archive(background, tx, batch) })
		})
	}
	all.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.Equal(t, 8*36, f.count(t, "outbox_archive"))
}

// An event that is archived twice is in the archive once. Another event with the same id, after a failover,
// is in the archive too.
func TestTableTwice(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	table := f.table(t)
	at := utc("2026-05-05T05:05:05.555555Z")
	one, other := f.numbered(rng, 1, at), f.numbered(rng, 1, at)
	archive(t, f.db, table, one)
	archive(t, f.db, table, one, other)
	archive(t, f.db, table)
	require.Len(t, events(t, table, outboxarchive.Filter{}), 2)
	require.Error(t, table.Archive(background, nil, []outbox.ArchivedEvent{one}))
}

// The role of a relay needs only the right to insert and the right to call one function. With these rights
// it can neither read nor change the archive, nor make partitions far ahead.
func TestTableRights(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	f.table(t)
	role := "archiver_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	f.exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() { f.exec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	f.exec(t, `GRANT USAGE ON SCHEMA {schema} TO `+role)
	as := func(do func(pgx.Tx) error) error {
		return pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
			if _, err := tx.Exec(background, `SET LOCAL ROLE `+role); err != nil {
				return err
			}
			return do(tx)
		})
	}
	table, err := outboxarchive.NewTable(f.db, f.config())
	require.NoError(t, err)
	put := func(tx pgx.Tx) error {
		return table.Archive(background, tx, []outbox.ArchivedEvent{f.numbered(rng, 1, utc("2011-01-01T00:00:00Z"))})
	}
	require.ErrorContains(t, as(put), "permission denied")
	f.exec(t, `GRANT EXECUTE ON FUNCTION {schema}.outbox_archive_prepare(timestamptz[]) TO `+role)
	require.ErrorContains(t, as(put), "permission denied")
	f.exec(t, `GRANT INSERT ON {schema}.outbox_archive TO `+role)
	require.NoError(t, as(put))
	for _, sql := range []string{`SELECT FROM {schema}.outbox_archive`, `DELETE FROM {schema}.outbox_archive`, `UPDATE {schema}.outbox_archive SET id = 1`, `TRUNCATE {schema}.outbox_archive`,
		`SELECT FROM {schema}.outbox_archive_2011_01`, `INSERT INTO {schema}.outbox_archive_2011_01 SELECT`, `DROP TABLE {schema}.outbox_archive_2011_01`} {
		err := as(func(tx pgx.Tx) error { _, err := tx.Exec(background, f.sql(sql)); return err })
		require.Error(t, err, sql)
	}
	for _, times := range []string{`NULL`, `'infinity'`, `now() + interval '500 days'`} {
		err := as(func(tx pgx.Tx) error {
			_, err := tx.Exec(background, f.sql(`SELECT {schema}.outbox_archive_prepare(ARRAY[`+times+`]::timestamptz[])`))
			return err
		})
		require.ErrorContains(t, err, "there is no partition", times)
	}
}

// Where only the function is missing, Ensure makes it again without rights for others, and leaves those on the table.
// Where the function is there, its rights stay.
func TestTableRightsOfAFunctionAnew(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.table(t)
	role := "archiver_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	f.exec(t, `CREATE ROLE `+role)
	t.Cleanup(func() { f.exec(t, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	f.exec(t, `GRANT USAGE ON SCHEMA {schema} TO `+role+`; GRANT INSERT ON {schema}.outbox_archive TO `+role)
	prepare := func() error {
		return pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
			if _, err := tx.Exec(background, `SET LOCAL ROLE `+role); err != nil {
				return err
			}
			_, err := tx.Exec(background, f.sql(`SELECT {schema}.outbox_archive_prepare('{2011-01-01}')`))
			return err
		})
	}
	require.ErrorContains(t, prepare(), "permission denied")
	f.exec(t, `DROP FUNCTION {schema}.outbox_archive_prepare(timestamptz[])`)
	f.table(t)
	require.ErrorContains(t, prepare(), "permission denied")
	var may bool
	require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT has_table_privilege($1, '{schema}.outbox_archive', 'INSERT')`), role).Scan(&may))
	require.True(t, may)
	f.exec(t, `GRANT EXECUTE ON FUNCTION {schema}.outbox_archive_prepare(timestamptz[]) TO `+role)
	f.table(t)
	require.NoError(t, prepare())
}

// Expire drops a partition when all its events are old enough, but not while a session reads it.
func TestTableExpire(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	f.table(t)
	cfg := f.config()
	cfg.KeepMonths = 6
	table, err := outboxarchive.NewTable(f.db, cfg)
	require.NoError(t, err)
	now := time.Now().UTC()
	month := func(n int) time.Time {
		return time.Date(now.Year(), now.Month()+time.Month(n), 1, 0, 0, 0, 0, time.UTC)
	}
	for i, n := range []int{-9, -8, -7, -6, -5, 0} {
		archive(t, f.db, table, f.numbered(rng, i, month(n)))
	}
	reading, err := f.db.Begin(background)
	require.NoError(t, err)
	defer func() { require.NoError(t, reading.Rollback(background)) }()
	_, err = reading.Exec(background, f.sql(`SELECT FROM {schema}.outbox_archive`))
	require.NoError(t, err)
	_, err = table.Expire(background, why)
	require.ErrorContains(t, err, "lock")
	require.Empty(t, f.expired(t))
	require.NoError(t, reading.Rollback(background))
	reading, err = f.db.Begin(background)
	require.NoError(t, err)

	dropped, err := table.Expire(background, why)
	require.NoError(t, err)
	require.Len(t, dropped, 3)
	require.Equal(t, 3, f.count(t, "outbox_archive"))
	var names []string
	for _, p := range dropped {
		names = append(names, "/"+p.Schema+"."+p.Name)
	}
	require.Equal(t, names, f.expired(t))
	dropped, err = table.Expire(background, why)
	require.NoError(t, err)
	require.Empty(t, dropped)
	cfg.KeepMonths = -1
	forever, err := outboxarchive.NewTable(f.db, cfg)
	require.NoError(t, err)
	dropped, err = forever.Expire(background, why)
	require.NoError(t, err)
	require.Empty(t, dropped)
}

// A drop and its row in outbox_audit are one transaction, and nothing is dropped for an operator or a reason that the
// audit does not take.
func TestTableExpireIsAudited(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	table := f.table(t)
	archive(t, f.db, table, f.numbered(rng, 1, utc("2011-01-01T00:00:00Z")))
	for _, bad := range []outboxops.AuditInfo{{}, {Operator: "kim"}, {Operator: "kim", Reason: "\u200b"}, {Operator: "\t", Reason: "over"}} {
		_, err := table.Expire(background, bad)
		require.ErrorContains(t, err, "field ", "%q", bad)
	}
	f.exec(t, `ALTER TABLE {schema}.outbox_audit ADD CONSTRAINT full_disk CHECK (action <> 'expire')`)
	_, err := table.Expire(background, why)
	require.ErrorContains(t, err, "full_disk")
	require.Equal(t, 1, f.count(t, "outbox_archive"))
	f.exec(t, `ALTER TABLE {schema}.outbox_audit RENAME TO outbox_audits`)
	_, err = table.Expire(background, why)
	require.ErrorIs(t, err, outbox.ErrNotMigrated)
	require.Equal(t, 1, f.count(t, "outbox_archive"))
}

// If a relay is killed while it archives, no event is lost and none is archived twice.
func TestTableKilled(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	table := f.table(t)
	f.mixed(t, rng, 4000) // several batches of retention
	recorded := f.recorded(t)
	for range 3 {
		left := f.count(t, "outbox")
		kill := f.startChild(t, "")
		require.Eventually(t, func() bool { return f.count(t, "outbox") < left-rng.IntN(50) || f.count(t, "outbox") == 0 }, testenv.Patience, time.Millisecond)
		kill()
		var both int
		require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT count(*) FROM {schema}.outbox JOIN {schema}.outbox_archive USING (id)`)).Scan(&both))
		require.Zero(t, both, "an event is in one place")
		requireRecorded(t, recorded, events(t, table, outboxarchive.Filter{}))
	}
	f.archiveAll(t, table.Archive)
	require.Equal(t, len(recorded), f.count(t, "outbox_archive"))
	requireRecorded(t, recorded, events(t, table, outboxarchive.Filter{}))
}

var filterTests = []struct {
	name   string
	filter outboxarchive.Filter
	want   func(outbox.ArchivedEvent) bool
}{
	{"all", outboxarchive.Filter{}, func(outbox.ArchivedEvent) bool { return true }},
	{"behind an event", outboxarchive.Filter{After: 20}, func(e outbox.ArchivedEvent) bool { return e.OutboxID > 20 }},
	{"of types", outboxarchive.Filter{Types: []string{"test.archive.kind0.v1", "test.archive.kind2.v1"}}, func(e outbox.ArchivedEvent) bool { return e.Type != "test.archive.kind1.v1" }},
	{"of an aggregate type", outboxarchive.Filter{AggregateType: "Thing"}, func(outbox.ArchivedEvent) bool { return true }},
	{"of another aggregate type", outboxarchive.Filter{AggregateType: "None"}, func(outbox.ArchivedEvent) bool { return false }},
	{"of an aggregate", outboxarchive.Filter{AggregateType: "Thing", AggregateID: "key-1 a"}, func(e outbox.ArchivedEvent) bool { return e.AggregateID == "key-1 a" }},
	{"of keys", outboxarchive.Filter{Keys: []string{"own a", "key-1 a"}}, func(e outbox.ArchivedEvent) bool {
		return e.PartitionKey == "own a" || e.PartitionKey == "" && e.AggregateID == "key-1 a"
	}},
	{"of another topic", outboxarchive.Filter{Topics: []string{"archive-events"}}, func(e outbox.ArchivedEvent) bool { return e.Topic == "" }},
}

// A filter chooses the same events from the table, while some are still in outbox, and from files.
func TestFilter(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	table := f.table(t)
	f.mixed(t, newRand(t), 60)
	f.exec(t, `SET outbox.keep_xid = 'on'; UPDATE {schema}.outbox SET topic = NULL WHERE id % 7 = 0; RESET outbox.keep_xid`)
	all := f.recorded(t)
	folder, files := newFolder(t)
	require.NoError(t, files.Archive(background, nil, all[:35]))
	require.NoError(t, files.Archive(background, nil, all[25:]))
	archive(t, f.db, table, all[:30]...)
	f.exec(t, `DELETE FROM {schema}.outbox WHERE id <= 25`) // events 26 to 30 are in both tables
	var others []*outboxarchive.Table                       // in the other modes of a pool
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeExec, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec} {
		other, err := outboxarchive.NewTable(testenv.Pool(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }), f.config())
		require.NoError(t, err)
		others = append(others, other)
	}
	for _, tt := range filterTests {
		var want []outbox.ArchivedEvent
		for _, e := range all {
			if tt.want(e) {
				want = append(want, e)
			}
		}
		require.Equal(t, want, events(t, table, tt.filter), tt.name)
		require.Equal(t, want, events(t, folder, tt.filter), tt.name)
		for _, other := range others {
			require.Equal(t, want, events(t, other, tt.filter), tt.name)
		}
	}
	one := outboxarchive.Filter{EventIDs: []string{all[3].EventID, all[40].EventID}, Since: all[1].CreatedAt, Until: all[40].CreatedAt}
	require.Equal(t, all[3:4], events(t, table, one))
	require.Equal(t, all[3:4], events(t, folder, one))
	for _, other := range others {
		require.Equal(t, all[3:4], events(t, other, one))
	}
}

var badFilters = []struct {
	name   string
	filter outboxarchive.Filter
	says   string
}{
	{"negative", outboxarchive.Filter{After: -1}, "Filter.After"},
	{"reversed", outboxarchive.Filter{Since: utc("2026-01-02T00:00:00Z"), Until: utc("2026-01-01T00:00:00Z")}, "Filter.Since"},
	{"an id without a type", outboxarchive.Filter{AggregateID: "x"}, "Filter.AggregateType"},
	{"no UUID", outboxarchive.Filter{EventIDs: []string{"x"}}, "Filter.EventIDs"},
}

func TestBadFilters(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	folder, _ := newFolder(t)
	for _, tt := range badFilters {
		for _, source := range []outboxarchive.Source{f.table(t), folder} {
			n := 0
			for _, err := range source.Events(background, tt.filter) {
				n++
				require.ErrorContains(t, err, tt.says, tt.name)
			}
			require.Equal(t, 1, n)
		}
	}
}

// PostgreSQL cannot print an event, here because of a division by zero. The event is reported with its id,
// and the other events are read. PostgreSQL calls expensive functions last; a cheap one fails in the page of an earlier
// event of the archive, too.
func TestUnreadableEvent(t *testing.T) {
	t.Parallel()
	for _, cost := range []string{"1", "100000"} {
		f := newFixture(t)
		table := f.table(t)
		f.mixed(t, newRand(t), 20)
		archive(t, f.db, table, f.recorded(t)[:6]...)
		f.exec(t, `DELETE FROM {schema}.outbox WHERE id <= 6`)
		f.exec(t, `ALTER TABLE {schema}.outbox RENAME TO stored`)
		f.exec(t, `CREATE FUNCTION {schema}.print(id bigint, payload jsonb) RETURNS jsonb LANGUAGE plpgsql STABLE COST `+cost+` AS $$ BEGIN
			RETURN CASE id WHEN 7 THEN to_jsonb(1 / (id - 7)) ELSE payload END; END; $$`)
		f.exec(t, `CREATE VIEW {schema}.outbox AS SELECT id, event_id, event_type, source, aggregate_type, aggregate_id, {schema}.print(id, payload) AS payload,
			payload_bytes, content_type, topic, partition_key, headers, occurred_at, created_at, size, expires_at FROM {schema}.stored`)
		requireUnreadable(t, table, 7, 20)
	}
}

// requireUnreadable requires that a source has the events from 1 to last, of which one is unreadable.
func requireUnreadable(t *testing.T, source outboxarchive.Source, bad, last int) {
	t.Helper()
	n := 0
	for e, err := range source.Events(background, outboxarchive.Filter{}) {
		n++
		require.EqualValues(t, n, e.OutboxID, "%v", err)
		if n != bad {
			require.NoError(t, err)
			continue
		}
		var unreadable *outboxarchive.ReadError
		require.ErrorAs(t, err, &unreadable)
		require.EqualValues(t, bad, unreadable.OutboxID)
	}
	require.Equal(t, last, n)
}

// The headers of an event that expires are damaged. The readable events before it are read, those in the archive too.
func TestDamagedHeaders(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	table := f.table(t)
	f.mixed(t, newRand(t), 5)
	archive(t, f.db, table, f.recorded(t)...)
	f.exec(t, `DELETE FROM {schema}.outbox`)
	f.exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at, expires_at, headers)
		SELECT gen_random_uuid(), 'test.archive.kind0.v1', 's', 't', 'k', '1', 'application/json', now(), now() + interval '1 h',
		       jsonb_build_object('x', (SELECT string_agg(md5(g::text), '') FROM generate_series(1, 1000) AS g))`)
	testenv.Damage(t, f.db, f.schema, "outbox")
	f.mixed(t, newRand(t), 2)
	requireUnreadable(t, table, 6, 8)
}

// An event that prints more than any recorder may record is reported with its id and size, and not read.
func TestHugeEventIsNotRead(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	table := f.table(t)
	f.mixed(t, newRand(t), 2)
	f.exec(t, `INSERT INTO {schema}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, occurred_at)
		SELECT gen_random_uuid(), 'test.huge.v1', 's', 't', 'k', jsonb_agg(1e131071), 'application/json', now() FROM generate_series(1, 900)`)
	f.mixed(t, newRand(t), 2)
	recorded, err := outboxarchive.Recorded(f.db, f.schema)
	require.NoError(t, err)
	for name, source := range map[string]outboxarchive.Source{"table": table, "recorded": recorded} {
		var ids []int64
		for e, err := range source.Events(background, outboxarchive.Filter{}) {
			ids = append(ids, e.OutboxID)
			if e.OutboxID != 3 {
				require.NoError(t, err, name)
				continue
			}
			var huge *outboxarchive.ReadError
			require.ErrorAs(t, err, &huge, name)
			require.EqualValues(t, 3, huge.OutboxID)
			require.ErrorContains(t, err, "117966", "131,074 bytes for each number")
			require.Empty(t, e.Payload)
		}
		require.Equal(t, []int64{1, 2, 3, 4, 5}, ids, name)
	}
}

func TestNewTable(t *testing.T) {
	t.Parallel()
	_, err := outboxarchive.NewTable(nil, outboxarchive.TableConfig{Schema: "$user", OutboxSchema: "\x00", KeepMonths: 1e6})
	for _, says := range []string{"db ", "Schema", "OutboxSchema", "KeepMonths"} {
		require.ErrorContains(t, err, says)
	}
	require.ErrorIs(t, err, outbox.ErrNilArgument)
	_, err = outboxarchive.Recorded(nil, "")
	require.ErrorIs(t, err, outbox.ErrNilArgument)
}

// For any times of events, Ensure makes the archive, and Archive finds the partitions.
func TestTableOddTimes(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.mixed(t, newRand(t), 4)
	f.exec(t, `SET outbox.keep_xid = 'on'; UPDATE {schema}.outbox SET created_at = '-infinity' WHERE id = 1; UPDATE {schema}.outbox SET created_at = '0044-03-15 BC' WHERE id = 2;
		UPDATE {schema}.outbox SET occurred_at = 'infinity' WHERE id = 3; RESET outbox.keep_xid`)
	table := f.table(t)
	recorded := f.recorded(t)
	require.Len(t, recorded, 4)
	archive(t, f.db, table, recorded...)
	f.exec(t, `DELETE FROM {schema}.outbox`)
	requireRecorded(t, recorded, events(t, table, outboxarchive.Filter{}))
}

// If a partition was moved to another schema, Expire drops it there. It does not drop a table of the same
// name in the schema of the archive.
func TestTableExpireElsewhere(t *testing.T) {
	t.Parallel()
	f, rng := newFixture(t), newRand(t)
	table := f.table(t)
	archive(t, f.db, table, f.numbered(rng, 1, utc("2011-01-01T00:00:00Z")))
	cold := strings.ReplaceAll(f.schema, "Test", "cold 'n")
	quoted := pgx.Identifier{cold}.Sanitize()
	f.exec(t, `CREATE SCHEMA `+quoted)
	t.Cleanup(func() { f.exec(t, `DROP SCHEMA `+quoted+` CASCADE`) })
	f.exec(t, `ALTER TABLE {schema}.outbox_archive_2011_01 SET SCHEMA `+quoted)
	f.exec(t, `CREATE TABLE {schema}.outbox_archive_2011_01 AS SELECT 'of somebody' AS thing`)
	dropped, err := table.Expire(background, why)
	require.NoError(t, err)
	require.Len(t, dropped, 1)
	require.Equal(t, 1, f.count(t, "outbox_archive_2011_01"), "it was no partition")
	require.Zero(t, f.count(t, "outbox_archive"))
	require.Equal(t, []string{"/" + cold + ".outbox_archive_2011_01"}, f.expired(t))
}
