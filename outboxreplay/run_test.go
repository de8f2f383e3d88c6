package outboxreplay_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxreplay"
)

var (
	background = context.Background()
	audit      = outboxops.AuditInfo{Operator: "kim", Reason: "the view was lost"}
)

// sale is the event of these tests.
type sale struct {
	Product string
	Number  int
	Filler  string `json:",omitempty"`
}

func (sale) OccurredAt() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 678_900_000, time.UTC) }
func (s sale) product() string     { return s.Product }

const saleType = "test.sale.made.v1"

// replayFixture is a topic with events that a relay has sent.
type replayFixture struct {
	db      *pgxpool.Pool
	schema  string
	topic   string
	brokers []string
	events  *outbox.Registry
	rec     *outbox.Recorder
	deleted int // the number of the sales that are recorded as tombstones; 0 for none
}

// newFixture returns a fixture whose topic takes batches of up to maxBytes.
func newFixture(t testing.TB, maxBytes int) *replayFixture {
	t.Helper()
	f := fixtureOf(t, "replay-"+uuid.NewString(), testenv.RealBrokers(t))
	for _, topic := range []string{f.topic, outbox.DeadLetterTopic(f.topic)} {
		testenv.CreateTopic(t, f.brokers, topic, 2, "max.message.bytes", fmt.Sprint(maxBytes))
	}
	return f
}

// fixtureOf returns a fixture whose events go to a topic.
func fixtureOf(t testing.TB, topic string, brokers []string) *replayFixture {
	t.Helper()
	f := &replayFixture{topic: topic, brokers: brokers}
	f.db, f.schema = testenv.Migrated(t)
	var err error
	f.events, err = outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.product).Topic(f.topic))
	require.NoError(t, err)
	f.rec, err = outbox.NewRecorder(f.events, outbox.RecorderConfig{Schema: f.schema})
	require.NoError(t, err)
	return f
}

const largeEnough = 1 << 20

func (f *replayFixture) record(t testing.TB, sales ...sale) {
	t.Helper()
	ctx := outbox.WithTraceParent(outbox.WithCorrelationID(background, "corr é"), "00-"+strings.Repeat("a", 32)+"-"+strings.Repeat("b", 16)+"-01")
	require.NoError(t, pgx.BeginFunc(ctx, f.db, func(tx pgx.Tx) error {
		for _, s := range sales {
			event := outbox.With(s, outbox.EventOptions{Tombstone: f.deleted > 0 && s.Number == f.deleted})
			if err := f.rec.Record(ctx, tx, event); err != nil {
				return err
			}
		}
		return nil
	}))
}

// numbered returns n sales of a few products, numbered from 1.
func numbered(n int) []sale {
	sales := make([]sale, n)
	for i := range sales {
		sales[i] = sale{Product: fmt.Sprintf("p%d", i%5), Number: i + 1}
	}
	return sales
}

// relay runs a relay in a mode. Its retention archives old events.
func (f *replayFixture) relay(t testing.TB, mode outbox.Mode, archive func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error) (stop func()) {
	t.Helper()
	r, err := outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), outbox.RelayConfig{Schema: f.schema, Mode: mode, PollInterval: 10 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler), Retention: outbox.RetentionConfig{CursorsFor: 100 * time.Millisecond, Archive: archive}})
	require.NoError(t, err)
	return testenv.Run(t, r.Run)
}

func (f *replayFixture) count(t testing.TB, table string) (n int) {
	t.Helper()
	require.NoError(t, f.db.QueryRow(background, pg.InSchema("SELECT count(*) FROM {schema}."+table, f.schema)).Scan(&n))
	return n
}

