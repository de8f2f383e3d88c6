package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/stretchr/testify/require"
)

// update has tests write the files that they would compare.
var update = flag.Bool("update", false, "write expected.txt and docs/cli.md")

var background = context.Background()

// commandFixture is where a test calls commands, on a schema or a database of its own.
type commandFixture struct {
	db      *pgxpool.Pool
	schema  string
	topic   string
	rec     *outbox.Recorder
	vars    map[string]string // the environment
	change  func(*env)        // before a call; may be nil
	stdin   string
	brokers []string
}

// happened is the event of these tests.
type happened struct {
	Key, Filler string
	At          time.Time
}

func (h happened) OccurredAt() time.Time { return h.At }
func (h happened) aggregateID() string   { return h.Key }

// newCommandFixture returns one whose schema is empty.
func newCommandFixture(t testing.TB) *commandFixture {
	t.Helper()
	db, schema := testenv.Schema(t)
	return commandFixtureAt(t, db, schema)
}

func commandFixtureAt(t testing.TB, db *pgxpool.Pool, schema string) *commandFixture {
	t.Helper()
	d := &commandFixture{db: db, schema: schema, topic: "cli-" + uuid.NewString(), brokers: testenv.Brokers(t)}
	d.vars = map[string]string{"DATABASE_URL": d.url("")}
	return d
}

// url returns the URL of the database, with parameters.
func (d *commandFixture) url(parameters string) string {
	c := d.db.Config().ConnConfig
	u := url.URL{Scheme: "postgres", User: url.UserPassword(c.User, c.Password), Host: fmt.Sprintf("%s:%d", c.Host, c.Port),
		Path: c.Database, RawQuery: "sslmode=disable" + parameters}
	return u.String()
}

// newShop is a fixture with tables, and with a recorder of events.
func newShop(t testing.TB) *commandFixture {
	t.Helper()
	db, schema := testenv.Migrated(t)
	return commandFixtureAt(t, db, schema).migrate(t)
}

func (d *commandFixture) migrate(t testing.TB) *commandFixture {
	t.Helper()
	require.NoError(t, outbox.Migrate(background, d.db, outbox.MigrateConfig{Schema: d.schema}))
	events, err := outbox.NewRegistry("test", outbox.Event("test.thing.happened.v1", "Thing", happened.aggregateID).Topic(d.topic))
	require.NoError(t, err)
	d.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{Schema: d.schema})
	require.NoError(t, err)
	return d
}

// withKafka makes commands use Kafka too.
func (d *commandFixture) withKafka(t testing.TB) *commandFixture {
	t.Helper()
	d.brokers = testenv.RealBrokers(t)
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	return d
}

func (d *commandFixture) record(t testing.TB, keys ...string) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(background, d.db, func(tx pgx.Tx) error {
		for _, key := range keys {
			if err := d.rec.Record(background, tx, happened{Key: key, At: time.Now()}); err != nil {
				return err
			}
		}
		return nil
	}))
}

