package itest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

// printing are settings that change how PostgreSQL prints values. pgx gets printed values in some modes.
var printing = map[string]string{
	"DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601", "bytea_output": "escape", "TimeZone": "Asia/Kathmandu", "extra_float_digits": "-15",
}

// underRoleSettings runs a test with pools whose sessions have settings as if the role had them: each setting alone in
// the modes that get printed values, and all of them together in a mode that gets binary ones.
func underRoleSettings(t *testing.T, test func(t *testing.T, db *pgxpool.Pool)) {
	t.Helper()
	t.Parallel()
	testenv.Direct(t) // PgBouncer refuses connections with such settings
	cases := map[string]map[string]string{"all": printing}
	for name, value := range printing {
		cases[name] = map[string]string{name: value}
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		for name, settings := range cases {
			if mode == pgx.QueryExecModeCacheStatement && name != "all" {
				continue
			}
			t.Run(mode.String()+"/"+name, func(t *testing.T) {
				t.Parallel()
				test(t, testenv.Pool(t, func(cfg *pgxpool.Config) {
					cfg.ConnConfig.DefaultQueryExecMode = mode
					maps.Copy(cfg.ConnConfig.RuntimeParams, settings)
				}))
			})
		}
	}
}

// insertBytes records an event with a payload of bytes, for a topic of its own.
func (h *relayFixture) insertBytes(t *testing.T, payload []byte) (topic string) {
	t.Helper()
	topic = h.topic + "-bytes"
	h.exec(t, `
		INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, topic, payload_bytes, content_type, occurred_at)
		VALUES ($1, 'test.oracle.happened.v1', 'test', 'Key', 'bytes', $2, $3, 'application/octet-stream', '2026-02-03 04:05:06.789+05:45')`,
		uuid.NewString(), topic, payload)
	return topic
}

// firstRecord returns the first record of a topic.
func (h *relayFixture) firstRecord(t *testing.T, topic string) *kgo.Record {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(h.brokers...), kgo.ConsumeTopics(topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.MetadataMinAge(100*time.Millisecond))
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err())
		for _, r := range fetches.Records() {
			return r
		}
	}
}

// A relay, its standby, retries, retention and what operators read work, however the role has PostgreSQL print values.
func TestRelayUnderRoleSettings(t *testing.T) {
	underRoleSettings(t, func(t *testing.T, db *pgxpool.Pool) {
		h := newRelayFixture(t)
		for _, topic := range []string{h.topic, h.topic + "-bytes"} { // one that is made while it is needed fails first
			testenv.CreateTopic(t, h.brokers, topic, 2)
		}
		reader := h.follow(t)
		failed := numbered("failed", 1, 2)
		h.fail(t, failed...)
		payload := []byte{0, '\\', 255}
		topic := h.insertBytes(t, payload)
		direct := h.db
		h.db = db
		archived := make(chan outbox.ArchivedEvent, 100)
		cfg := quick
		cfg.Retention = outbox.RetentionConfig{PublishedFor: time.Second, CursorsFor: 500 * time.Millisecond, Archive: func(_ context.Context, _ pgx.Tx, rows []outbox.ArchivedEvent) error {
			for _, row := range rows {
				archived <- row
			}
			return nil
		}}
		cfg.Retry.MaxRetries = 1
		log := &workerLog{}
		cfg.Logger = log.logger()
		h.impossible(t)
		stop := testenv.Run(t, h.relay(t, cfg).Run)
		events := numbered("key", 1, 5)
		h.commit(t, events...)
		requireArrival(t, reader, events...)
		record := h.firstRecord(t, topic)
		require.Equal(t, payload, record.Value)
		require.Equal(t, "2026-02-02T22:20:06.789Z", headerOf(t, record, "ce_time"))
		requireArrival(t, reader, failed...)
		require.Eventually(t, func() bool { return h.statuses(t)[outbox.StatusDead] == 1 }, testenv.Patience, 10*time.Millisecond)

		select {
		case first := <-archived:
			require.Equal(t, payload, first.Payload)
			require.True(t, first.OccurredAt.Equal(time.Date(2026, 2, 2, 22, 20, 6, 789e6, time.UTC)))
		case <-time.After(testenv.Patience):
			require.Fail(t, "nothing was archived", log.String())
		}

		standby := *h
		testenv.Run(t, standby.relay(t, cfg).Run)
		require.Eventually(t, func() bool { return log.count("standing by") > 0 }, testenv.Patience, 10*time.Millisecond)
		h.requireReadable(t)
		stop()
		more := numbered("key", 6, 5)
		h.db = direct
		h.commit(t, more...)
		requireArrival(t, reader, more...)
		require.Zero(t, log.count("fails"), log.String())
	})
}

