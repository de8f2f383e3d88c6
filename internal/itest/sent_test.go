package itest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// records returns the first n records of the fixture's topic.
func (h *relayFixture) records(t testing.TB, n int) (records []*kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(h.brokers), kgo.ConsumeTopics(h.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for len(records) < n {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err())
		records = append(records, fetches.Records()...)
	}
	return records
}

// The hook tells of each event where Kafka has it, and the time of its record.
func TestSentHookHasPlaces(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3)
	const events = 50
	for i := range events {
		h.commit(t, numbered(fmt.Sprint(i), 1, 1)...)
	}
	var mu sync.Mutex
	sent := map[string]string{}
	place := func(partition int32, offset int64, at time.Time) string {
		return fmt.Sprintf("%d/%d at %d", partition, offset, at.UnixMilli())
	}
	cfg := quick
	cfg.Hooks.Sent = func(b outbox.SentBatch) {
		mu.Lock()
		defer mu.Unlock()
		for e := range b.All() {
			sent[e.ID()] = place(e.Partition(), e.Offset(), e.SentAt())
		}
	}
	testenv.Run(t, h.relay(t, cfg).Run)
	read := map[string]string{}
	for _, r := range h.records(t, events) {
		read[eventIDOf(r)] = place(r.Partition, r.Offset, r.Timestamp)
	}
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(sent) == events
	}, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, read, sent)
}

// The view has what a relay has not sent yet, whether it was attempted or not, with the time since when it waits.
func TestPendingView(t *testing.T) {
	t.Parallel()
	h := newPartitionedFixture(t, 1000)
	testenv.CreateTopic(t, h.brokers, h.topic, 1)
	h.commit(t, numbered("sent", 1, 3)...)
	stop := testenv.Run(t, h.relay(t, quick).Run)
	h.records(t, 3)
	require.Eventually(t, func() bool { return h.count(t, "outbox_pending") == 0 }, testenv.Patience, 5*time.Millisecond)
	stop()
	h.commit(t, numbered("new", 1, 1)...)
	waits := numbered("waits", 1, 2)
	h.commit(t, waits...)
	in := func(sql string) string { return strings.ReplaceAll(sql, "{s}", pgx.Identifier{h.schema}.Sanitize()) }
	_, err := h.db.Exec(background, in(`INSERT INTO {s}.outbox_failed (relay, outbox_id, parking_key, event_id, event_type, source, aggregate_type,
		aggregate_id, payload, content_type, occurred_at, created_at, status, error_class, failed_at)
		SELECT 'default', 1, 'topic-of-it/key/of it', event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type,
		       occurred_at, created_at, 'failed', 'message_too_large', '2026-01-02' FROM {s}.outbox WHERE id = 1`))
	require.NoError(t, err)
	rows, err := h.db.Query(background, in(`
		SELECT concat_ws(' ', relay, outbox_id, topic, key, status, error_class, since = created_at, since = '2026-01-02') FROM {s}.outbox_pending ORDER BY outbox_id`))
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{
		"default 1 topic-of-it key/of it failed message_too_large f t",
		"default 4 " + h.topic + " new pending t f", "default 5 " + h.topic + " waits pending t f", "default 6 " + h.topic + " waits pending t f",
	}, got)
}

