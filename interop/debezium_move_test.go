package interop

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

var why = outboxops.AuditInfo{Operator: "kim", Reason: "we move"}

// changeover is a system that moves from Debezium to a relay and back, while it is in use: writers record events in
// transactions of every kind, and a consumer handles them.
type changeover struct {
	*debezium
	topic   string
	rec     *outbox.Recorder
	events  *outbox.Registry
	cuts    *outboxops.Cuts
	cut     outboxops.DebeziumCut
	arrived *oracle.Reader
}

func newChangeover(d *debezium) *changeover {
	m := &changeover{debezium: d, topic: "interop-" + uuid.NewString(), cut: outboxops.DebeziumCut{Relay: "main", Publication: d.publication, Slot: d.name}}
	testenv.CreateTopic(d, d.brokers, m.topic, 3)
	var err error
	m.events, err = outbox.NewRegistry("shop", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(m.topic))
	require.NoError(d, err)
	m.rec, err = outbox.NewRecorder(m.events, outbox.RecorderConfig{Schema: d.schema})
	require.NoError(d, err)
	m.cuts, err = outboxops.NewCuts(d.db, outboxops.CutsConfig{Schema: d.schema})
	require.NoError(d, err)
	m.arrived, err = oracle.Follow(d.brokers, m.topic, nil)
	require.NoError(d, err)
	d.Cleanup(m.arrived.Close)
	return m
}

// record is an oracle.Record.
func (m *changeover) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = e
	}
	return m.rec.Record(ctx, tx, all...)
}

// consume runs a consumer whose handler writes down each event: a repeat that gets to it fails the test.
func (m *changeover) consume() {
	_, err := m.db.Exec(context.Background(), `CREATE TABLE effect (n bigserial, event_id text PRIMARY KEY, key text, version bigint)`)
	require.NoError(m, err)
	consumer, err := outbox.NewConsumer(m.db, testenv.KafkaOpts(m.brokers), m.events, m.name, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: m.schema, Logger: slog.New(slog.DiscardHandler), Retry: outbox.RetryPolicy{MaxRetries: -1}, From: outbox.FromStart}, Decode: outbox.DecodeDebezium,
	}, outbox.Handle("NOTED", func(ctx context.Context, tx pgx.Tx, e oracle.Event, _ outbox.Metadata) error {
		_, err := tx.Exec(ctx, `INSERT INTO effect (event_id, key, version) VALUES ($1, $2, $3)`, e.ID, e.Key, e.Version)
		return err
	}))
	require.NoError(m, err)
	testenv.Run(m, consumer.Run)
}

