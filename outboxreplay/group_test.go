package outboxreplay_test

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxreplay"
)

// groups are consumer groups that count handled events and skipped repeats.
type groups struct {
	mu                sync.Mutex
	handled, repeated map[string]int // by group and the number of the sale
}

func (g *groups) add(to map[string]int, group string, number int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	to[fmt.Sprintf("%s %d", group, number)]++
}

func (g *groups) counts() (handled, repeated map[string]int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.handled), maps.Clone(g.repeated)
}

// start runs a group.
func (g *groups) start(t testing.TB, f *replayFixture, group string) {
	t.Helper()
	c, err := outbox.NewConsumer(f.db, testenv.KafkaOpts(f.brokers), f.events, group+"-"+f.topic, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: f.schema, Logger: slog.New(slog.DiscardHandler),
			Hooks: outbox.ConsumerHooks{Repeated: func(outbox.Metadata, string) { g.add(g.repeated, group, 0) }}, From: outbox.FromStart},
	}, outbox.Handle("COUNTS", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		g.add(g.handled, group, e.Number)
		return nil
	}))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
}

// times returns how often each group has handled each of n sales.
func times(n int, byGroup map[string]int) map[string]int {
	all := map[string]int{}
	for group, times := range byGroup {
		for i := range n {
			all[fmt.Sprintf("%s %d", group, i+1)] = times
		}
	}
	return all
}

// Events that are sent for one group are repeats for this group, unless Again is set. Other groups ignore
// them.
func TestOneGroup(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	const n = 10
	f.record(t, numbered(n)...)
	g := &groups{handled: map[string]int{}, repeated: map[string]int{}}
	g.start(t, f, "a")
	g.start(t, f, "b")
	f.relay(t, outbox.Binary, nil)
	await := func(handled, repeated map[string]int) {
		t.Helper()
		require.Eventually(t, func() bool {
			h, r := g.counts()
			return maps.Equal(handled, h) && maps.Equal(repeated, r)
		}, testenv.Patience, 20*time.Millisecond, "%v", g)
	}
	await(times(n, map[string]int{"a": 1, "b": 1}), map[string]int{})

	cfg := outboxreplay.Config{Source: f.recorded(t), Group: "a-" + f.topic}
	report, err := f.run(t, cfg)
	require.NoError(t, err)
	require.Equal(t, n, report.Sent)
	await(times(n, map[string]int{"a": 1, "b": 1}), map[string]int{"a 0": n})

	cfg.Again = true
	report, err = f.run(t, cfg)
	require.NoError(t, err)
	require.EqualValues(t, n, report.Forgotten)
	await(times(n, map[string]int{"a": 2, "b": 1}), map[string]int{"a 0": n})

	// A record with forged headers of a replay is a repeat for both groups.
	forged := f.records(t, f.topic, 3*n)["p1"][0]
	f.produce(t, &kgo.Record{Topic: f.topic, Key: forged.Key, Value: forged.Value, Headers: append(forged.Headers,
		kgo.RecordHeader{Key: outbox.ReplayGroup, Value: []byte("nobody")}, kgo.RecordHeader{Key: outbox.ReplayFrom, Value: []byte(f.topic + ".dlq-0-0")},
		kgo.RecordHeader{Key: outbox.ReplayOf, Value: []byte(f.topic + "-2147483647-1")})})
	await(times(n, map[string]int{"a": 2, "b": 1}), map[string]int{"a 0": n + 1, "b 0": 1})

	require.Equal(t, 2, f.count(t, `outbox_audit WHERE action = 'replay' AND consumer_group = 'a-`+f.topic+`'`))
	require.Equal(t, 1, f.count(t, `outbox_audit WHERE action = 'forget' AND consumer_group = 'a-`+f.topic+`' AND reason = 'the view was lost (outbox ids 1 to 10)'`))
	requireDeadLetters(t, f, 2*n)
}

// The dead letters of a replay for one group are not sent back, also those of tombstones, and are no failures.
func TestOneGroupGetsTombstones(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	f.deleted = 2
	f.record(t, numbered(3)...)
	report, err := f.run(t, outboxreplay.Config{Source: f.recorded(t), Group: "a-" + f.topic})
	require.NoError(t, err)
	require.Equal(t, 3, report.Sent)
	requireDeadLetters(t, f, 3)
	f.records(t, f.topic, 3)
}

