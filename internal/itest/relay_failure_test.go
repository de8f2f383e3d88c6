package itest

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestNotMigrated(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Schema(t)
	relay, err := outbox.NewRelay(db, nil, outbox.RelayConfig{Schema: schema})
	require.NoError(t, err)
	err = relay.Run(background)
	require.ErrorIs(t, err, outbox.ErrNotMigrated)
	require.ErrorContains(t, err, schema)
}

// A broker rejects all records of a request, good ones too. Only an event that is
// rejected alone counts as rejected, and it holds up no others.
func TestRefusedEvent(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "2000")
	reader := h.follow(t)
	events := numbered("a", 1, 20)
	events[10].Key = "b"
	events[10].Filler = random(5000) // over the topic's limit, within the client's
	h.commit(t, events...)
	log := new(testenv.Buffer)
	cfg := quick
	cfg.RetryInterval = time.Hour // the first look finds nothing
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	testenv.Run(t, h.relay(t, cfg).Run)
	good := append(append([]oracle.Event(nil), events[:10]...), events[11:]...)
	requireArrival(t, reader, good...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.ElementsMatch(t, good, arrived, "each once")
	h.awaitStatuses(t, map[string]int{"failed": 1})
	row, err := h.db.Query(background, h.sql(`
		SELECT f.status, f.error_class, f.last_error, f.retry_count, f.relay,
		       (f.event_id, f.event_type, f.source, f.aggregate_type, f.aggregate_id, f.payload, f.content_type, f.topic, f.occurred_at)
		     = (o.event_id, o.event_type, o.source, o.aggregate_type, o.aggregate_id, o.payload, o.content_type, o.topic, o.occurred_at) AS whole,
		       o.payload->>'id' AS id
		  FROM {s}.outbox_failed f JOIN {s}.outbox o ON o.id = f.outbox_id`))
	require.NoError(t, err)
	failed, err := pgx.CollectExactlyOneRow(row, pgx.RowToMap)
	require.NoError(t, err)
	require.Contains(t, failed["last_error"], "MESSAGE_TOO_LARGE")
	delete(failed, "last_error")
	require.Equal(t, map[string]any{"status": "failed", "error_class": "message_too_large", "retry_count": int32(0),
		"relay": "default", "whole": true, "id": events[10].ID}, failed)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "event rejected") }, testenv.Patience, time.Millisecond, "it is logged once it is saved")
}

// Rows that no Recorder wrote may be impossible to send. They stop nothing.
func TestImpossibleRow(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	_, err := h.db.Exec(background, h.sql(`
		INSERT INTO {s}.outbox (event_id, event_type, source, aggregate_type, aggregate_id, payload, content_type, headers, occurred_at)
		VALUES (gen_random_uuid(), 'nonsense', 's', 'a', 'k', '{}', 'application/json', NULL, now()),
		       (gen_random_uuid(), 'a.b.c.v1', 's', 'a', 'k', '{}', 'application/json', '[1]', now())`))
	require.NoError(t, err)
	events := numbered("key", 1, 3)
	h.commit(t, events...)
	cfg := quick
	cfg.Logger = slog.New(slog.DiscardHandler)
	testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, events...)
	require.Eventually(t, func() bool { return h.count(t, "outbox_failed") == 2 }, testenv.Patience, 10*time.Millisecond)
}

// While Kafka is unavailable events wait: none fails, none overtakes another. The log says when the
// outage began and when it ended, not how often the relay tried.
func TestKafkaAway(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1) // events of one that is still being made would wait elsewhere
	reader := h.follow(t)
	relay, dialer, log := h.relayWithoutKafka(t)
	testenv.Run(t, relay.Run)
	var all []oracle.Event
	for outage := range 3 {
		events := numbered("key", 1+100*outage, 100)
		h.commit(t, events...)
		all = append(all, events...)
		require.Eventually(t, func() bool { return strings.Count(log.String(), "Kafka fails") == outage+1 }, testenv.Patience, time.Millisecond)
		require.False(t, reader.Has(events[99].ID))
		dialer.broken.Store(false)
		requireArrival(t, reader, events...)
		require.Eventually(t, func() bool { return strings.Count(log.String(), "Kafka works again") == outage+1 }, testenv.Patience, time.Millisecond)
		dialer.breakAll()
	}
	require.Zero(t, h.count(t, "outbox_failed"))
	requireFirstsInOrder(t, reader, all)
}