// records returns the first n records of a topic by key.
func (f *replayFixture) records(t testing.TB, topic string, n int) map[string][]*kgo.Record {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(f.brokers), kgo.ConsumeTopics(topic))...)
	require.NoError(t, err)
	defer client.Close()
	byKey := map[string][]*kgo.Record{}
	for n > 0 {
		ctx, cancel := context.WithTimeout(background, testenv.Patience)
		fetches := client.PollFetches(ctx)
		cancel()
		require.NoError(t, fetches.Err(), "%d are missing", n)
		fetches.EachRecord(func(r *kgo.Record) { byKey[string(r.Key)] = append(byKey[string(r.Key)], r); n-- })
	}
	return byKey
}

// texts describe records without their offsets.
func texts(records []*kgo.Record) (all []string) {
	for _, r := range records {
		all = append(all, fmt.Sprintf("%s %q %q %q", r.Topic, r.Key, r.Value, r.Headers))
	}
	return all
}

func (f *replayFixture) recorded(t testing.TB) outboxarchive.Source {
	t.Helper()
	source, err := outboxarchive.Recorded(f.db, f.schema)
	require.NoError(t, err)
	return source
}

func (f *replayFixture) run(t testing.TB, cfg outboxreplay.Config) (outboxreplay.Report, error) {
	t.Helper()
	cfg.Schema, cfg.Audit = f.schema, audit
	return outboxreplay.Run(background, f.db, testenv.KafkaOpts(f.brokers), cfg)
}

// A replay from the archive sends the same bytes as the relay, in both modes.
func TestReplay(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]outbox.Mode{"binary": outbox.Binary, "structured": outbox.Structured} {
		for _, kind := range []string{"table", "files", "outbox"} {
			t.Run(name+" from "+kind, func(t *testing.T) {
				t.Parallel()
				f := newFixture(t, largeEnough)
				const n = 40
				f.deleted = 3
				f.record(t, numbered(n)...)
				source, archive := f.archiveOf(t, kind)
				if kind != "outbox" {
					testenv.UpdateEvents(t, f.db, pg.InSchema(`UPDATE {schema}.outbox SET created_at = now() - '40 days'::interval`, f.schema))
				}
				stop := f.relay(t, mode, archive)
				sent := f.records(t, f.topic, n)
				if kind != "outbox" {
					require.Eventually(t, func() bool { return f.count(t, "outbox") == 0 }, testenv.Patience, 10*time.Millisecond)
				}
				stop()

				dry, err := f.run(t, outboxreplay.Config{Source: source, Mode: mode, DryRun: true})
				require.NoError(t, err)
				require.Zero(t, f.count(t, "outbox_audit"))
				report, err := f.run(t, outboxreplay.Config{Source: source, Mode: mode})
				require.NoError(t, err)
				require.Equal(t, dry, report)
				require.Equal(t, n, report.Sent)
				require.Len(t, report.Counts, 1)
				require.Equal(t, [2]string{f.topic, saleType}, [2]string{report.Counts[0].Topic, report.Counts[0].Type})
				if kind != "outbox" {
					require.Equal(t, n, report.Older)
				}
				for key, twice := range f.records(t, f.topic, 2*n) {
					require.Equal(t, texts(sent[key]), texts(twice[:len(sent[key])]))
					require.Equal(t, texts(sent[key]), texts(twice[len(sent[key]):]))
				}
				require.Equal(t, 1, f.count(t, `outbox_audit WHERE action = 'replay' AND operator = 'kim' AND reason = 'the view was lost (all events)' AND parking_key = '/' AND consumer_group IS NULL`))
			})
		}
	}
}

// archiveOf returns a source, and the archive function that fills it.
func (f *replayFixture) archiveOf(t testing.TB, kind string) (outboxarchive.Source, func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error) {
	t.Helper()
	switch kind {
	case "table":
		table, err := outboxarchive.NewTable(f.db, outboxarchive.TableConfig{Schema: f.schema, OutboxSchema: f.schema})
		require.NoError(t, err)
		require.NoError(t, table.Ensure(background))
		return table, table.Archive
	case "files":
		folder, err := outboxarchive.OpenFolder(t.TempDir())
		require.NoError(t, err)
		files, err := outboxarchive.NewFiles(folder, outboxarchive.FilesConfig{})
		require.NoError(t, err)
		return folder, files.Archive
	}
	return f.recorded(t), nil
}