// requireReadable reads what operators see.
func (h *relayFixture) requireReadable(t *testing.T) {
	t.Helper()
	i, err := outboxops.NewInspector(h.db, outboxops.InspectorConfig{Schema: h.schema})
	require.NoError(t, err)
	relays, err := i.Relays(background)
	require.NoError(t, err)
	require.Len(t, relays, 1)
	require.WithinDuration(t, time.Now(), relays[0].MovedAt, time.Hour)
	h.commit(t, numbered("seen", 1, 1)...)
	seen, err := i.Events(background, outboxops.EventFilter{}, outboxops.EventPage{})
	require.NoError(t, err)
	require.NotEmpty(t, seen)
	event, err := i.Event(background, seen[0].OutboxID)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), event.CreatedAt, time.Hour)
	require.Contains(t, string(event.Payload), "seen")
	_, err = i.Topics(background)
	require.NoError(t, err)
	_, err = i.Stale(background, time.Hour)
	require.NoError(t, err)
	_, err = i.Progress(background, "default", time.Now().Add(-time.Hour), time.Minute)
	require.NoError(t, err)
	_, err = i.Transactions(background, 0)
	require.NoError(t, err)

	f := h.failures(t)
	all, err := f.List(background, outboxops.FailureFilter{}, outboxops.FailurePage{})
	require.NoError(t, err)
	require.NotEmpty(t, all)
	one, err := f.Get(background, all[0].ID)
	require.NoError(t, err)
	require.Equal(t, "{}", string(one.Payload))
	require.WithinDuration(t, time.Now(), one.FailedAt, time.Hour)
	_, err = f.Count(background, outboxops.FailureFilter{})
	require.NoError(t, err)
	require.NoError(t, f.AuditRead(background, all[0].ID, operator))
	audit, err := f.Audit(background, all[0].ID, outboxops.AuditPage{})
	require.NoError(t, err)
	require.NotEmpty(t, audit)
	applied, err := outbox.MigrationStatus(background, h.db, outbox.MigrateConfig{Schema: h.schema})
	require.NoError(t, err)
	require.NotEmpty(t, applied)
}

// A worker handles, repeats and parks events, and operators read what it has left, however the role has PostgreSQL
// print values.
func TestWorkerUnderRoleSettings(t *testing.T) {
	underRoleSettings(t, func(t *testing.T, db *pgxpool.Pool) {
		f := newWorkerFixture(t)
		log := &workerLog{}
		cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: log.logger()}, PollInterval: 50 * time.Millisecond}
		w := f.worker(db, "bank", cfg, f.effects("COUNTED", func(s step, m outbox.Metadata) error {
			switch {
			case s.Account == "dead":
				return outbox.Permanent(errTest)
			case s.N == 3 && m.Attempt == 1:
				return errTest
			case time.Since(m.Time) > time.Hour:
				return errors.New("it was read with another time")
			}
			return nil
		}))
		testenv.Run(t, w.Run)
		f.commit(step{"dead", 1})
		for n := 1; n <= 5; n++ {
			f.commit(step{"a", n}, step{"b", n})
		}
		f.await(10)
		f.requireOrder()
		f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DEAD'`, 1)

		failures, err := outboxops.NewFailures(db, outboxops.FailuresConfig{Schema: f.schema})
		require.NoError(t, err)
		all, err := failures.List(background, outboxops.FailureFilter{Kind: outboxops.KindDelivery}, outboxops.FailurePage{})
		require.NoError(t, err)
		require.Len(t, all, 1)
		one, err := failures.Get(background, all[0].ID)
		require.NoError(t, err)
		require.Contains(t, string(one.Payload), "dead")
		deliveries, err := outboxops.NewDeliveries(db, outboxops.DeliveriesConfig{Schema: f.schema})
		require.NoError(t, err)
		groups, err := deliveries.Groups(background)
		require.NoError(t, err)
		require.Len(t, groups, 1)
		require.WithinDuration(t, time.Now(), groups[0].CreatedAt, time.Hour)
		_, err = deliveries.Count(background, outboxops.DeliveryFilter{})
		require.NoError(t, err)
		require.Zero(t, log.count("PostgreSQL fails"), log.String())
	})
}