// Kafka becomes unavailable when it has accepted the first part of a batch. The rest is
// sent again: if it were parked, most of a backlog would have to go through outbox_failed
// after the outage.
func TestKafkaLeavesInTheMiddleOfABatch(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1) // events of one that is still being made would wait elsewhere
	reader := h.follow(t)
	cut := &cutter{}
	relay, dialer, log := h.relayWithoutKafka(t, kgo.WithHooks(cut), kgo.ProducerBatchMaxBytes(5000), kgo.MaxProduceRequestsInflightPerBroker(1))
	cut.dialer = dialer
	events := numbered("key", 1, 300)
	h.commit(t, events...)
	dialer.broken.Store(false)
	testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "Kafka fails") }, testenv.Patience, time.Millisecond)
	requireArrival(t, reader, events[0])
	require.False(t, reader.Has(events[299].ID))
	dialer.broken.Store(false)
	requireArrival(t, reader, events...)
	require.Zero(t, h.count(t, "outbox_failed"), "parked")
	requireFirstsInOrder(t, reader, events)
}

// cutter is a hook that cuts the connections after the first acknowledgement.
type cutter struct {
	dialer *brokenDialer
	once   sync.Once
}

// OnProduceBatchWritten implements [kgo.HookProduceBatchWritten].
func (c *cutter) OnProduceBatchWritten(kgo.BrokerMetadata, string, int32, kgo.ProduceBatchMetrics) {
	c.once.Do(c.dialer.breakAll)
}

// relayWithoutKafka returns a relay whose connections to Kafka are cut, and what
// it logs. What once enters outbox_failed stays there.
func (h *relayFixture) relayWithoutKafka(t *testing.T, opts ...kgo.Opt) (*outbox.Relay, *brokenDialer, *testenv.Buffer) {
	t.Helper()
	dialer, log := &brokenDialer{}, new(testenv.Buffer)
	dialer.broken.Store(true)
	cfg := quick
	cfg.Schema = h.schema
	cfg.DeliveryTimeout = 1000 * time.Millisecond
	cfg.KeepSent = true
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	opts = append(append(testenv.KafkaOpts(h.brokers), kgo.Dialer(dialer.dial)), opts...)
	relay, err := outbox.NewRelay(h.db, opts, cfg)
	require.NoError(t, err)
	return relay, dialer, log
}

// While the relay sends, and Kafka takes its time, it has no transaction open.
func TestNoTransactionIsOpenWhileSending(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // which connections are whose
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1)
	reader, admin := h.follow(t), h.db
	h.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = h.schema })
	relay, dialer, log := h.relayWithoutKafka(t)
	testenv.Run(t, relay.Run)
	h.db = admin
	events := numbered("key", 1, 50)
	h.commit(t, events...)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "Kafka fails") }, testenv.Patience, time.Millisecond)
	requireNoIdleTransaction(t, admin, h.schema)
	dialer.broken.Store(false)
	requireArrival(t, reader, events...)
}

// requireNoIdleTransaction requires for more than a second, in which something else is awaited, that no
// connection of an application keeps a transaction open for it. A statement may take long on a busy
// machine; a transaction in which nothing runs for half a second waits for its client.
func requireNoIdleTransaction(t *testing.T, db *pgxpool.Pool, application string) {
	t.Helper()
	seen := 0
	for end := time.Now().Add(1200 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		var open, all int
		require.NoError(t, db.QueryRow(background, `SELECT count(*) FILTER (WHERE starts_with(state, 'idle in transaction') AND state_change < clock_timestamp() - interval '500 ms'), count(*)
			FROM pg_stat_activity WHERE application_name = $1`, application).Scan(&open, &all))
		require.Zero(t, open)
		seen += all
	}
	require.Positive(t, seen, "it has connections")
}