// A replay adds the extra headers that a relay adds, unless an event has such a header itself.
func TestFurtherHeaders(t *testing.T) {
	t.Parallel()
	for _, mode := range []outbox.Mode{outbox.Binary, outbox.Structured} {
		f := newFixture(t, largeEnough)
		ctx := outbox.WithTraceID(background, "trace é")
		require.NoError(t, pgx.BeginFunc(ctx, f.db, func(tx pgx.Tx) error {
			return f.rec.Record(ctx, tx, sale{Product: "a", Number: 1}, outbox.With(sale{Product: "a", Number: 2}, outbox.EventOptions{Headers: map[string]string{"Event-ID": "own", "X-Trace-Id": "own"}}))
		}))
		f.record(t, sale{Product: "a", Number: 3})
		relay, err := outbox.NewRelay(f.db, testenv.KafkaOpts(f.brokers), outbox.RelayConfig{Schema: f.schema, Mode: mode, IDHeader: "event-id", TraceHeader: "x-trace-id",
			PollInterval: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
		require.NoError(t, err)
		testenv.Run(t, relay.Run)
		sent := f.records(t, f.topic, 3)["a"]
		_, err = f.run(t, outboxreplay.Config{Source: f.recorded(t), Mode: mode, IDHeader: "event-id", TraceHeader: "x-trace-id"})
		require.NoError(t, err)
		require.Contains(t, texts(sent)[0], `"event-id"`)
		require.Equal(t, texts(sent), texts(f.records(t, f.topic, 6)["a"][3:]))
	}
}

// A run keeps its rate. Runs that are stopped and continued send each event once, in its order, to the
// topic To.
func TestRateAndResume(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const n, rate = 300, 200
	f.record(t, numbered(n)...)
	to := "replay-to-" + uuid.NewString()
	testenv.CreateTopic(t, f.brokers, to, 2)
	cfg := outboxreplay.Config{Source: f.recorded(t), To: to, Rate: rate, Schema: f.schema, Audit: audit}
	began, sent, runs := time.Now(), 0, 0
	for sent < n {
		ctx, stop := context.WithCancelCause(background)
		stopped, atMost := errors.New("stopped"), rng.IntN(150)
		cfg.Progress = func(r outboxreplay.Report) {
			if r.Sent > atMost {
				stop(stopped)
			}
		}
		report, err := outboxreplay.Run(ctx, f.db, testenv.KafkaOpts(f.brokers), cfg)
		stop(nil)
		if err != nil {
			require.ErrorIs(t, err, stopped)
		}
		require.Greater(t, report.Next, cfg.Filter.After)
		sent, runs, cfg.Filter.After = sent+report.Sent, runs+1, report.Next
	}
	require.Greater(t, runs, 1)
	require.Equal(t, n, sent)
	require.GreaterOrEqual(t, time.Since(began), time.Duration(n-runs*rate/10)*time.Second/rate)
	byKey := f.records(t, to, n)
	require.Len(t, byKey, 5)
	for key, records := range byKey {
		want := slices.DeleteFunc(numbered(n), func(s sale) bool { return s.Product != key })
		require.Len(t, records, len(want), key)
		for i, r := range records {
			require.Contains(t, string(r.Value), fmt.Sprintf(`"Number": %d,`, want[i].Number))
		}
	}
	require.Equal(t, runs, f.count(t, `outbox_audit WHERE action = 'replay' AND parking_key = '`+to+`/'`))
}

// slow is a source that needs a long time to find its first event.
type slow struct{ outboxarchive.Source }

func (s slow) Events(ctx context.Context, f outboxarchive.Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	return func(yield func(outbox.ArchivedEvent, error) bool) {
		time.Sleep(time.Second)
		s.Source.Events(ctx, f)(yield)
	}
}

// After a time without events, a run does not send a burst.
func TestRateAfterPause(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	const n, rate = 150, 200
	f.record(t, numbered(n)...)
	var first, last time.Time
	report, err := f.run(t, outboxreplay.Config{Source: slow{f.recorded(t)}, Rate: rate, Progress: func(r outboxreplay.Report) {
		if last = time.Now(); first.IsZero() {
			first = last
		}
	}})
	require.NoError(t, err)
	require.Equal(t, n, report.Sent)
	require.GreaterOrEqual(t, last.Sub(first), (n-2*rate/10)*time.Second/rate)
}

// If Kafka rejects an event, the run ends before later events of its key are sent. Another run can continue
// behind the event. Events that are too large for one batch only together are sent.
func TestRejected(t *testing.T) {
	t.Parallel()
	f := newFixture(t, 2000)
	sales := numbered(60)
	sales[41].Filler = random(5000)
	f.record(t, sales...)
	report, err := f.run(t, outboxreplay.Config{Source: f.recorded(t)})
	require.ErrorIs(t, err, kerr.MessageTooLarge)
	require.ErrorContains(t, err, "outbox id 42")
	require.Equal(t, 41, report.Sent)
	require.EqualValues(t, 41, report.Next)
	require.Equal(t, 1, report.NotSent)
	require.EqualValues(t, 42, report.Failed[0].OutboxID)
	report, err = f.run(t, outboxreplay.Config{Source: f.recorded(t), Filter: outboxarchive.Filter{After: 42}})
	require.NoError(t, err)
	require.Equal(t, 18, report.Sent)
	for key, records := range f.records(t, f.topic, 59) {
		last := 0
		for _, r := range records {
			number := numberOf(t, r)
			require.Greater(t, number, last, key)
			last = number
		}
	}
}

// numberOf returns the number of a sale.
func numberOf(t testing.TB, r *kgo.Record) (number int) {
	t.Helper()
	_, err := fmt.Sscanf(string(r.Value[strings.Index(string(r.Value), `"Number": `):]), `"Number": %d`, &number)
	require.NoError(t, err)
	return number
}

func random(n int) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = "0123456789abcdefghijklmnopqrstuvwxyz"[rand.IntN(36)]
	}
	return string(b)
}