// A consumer handles events, writes dead letters, and reads its pauses, however the role has PostgreSQL print values.
func TestConsumerUnderRoleSettings(t *testing.T) {
	underRoleSettings(t, func(t *testing.T, db *pgxpool.Pool) {
		s := newConsumerFixture(t, 1)
		testenv.Run(t, s.relay(t, quick).Run)
		direct := s.db
		s.db = db
		group := "group-" + uuid.NewString()
		consumers, err := outboxops.NewConsumers(db, outboxops.ConsumersConfig{Schema: s.schema})
		require.NoError(t, err)
		require.NoError(t, consumers.Pause(background, group, "another-topic", operator))
		log := &workerLog{}
		cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart, Logger: log.logger()}}
		testenv.Run(t, s.groupConsumer(t, group, cfg, outbox.Handle("COUNTED", s.count)).Run)
		s.db = direct
		s.sell(t, sale{Product: "a", Amount: 1}, sale{Product: "bad", Poison: "permanent"}, sale{Product: "worse", Poison: "error"}, sale{Product: "a", Amount: 2})
		require.Eventually(t, func() bool { return s.counts(t)["a"] == 3 }, testenv.Patience, 10*time.Millisecond, "%v", log)
		require.Eventually(t, func() bool { return s.parked(t) != "" }, testenv.Patience, 10*time.Millisecond, "%v", log)
		listed, _, err := consumers.List(background, outboxops.ConsumerFilter{})
		require.NoError(t, err)
		require.Len(t, listed, 1)
		require.Zero(t, log.count("PostgreSQL fails"), log.String())
	})
}

// Under a strict level of the role, the statements of a relay and a worker neither fail nor make transactions of the
// host fail.
func TestRelayUnderStrictIsolation(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a setting of the session
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			h := newRelayFixture(t)
			reader := h.follow(t)
			h.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = level })
			log := &workerLog{}
			cfg := quick
			cfg.Logger = log.logger()
			cfg.Retention = outbox.RetentionConfig{PublishedFor: time.Second, CursorsFor: 500 * time.Millisecond}
			testenv.Run(t, h.relay(t, cfg).Run)
			standby := *h
			testenv.Run(t, standby.relay(t, cfg).Run)
			var writers sync.WaitGroup
			var failed atomic.Int32
			all := make([][]oracle.Event, 4)
			for w := range all {
				all[w] = numbered(fmt.Sprint("key-", w), 1, 300)
				writers.Go(func() {
					for _, e := range all[w] {
						for pgx.BeginFunc(background, h.db, func(tx pgx.Tx) error { return h.record(background, tx, e) }) != nil {
							failed.Add(1)
						}
					}
				})
			}
			writers.Wait()
			requireArrival(t, reader, slices.Concat(all...)...)
			require.Zero(t, log.count("PostgreSQL fails"), log.String())
			require.Zero(t, failed.Load(), "transactions that only record")
		})
	}
}

// headerOf returns the header of a record.
func headerOf(t *testing.T, r *kgo.Record, key string) string {
	t.Helper()
	i := slices.IndexFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == key })
	require.GreaterOrEqual(t, i, 0, key)
	return string(r.Headers[i].Value)
}