// The relay can be stopped while Kafka is unavailable, and loses nothing by it.
func TestStopWhileKafkaIsAway(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1) // events of one that is still being made would wait elsewhere
	reader := h.follow(t)
	relay, _, log := h.relayWithoutKafka(t)
	stop := testenv.Run(t, relay.Run)
	events := numbered("key", 1, 100)
	h.commit(t, events...)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "Kafka fails") }, testenv.Patience, time.Millisecond)
	stop()
	testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, events...)
	requireFirstsInOrder(t, reader, events)
}

// Connections to PostgreSQL die at any moment; nothing is lost or sent twice by
// that, because a move whose outcome is unknown is looked up.
func TestPostgresConnectionsDie(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // which connections are whose
	h := newRelayFixture(t)
	reader := h.follow(t)
	admin := h.db
	h.db = testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["application_name"] = h.schema })
	cfg := quick
	cfg.BatchSize = 10
	cfg.Logger = slog.New(slog.DiscardHandler)
	testenv.Run(t, h.relay(t, cfg).Run)
	h.db = admin
	var all []oracle.Event
	for i := range 40 {
		events := numbered("key", 1+i*50, 50)
		h.commit(t, events...)
		all = append(all, events...)
		_, err := admin.Exec(background, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, h.schema)
		require.NoError(t, err)
	}
	requireArrival(t, reader, all...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Equal(t, all, arrived)
}

// A relay whose lease was taken cannot move the cursor, whatever it believes.
func TestTakenLease(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	log := new(testenv.Buffer)
	cfg := quick
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	first := numbered("key", 1, 1)
	h.commit(t, first...)
	requireArrival(t, reader, first...)
	_, err := h.db.Exec(background, h.sql(`UPDATE {s}.outbox_lease SET holder = 'thief', epoch = epoch + 1`))
	require.NoError(t, err)
	cursors := h.count(t, "outbox_cursor")
	h.commit(t, numbered("key", 2, 1)...)
	require.Eventually(t, func() bool { return strings.Contains(log.String(), "lease lost") }, testenv.Patience, time.Millisecond)
	require.LessOrEqual(t, h.count(t, "outbox_cursor"), cursors+1, "at most the move that was on its way")
	stop()
	require.Equal(t, 1, h.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE holder = 'thief' AND expires_at > now()`))
}

func (h *relayFixture) countWhere(t testing.TB, sql string) (n int) {
	t.Helper()
	require.NoError(t, h.db.QueryRow(background, h.sql(sql)).Scan(&n))
	return n
}

// requireFirstsInOrder holds the first arrivals against what was committed.
func requireFirstsInOrder(t *testing.T, reader *oracle.Reader, want []oracle.Event) {
	t.Helper()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	seen := map[string]bool{}
	var firsts []oracle.Event
	for _, e := range arrived {
		if !seen[e.ID] {
			firsts = append(firsts, e)
		}
		seen[e.ID] = true
	}
	require.Equal(t, want, firsts)
}

var errCable = errors.New("cable pulled")

// brokenDialer stands between the relay and Kafka.
type brokenDialer struct {
	broken   atomic.Bool
	rejected atomic.Int64 // connections since breakAll
	mu       sync.Mutex
	conns    []net.Conn
}

func (d *brokenDialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	if d.broken.Load() {
		d.rejected.Add(1)
		return nil, errCable
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.broken.Load() { // breakAll was called meanwhile, and has not seen conn
		conn.Close()
		return nil, errCable
	}
	d.conns = append(d.conns, conn)
	return conn, nil
}

func (d *brokenDialer) breakAll() {
	d.rejected.Store(0)
	d.broken.Store(true)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, conn := range d.conns {
		conn.Close()
	}
	d.conns = nil
}