// broken is a source that returns an unreadable event between two readable events.
type broken struct{ outboxarchive.Source }

func (b broken) Events(ctx context.Context, f outboxarchive.Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	return func(yield func(outbox.ArchivedEvent, error) bool) {
		for e, err := range b.Source.Events(ctx, f) {
			if !yield(e, err) || !yield(outbox.ArchivedEvent{}, &outboxarchive.ReadError{File: "f", Line: 7, Err: errors.New("damaged")}) {
				return
			}
		}
	}
}

// An unreadable event ends a run, unless SkipUnreadable is set. A dry run reports all of them.
func TestUnreadable(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	f.record(t, numbered(3)...)
	source := broken{f.recorded(t)}
	report, err := f.run(t, outboxreplay.Config{Source: source})
	require.ErrorContains(t, err, "file f, line 7: damaged")
	require.Equal(t, 1, report.Sent)
	require.Zero(t, report.Next, "the unreadable line may have the id, too")
	report, err = f.run(t, outboxreplay.Config{Source: source, SkipUnreadable: true})
	require.NoError(t, err)
	require.Equal(t, 3, report.Sent)
	require.Equal(t, 3, report.NotSent)
	report, err = f.run(t, outboxreplay.Config{Source: source, DryRun: true})
	require.NoError(t, err)
	require.Len(t, report.Failed, 3)
	f.records(t, f.topic, 4)
}

// twins is a source with two events of each outbox id. If err is set, it is in place of the event number bad.
type twins struct {
	outboxarchive.Source
	bad int64
	err error
	id  int64 // of the event that is not there
}