// relay runs one until the test ends or stop is called.
func (d *commandFixture) relay(t testing.TB) (stop func()) {
	t.Helper()
	r, err := outbox.NewRelay(d.db, testenv.KafkaOpts(d.brokers), outbox.RelayConfig{Schema: d.schema, PollInterval: 10 * time.Millisecond,
		RetryInterval: 20 * time.Millisecond, Retry: outbox.RetryPolicy{MaxRetries: 1}, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	stop = testenv.Run(t, r.Run)
	require.Eventually(t, func() bool {
		relays, err := d.inspector(t).Relays(background)
		require.NoError(t, err)
		return len(relays) == 1 && relays[0].Holder != "" && !relays[0].MovedAt.IsZero()
	}, testenv.Patience, 10*time.Millisecond, "the relay leads")
	return stop
}

func (d *commandFixture) inspector(t testing.TB) *outboxops.Inspector {
	t.Helper()
	i, err := outboxops.NewInspector(d.db, outboxops.InspectorConfig{Schema: d.schema})
	require.NoError(t, err)
	return i
}

// exec runs a statement in which {s} is the schema.
func (d *commandFixture) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	_, err := d.db.Exec(background, strings.ReplaceAll(sql, "{s}", pgx.Identifier{d.schema}.Sanitize()), args...)
	require.NoError(t, err)
}

// fail puts events into outbox_failed, as a relay with a position would.
func (d *commandFixture) fail(t testing.TB, status string, keys ...string) {
	t.Helper()
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 'default', 0, pg_current_snapshot(), 0, system_identifier, 1 FROM pg_control_system()
		 WHERE NOT EXISTS (SELECT FROM {s}.outbox_cursor WHERE relay = 'default')`)
	d.exec(t, `INSERT INTO {s}.outbox_failed (outbox_id, parking_key, event_id, event_type, source, aggregate_type, aggregate_id, payload,
		content_type, topic, headers, occurred_at, created_at, retry_count, last_error, error_class, status)
		SELECT nextval('{s}.outbox_id_seq'), $1::text || '/' || key, gen_random_uuid(), 'test.thing.happened.v1', 'test', 'Thing', key,
		       '{"key": 1}', 'application/json', $1, '{"traceparent": "00-x"}', now(), now(), 3, E'too large\x1b[31m', 'message_too_large', $2
		  FROM unnest($3::text[]) AS key`, d.topic, status, keys)
}

// statuses returns the rows of outbox_failed by status.
func (d *commandFixture) statuses(t testing.TB) map[string]int {
	t.Helper()
	rows, err := d.db.Query(background, `SELECT status, count(*)::int FROM `+pgx.Identifier{d.schema, "outbox_failed"}.Sanitize()+` GROUP BY status`)
	require.NoError(t, err)
	all := map[string]int{}
	var status string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&status, &n}, func() error { all[status] = n; return nil })
	require.NoError(t, err)
	return all
}

// answer is the output and the exit code of a command.
type answer struct {
	code     int
	out, err string
}

// call runs a command line.
func (d *commandFixture) call(t testing.TB, args ...string) answer {
	t.Helper()
	return d.callWithin(t, background, args...)
}

func (d *commandFixture) callWithin(t testing.TB, ctx context.Context, args ...string) answer {
	t.Helper()
	var out, errs testenv.Buffer
	code := d.start(ctx, &out, &errs, args...)
	return answer{code, out.String(), errs.String()}
}

// start runs a command line whose output can be read meanwhile.
func (d *commandFixture) start(ctx context.Context, out, errs *testenv.Buffer, args ...string) int {
	e := &env{
		stdin: strings.NewReader(d.stdin), stdout: out, stderr: errs, width: usualWidth,
		getenv: func(name string) string { return d.vars[name] }, environ: d.environ, now: time.Now, user: func() string { return "kim" },
		globals: globals{timeout: defaultTimeout, schema: d.schema},
	}
	if d.change != nil {
		d.change(e)
	}
	return run(ctx, args, e)
}

// environ returns the variables as os.Environ does.
func (d *commandFixture) environ() (all []string) {
	for name, value := range d.vars {
		all = append(all, name+"="+value)
	}
	return all
}

// ok calls a command that must succeed, and returns its output.
func (d *commandFixture) ok(t testing.TB, args ...string) string {
	t.Helper()
	a := d.call(t, args...)
	require.Equal(t, exitOK, a.code, "%v: %s%s", args, a.out, a.err)
	require.Empty(t, a.err)
	return a.out
}

// json calls a command with --json and reads its output, which is one document.
func (d *commandFixture) json(t testing.TB, into any, code int, args ...string) {
	t.Helper()
	a := d.call(t, append(args, "--json")...)
	require.Equal(t, code, a.code, "%v: %s%s", args, a.out, a.err)
	unmarshal(t, a.out, into)
}

// unmarshal reads a text that is one document.
func unmarshal(t testing.TB, text string, into any) {
	t.Helper()
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	require.NoError(t, dec.Decode(into), text)
	require.False(t, dec.More(), "one document")
}

// requireNarrow requires of a text to fit into 80 columns.
func requireNarrow(t testing.TB, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		require.LessOrEqual(t, len([]rune(strings.TrimSuffix(line, "\n"))), usualWidth, line)
	}
}

// terminal has commands write to one, without colors.
func terminal(e *env) { e.outTTY, e.errTTY, e.noColor = true, true, true }