func (m *changeover) relay() (stop func()) {
	relay, err := outbox.NewRelay(m.db, testenv.KafkaOpts(m.brokers), outbox.RelayConfig{
		Name: m.cut.Relay, Schema: m.schema, PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(m, err)
	return testenv.Run(m, relay.Run)
}

// pass waits until so many more events have arrived.
func (m *changeover) pass(n int) {
	m.Helper()
	count := func() int {
		all, err := m.arrived.Arrived()
		require.NoError(m, err)
		return len(all)
	}
	before := count()
	require.Eventually(m, func() bool { return count() >= before+n }, testenv.Patience, 20*time.Millisecond)
}

// movesBothWays moves a system in use from Debezium to a relay and back, twice, by the steps of docs/move.md. In
// Kafka nothing is lost, repeated or out of the order of its key, and so it is in the handlers.
func movesBothWays(d *debezium) {
	m := newChangeover(d)
	seed := rand.Uint64()
	d.Logf("seed %d", seed)
	d.start(nil)
	m.consume()
	ctx := context.Background()
	stop := make(chan struct{})
	written := make(chan error, 1)
	go func() { written <- m.write(ctx, seed, stop) }()
	m.pass(200)
	for round := range 2 {
		start := time.Now()
		require.NoError(d, m.cuts.FromDebezium(ctx, m.cut, why))
		cut := time.Since(start)
		m.drain()
		require.NoError(d, m.cuts.BeginRelay(ctx, m.cut, why))
		stopRelay := m.relay()
		d.Logf("round %d: cut to the relay within %v, which began %v later", round, cut, time.Since(start)-cut)
		m.pass(200)

		d.resume()
		start = time.Now()
		require.NoError(d, m.cuts.ToDebezium(ctx, m.cut, why))
		d.Logf("round %d: cut to Debezium within %v", round, time.Since(start))
		m.pass(200)
		stopRelay()
	}
	close(stop)
	require.NoError(d, <-written)
	m.compare(seed)
}

// write has writers at work until stop is closed, at a pace that a connector can keep on a small machine.
func (m *changeover) write(ctx context.Context, seed uint64, stop <-chan struct{}) error {
	for ; ; seed++ {
		err := oracle.Write(ctx, oracle.Writers{DB: m.db, Schema: m.schema, Record: m.record, Seed: seed, Events: 20, Writers: 6, Keys: 50, Pause: 20 * time.Millisecond, Stop: stop})
		if err != nil {
			return err
		}
		select {
		case <-stop:
			return nil
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// drain waits as outbox cut does, and stops the connector when that says so.
func (m *changeover) drain() {
	m.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	require.ErrorIs(m, m.cuts.BeginRelay(ctx, m.cut, why), outboxops.ErrCutRefused, "the connector runs")
	require.NoError(m, m.cuts.AwaitDebezium(ctx, m.cut, func(p outboxops.DebeziumProgress) {
		m.Log(p)
		if p.Active && p.Unconfirmed == 0 {
			m.stop()
		}
	}))
}

func (m *changeover) compare(seed uint64) {
	m.Helper()
	ctx := context.Background()
	committed, err := oracle.Committed(ctx, m.db, m.schema)
	require.NoError(m, err)
	var handled int
	require.Eventually(m, func() bool {
		require.NoError(m, m.db.QueryRow(ctx, `SELECT count(*) FROM effect`).Scan(&handled))
		return m.arrived.Missing(committed) == 0 && handled >= len(committed)
	}, testenv.Patience, 50*time.Millisecond)
	v := oracle.Result{Seed: seed}
	arrived, err := m.arrived.Arrived()
	require.NoError(m, err)
	v.Compare(committed, arrived)
	m.Log(v)
	require.NoError(m, v.Err())
	require.Equal(m, len(committed), handled)
	var inversions, dead int
	require.NoError(m, m.db.QueryRow(ctx, `SELECT count(*) FROM (SELECT version < max(version) OVER (PARTITION BY key ORDER BY n) AS inverted FROM effect) AS e WHERE inverted`).Scan(&inversions))
	require.NoError(m, m.db.QueryRow(ctx, `SELECT count(*) FROM "Shop".event_delivery`).Scan(&dead))
	require.Zero(m, inversions)
	require.Zero(m, dead, "no repeat got to the handler")
}

// refusesCuts plays the connector, and looks at what is at the edge of a cut: a transaction that has recorded
// something is waited for, and one that is open and records later has its events behind the cut.
func refusesCuts(d *debezium) {
	m, ctx := newChangeover(d), context.Background()
	require.ErrorIs(d, m.cuts.BeginRelay(ctx, m.cut, why), outboxops.ErrCutRefused, "no slot")
	require.ErrorIs(d, m.cuts.ToDebezium(ctx, m.cut, why), outboxops.ErrCutRefused, "it has the events")
	_, err := d.db.Exec(ctx, `SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, d.name)
	require.NoError(d, err)
	d.Cleanup(func() {
		_, err := d.db.Exec(ctx, `SELECT pg_drop_replication_slot($1)`, d.name)
		require.NoError(d, err)
	})
	require.ErrorIs(d, m.cuts.BeginRelay(ctx, m.cut, why), outboxops.ErrNoCut)

	before, err := d.db.Begin(ctx)
	require.NoError(d, err)
	d.Cleanup(func() { _ = before.Rollback(ctx) }) // otherwise the pool's Close would wait for it if the test fails
	require.NoError(d, m.record(ctx, before, oracle.Event{ID: "before", Key: "a", Version: 1}))
	across, err := d.db.Begin(ctx)
	require.NoError(d, err)
	d.Cleanup(func() { _ = across.Rollback(ctx) })
	_, err = across.Exec(ctx, `CREATE TABLE elsewhere ()`)
	require.NoError(d, err)
	short, cancel := context.WithTimeout(ctx, 15*time.Second) // enough for the progress, and several lock timeouts
	defer cancel()
	err = m.cuts.FromDebezium(short, m.cut, why)
	require.ErrorIs(d, err, context.DeadlineExceeded)
	require.ErrorContains(d, err, "lock timeout", "the error says what it waited for")
	require.NoError(d, before.Commit(ctx))
	require.NoError(d, m.cuts.FromDebezium(ctx, m.cut, why))
	require.NoError(d, m.record(ctx, across, oracle.Event{ID: "across", Key: "a", Version: 2}))
	require.NoError(d, across.Commit(ctx))

	require.ErrorIs(d, m.cuts.FromDebezium(ctx, m.cut, why), outboxops.ErrCutRefused, "again")
	require.ErrorIs(d, m.cuts.ToDebezium(ctx, m.cut, why), outboxops.ErrCutRefused, "not finished")
	require.ErrorIs(d, m.cuts.Cancel(ctx, m.cut.Relay, why), outboxops.ErrCutRefused, "it would lose the events behind the cut")
	require.ErrorIs(d, m.cuts.FinishEarly(ctx, m.cut.Relay, why), outboxops.ErrCutRefused)
	err = m.cuts.BeginRelay(ctx, m.cut, why)
	require.ErrorIs(d, err, outboxops.ErrCutRefused)
	require.ErrorContains(d, err, "has not confirmed 1 events")
	stop := m.relay()
	require.Never(d, func() bool { return m.arrived.Has("across") }, 300*time.Millisecond, 50*time.Millisecond, "the relay waits")

	// What the publication has for the connector ends with the cut.
	_, err = d.db.Exec(ctx, `SELECT pg_logical_slot_get_binary_changes($1, NULL, NULL, 'proto_version', '1', 'publication_names', $2)`, d.name, d.publication)
	require.NoError(d, err)
	require.NoError(d, m.cuts.BeginRelay(ctx, m.cut, why))
	require.Eventually(d, func() bool { return m.arrived.Has("across") }, testenv.Patience, 20*time.Millisecond)
	require.False(d, m.arrived.Has("before"), "it is Debezium's")

	wrong := m.cut
	wrong.Slot = "nothing"
	require.ErrorIs(d, m.cuts.ToDebezium(ctx, wrong, why), outboxops.ErrCutRefused)
	wrong = m.cut
	wrong.Publication = "nothing"
	require.ErrorIs(d, m.cuts.ToDebezium(ctx, wrong, why), outboxops.ErrNoCut)
	stop()
	require.NoError(d, pgx.BeginFunc(ctx, d.db, func(tx pgx.Tx) error { return m.record(ctx, tx, oracle.Event{ID: "unsent", Key: "a", Version: 3}) }))
	short, cancel = context.WithTimeout(ctx, time.Second)
	defer cancel()
	require.ErrorContains(d, m.cuts.ToDebezium(short, m.cut, why), "the relay is behind")
	m.relay()
	require.NoError(d, m.cuts.ToDebezium(ctx, m.cut, why))
	p, err := m.cuts.DebeziumProgress(ctx, m.cut)
	require.NoError(d, err)
	require.True(d, p.IsDone(), "the relay has sent everything: %v", p)
	require.NoError(d, pgx.BeginFunc(ctx, d.db, func(tx pgx.Tx) error { return m.record(ctx, tx, oracle.Event{ID: "back", Key: "a", Version: 4}) }))
	p, err = m.cuts.DebeziumProgress(ctx, m.cut)
	require.NoError(d, err)
	require.EqualValues(d, 1, p.Unconfirmed)
}