func (s twins) Events(ctx context.Context, f outboxarchive.Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	f.After *= 2
	return func(yield func(outbox.ArchivedEvent, error) bool) {
		for e, err := range s.Source.Events(ctx, f) {
			number := e.OutboxID
			if e.OutboxID = (number + 1) / 2; s.err != nil && number == s.bad {
				e, err = outbox.ArchivedEvent{OutboxID: s.id}, s.err
			}
			if !yield(e, err) {
				return
			}
		}
	}
}

// A server gives an id out again after a failover. If a run ends between two events of one id, another run behind Next
// sends the second one, too.
func TestNextSplitsNoID(t *testing.T) {
	t.Parallel()
	const filled, topicBytes = 5000, 2000
	gone := errors.New("the connection is gone")
	damaged := &outboxarchive.ReadError{Err: errors.New("damaged")}
	for name, tt := range map[string]struct {
		source twins
		filler int // of the second event of the id 3, which is the sixth event
		rate   int
		want   error
	}{
		"Kafka rejects the second":               {twins{}, filled, 0, kerr.MessageTooLarge},
		"the second cannot be read":              {twins{bad: 6, err: damaged, id: 3}, 0, 0, damaged},
		"a line cannot be read":                  {twins{bad: 6, err: damaged}, 0, 0, damaged},
		"the source fails":                       {twins{bad: 6, err: gone}, 0, 0, gone},
		"the source fails behind a chunk":        {twins{bad: 6, err: gone}, 0, 50, gone},
		"a line cannot be read behind a chunk":   {twins{bad: 6, err: damaged}, 0, 50, damaged},
		"the second cannot be read, in one each": {twins{bad: 6, err: damaged, id: 3}, 0, 10, damaged},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, topicBytes)
			sales := numbered(8)
			sales[5].Filler = random(tt.filler)
			f.record(t, sales...)
			source := tt.source
			source.Source = f.recorded(t)
			report, err := f.run(t, outboxreplay.Config{Source: source, Rate: tt.rate, Progress: func(r outboxreplay.Report) {
				require.Less(t, r.Next, int64(3), "it is continued from here if the process is killed")
			}})
			require.ErrorIs(t, err, tt.want)
			require.Equal(t, 5, report.Sent)
			require.EqualValues(t, 2, report.Next)

			to := "replay-to-" + uuid.NewString()
			testenv.CreateTopic(t, f.brokers, to, 1)
			report, err = f.run(t, outboxreplay.Config{Source: twins{Source: source.Source}, To: to, Filter: outboxarchive.Filter{After: report.Next}})
			require.NoError(t, err)
			require.Equal(t, 4, report.Sent, "the first one of the id again, and all behind it")
			require.EqualValues(t, 4, report.Next)
		})
	}
}

func TestBadConfig(t *testing.T) {
	t.Parallel()
	_, err := outboxreplay.Run(background, nil, []kgo.Opt{kgo.ConsumerGroup("g")}, outboxreplay.Config{To: "a b", Group: "\x00", Mode: 7, IDHeader: "ce_id", TraceHeader: "\x00", Rate: 1e9, HandledFor: -1, Schema: "$user",
		Audit: outboxops.AuditInfo{Reason: " "}})
	for _, says := range []string{"Source", "To", "Group", "Mode", "Rate", "HandledFor", "Schema", "IDHeader", "TraceHeader", "Audit.Operator", "Audit.Reason", "db", "ConsumerGroup"} {
		require.ErrorContains(t, err, says)
	}
	f := newFixture(t, largeEnough)
	_, err = f.run(t, outboxreplay.Config{Source: f.recorded(t), Again: true})
	require.ErrorContains(t, err, "Group")
	_, err = f.run(t, outboxreplay.Config{Source: f.recorded(t), Filter: outboxarchive.Filter{After: -1}})
	require.ErrorContains(t, err, "Filter.After")
	_, err = f.run(t, outboxreplay.Config{Source: f.recorded(t)})
	require.NoError(t, err, "there is nothing to send")
	require.Zero(t, f.count(t, "outbox_audit"))
}