// What became of an event is told by the page and the command, as Kafka has it: the place of an event that was sent at
// once, of one that was sent at a retry and kept, and who resolved one unsent. It is known as long as the event is in
// outbox, although retention thins the history of the cursor, and the archive takes it along.
func TestWhereEventsWent(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3)
	const events = 20
	for i := range events {
		h.commit(t, numbered(fmt.Sprint(i), 1, 1)...)
	}
	bad := numbered("bad", 1, 2)
	in := func(sql string) string { return strings.ReplaceAll(sql, "{s}", pgx.Identifier{h.schema}.Sanitize()) }
	require.NoError(t, pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error {
		if err := h.record(background, tx, bad...); err != nil {
			return err
		}
		_, err := tx.Exec(background, in(`UPDATE {s}.outbox SET event_type = 'x', topic = NULL WHERE aggregate_id = 'bad'`))
		return err
	}))
	cfg := quick
	cfg.KeepSent, cfg.BatchSize = true, 7
	var mu sync.Mutex
	var archived []outbox.ArchivedEvent
	cfg.Retention = outbox.RetentionConfig{CursorsFor: time.Millisecond, Archive: func(_ context.Context, _ pgx.Tx, rows []outbox.ArchivedEvent) error {
		mu.Lock()
		defer mu.Unlock()
		archived = append(archived, rows...)
		return nil
	}}
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	records := h.records(t, events)
	inspector, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	event := func(id string) outboxops.RecordedEvent {
		found, err := inspector.Events(background, outboxops.EventFilter{EventID: id}, outboxops.EventPage{})
		require.NoError(t, err)
		require.Len(t, found, 1)
		e, err := inspector.Event(background, found[0].OutboxID)
		require.NoError(t, err)
		return e
	}
	text := func(e outboxops.RecordedEvent) (all []string) {
		for _, s := range e.Sent {
			all = append(all, fmt.Sprintf("%s %s/%d@%d %t %t", s.Relay, s.Topic, s.Partition, s.Offset, s.Retried, s.Repeat))
			require.WithinDuration(t, time.Now(), s.At, testenv.Patience)
		}
		return all
	}
	for _, r := range records {
		require.Eventually(t, func() bool { return len(event(eventIDOf(r)).Sent) == 1 }, testenv.Patience, 5*time.Millisecond)
		require.Equal(t, []string{fmt.Sprintf("default %s/%d@%d false false", h.topic, r.Partition, r.Offset)}, text(event(eventIDOf(r))))
	}

	failures := h.failures(t)
	var failed []outboxops.Failure
	require.Eventually(t, func() bool {
		failed, err = failures.List(background, outboxops.FailureFilter{Kind: outboxops.KindEvent}, outboxops.FailurePage{})
		return err == nil && len(failed) == 2
	}, testenv.Patience, 5*time.Millisecond)
	slices.SortFunc(failed, func(a, b outboxops.Failure) int { return int(a.OutboxID - b.OutboxID) })
	require.NoError(t, failures.Resolve(background, failed[0].ID, outboxops.AuditInfo{Operator: "ann", Reason: "a test"}))
	_, err = h.db.Exec(background, in(`UPDATE {s}.outbox_failed SET event_type = 'test.oracle.happened.v1', topic = $1, next_retry_at = now() WHERE status <> 'resolved'`), h.topic)
	require.NoError(t, err)
	last := h.records(t, events+1)
	i := slices.IndexFunc(last, func(r *kgo.Record) bool { return eventIDOf(r) == failed[1].EventID })
	require.GreaterOrEqual(t, i, 0)
	require.Eventually(t, func() bool { return len(event(failed[1].EventID).Sent) == 1 }, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, last[i].Offset, event(failed[1].EventID).Sent[0].Offset)
	require.True(t, event(failed[1].EventID).Sent[0].Retried)
	unsent := event(failed[0].EventID)
	require.Empty(t, unsent.Sent)
	require.Equal(t, "ann", unsent.Failures[0].ResolvedBy)
	timeline, err := inspector.Timeline(background, unsent.EventID)
	require.NoError(t, err)
	require.Regexp(t, `^resolve by ann .*: a test$`, timeline.Entries[len(timeline.Entries)-1].What)
	stop()

	cfg.Retention.PublishedFor = time.Millisecond
	testenv.Run(t, h.relay(t, cfg).Run)
	require.Eventually(t, func() bool { return h.count(t, "outbox") == 0 }, testenv.Patience, 5*time.Millisecond)
	mu.Lock()
	defer mu.Unlock()
	for _, e := range archived {
		for _, r := range records {
			if eventIDOf(r) == e.EventID {
				require.Contains(t, string(e.Sent), fmt.Sprintf(`"partition":%d,"offset":%d,`, r.Partition, r.Offset))
			}
		}
	}
	require.Eventually(t, func() bool { return h.count(t, "outbox_cursor") == 1 }, testenv.Patience, 5*time.Millisecond)
}