// A run that continues another one removes no notes that the group has made since that one began. Notes of that very
// time stay, and no time may be in the future.
func TestAgainGoesOn(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	const n = 10
	f.record(t, numbered(n)...)
	note := func(handledAt string, args ...any) {
		_, err := f.db.Exec(background, pg.InSchema(`INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source, handled_at)
			SELECT 'g', event_type, event_id::text, 'COUNTS', source, `+handledAt+` FROM {schema}.outbox`, f.schema), args...)
		require.NoError(t, err)
	}
	note("now()")
	cfg := outboxreplay.Config{Source: f.recorded(t), Group: "g", Again: true}
	report, err := f.run(t, cfg)
	require.NoError(t, err)
	require.EqualValues(t, n, report.Forgotten)
	began := report.AgainBefore
	require.False(t, began.IsZero())

	for _, handledAt := range []string{"now()", "$1::timestamptz"} {
		note(handledAt, []any{began}[:strings.Count(handledAt, "$")]...)
		cfg.AgainBefore = began
		report, err = f.run(t, cfg)
		require.NoError(t, err)
		require.Equal(t, []any{n, int64(0), began}, []any{report.Sent, report.Forgotten, report.AgainBefore}, handledAt)
		require.Equal(t, n, f.count(t, "event_handled"), handledAt)
		cfg.AgainBefore = time.Time{}
		report, err = f.run(t, cfg)
		require.NoError(t, err)
		require.EqualValues(t, n, report.Forgotten, "another replay")
	}
	require.Equal(t, 5, f.count(t, `outbox_audit WHERE action = 'replay' AND reason LIKE '%again before 2%'`))

	cfg.AgainBefore = time.Now().Add(time.Hour)
	_, err = f.run(t, cfg)
	require.ErrorContains(t, err, "AgainBefore")
	cfg.AgainBefore, cfg.Again = began, false
	_, err = f.run(t, cfg)
	require.ErrorContains(t, err, "AgainBefore needs Again")
}

// In a compacted topic a record for one group would be the last one of its key for all. Nothing is sent, written or
// forgotten. Records for all groups are sent.
func TestOneGroupInCompactedTopic(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	compacted := "compacted-" + uuid.NewString()
	testenv.CreateTopic(t, f.brokers, compacted, 1, "cleanup.policy", "compact")
	f.record(t, numbered(3)...)
	cfg := outboxreplay.Config{Source: f.recorded(t), To: compacted, Group: "a", Again: true}
	report, err := f.run(t, cfg)
	require.ErrorIs(t, err, outboxreplay.ErrCompacted)
	require.ErrorContains(t, err, compacted)
	require.Zero(t, report.Sent)
	require.Zero(t, f.count(t, "outbox_audit"))
	cfg.Group, cfg.Again = "", false
	report, err = f.run(t, cfg)
	require.NoError(t, err)
	require.Equal(t, 3, report.Sent)
}

// requireDeadLetters requires that the dead letters of runs are readable and cannot be sent back.
func requireDeadLetters(t *testing.T, f *replayFixture, n int) {
	t.Helper()
	report, err := outboxdlq.Replay(background, testenv.KafkaOpts(f.brokers), outboxdlq.ReplayConfig{Topic: f.topic + ".dlq",
		Choose: func(d outboxdlq.DeadLetter) bool {
			require.Equal(t, outboxreplay.Class, d.Class)
			require.Equal(t, "a-"+f.topic, d.Group)
			require.Empty(t, d.Record.Value)
			return true
		}})
	require.NoError(t, err)
	require.Equal(t, n, report.Read)
	require.Zero(t, report.Sent)
	require.Empty(t, report.Failed)
	for d, err := range outboxdlq.Read(background, testenv.KafkaOpts(f.brokers), f.topic+".dlq", nil) {
		require.NoError(t, err)
		omitted := slices.ContainsFunc(d.Record.Headers, func(h kgo.RecordHeader) bool { return h.Key == outbox.DeadLetterValueOmitted })
		require.True(t, omitted, "a tombstone has the header, too")
		_, _, err = outboxdlq.Edit(background, testenv.KafkaOpts(f.brokers), outboxdlq.ReplayConfig{Topic: f.topic + ".dlq", DryRun: true},
			d.Record.Partition, d.Record.Offset, []byte(`{}`))
		require.ErrorIs(t, err, outboxdlq.ErrOriginalGone)
	}
}

func (f *replayFixture) produce(t testing.TB, records ...*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(testenv.KafkaOpts(f.brokers)...)
	require.NoError(t, err)
	defer client.Close()
	require.NoError(t, client.ProduceSync(background, records...).FirstErr())
}

// A note is removed only if its group, event type, event id and source match, even if two sources use the
// same id.
func TestForget(t *testing.T) {
	t.Parallel()
	f := newFixture(t, largeEnough)
	f.record(t, numbered(1)...)
	var id string
	require.NoError(t, f.db.QueryRow(background, pg.InSchema(`SELECT event_id::text FROM {schema}.outbox`, f.schema)).Scan(&id))
	for i, note := range []struct{ group, kind, id, source string }{
		{"g", saleType, id, "shop"}, {"g", saleType, id, "other"}, {"h", saleType, id, "shop"}, {"g", "test.other.v1", id, "shop"}, {"g", saleType, "x", "shop"},
	} {
		_, err := f.db.Exec(background, pg.InSchema(`INSERT INTO {schema}.event_handled (consumer_group, aggregate_type, aggregate_id, action, event_source) VALUES ($1, $2, $3, $4, $5)`, f.schema),
			note.group, note.kind, note.id, fmt.Sprint(i), note.source)
		require.NoError(t, err)
	}
	report, err := f.run(t, outboxreplay.Config{Source: f.recorded(t), Group: "g", Again: true})
	require.NoError(t, err)
	require.EqualValues(t, 1, report.Forgotten)
	require.Equal(t, 4, f.count(t, "event_handled"))
	require.Zero(t, f.count(t, "event_handled WHERE action = '0'"))
}
