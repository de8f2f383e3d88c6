package itest

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

var background = context.Background()

// quick polls often, because tests wait for the poll.
var quick = outbox.RelayConfig{
	PollInterval: 10 * time.Millisecond, RetryInterval: 20 * time.Millisecond, Breaker: outbox.BreakerConfig{OpenFor: 100 * time.Millisecond},
}

func TestRelayDeliversInOrder(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	events := numbered("a", 1, 5000)
	h.commit(t, events...)
	cfg := quick
	cfg.BatchSize = 300 // many batches of one window, the last one not full
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	requireArrival(t, reader, events...)
	stop()
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Equal(t, events, arrived)
}

// An id cursor passes the id of a transaction that has not committed yet, and
// never returns to it.
func TestLateCommitIsNotSkipped(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	testenv.Run(t, h.relay(t, quick).Run)
	late, err := h.db.Begin(background)
	require.NoError(t, err)
	slow := numbered("slow", 1, 1)
	require.NoError(t, h.record(background, late, slow...))
	for i := range 5 {
		fast := numbered("fast", 1+i, 1)
		h.commit(t, fast...)
		requireArrival(t, reader, fast...)
	}
	require.NoError(t, late.Commit(background))
	requireArrival(t, reader, slow...)
}

// A cursor that waits for xmin stalls behind any write transaction of the whole
// cluster.
func TestOpenTransactionDoesNotStall(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	testenv.Run(t, h.relay(t, quick).Run)

	here, err := h.db.Begin(background)
	require.NoError(t, err)
	defer here.Rollback(background)
	require.NoError(t, h.record(background, here, numbered("open", 1, 1)...))

	elsewhere := testenv.OtherDatabase(t)
	there, err := elsewhere.Begin(background)
	require.NoError(t, err)
	defer there.Rollback(background)
	_, err = there.Exec(background, "CREATE TABLE held_open (n int)")
	require.NoError(t, err)

	for i := range 3 {
		events := numbered("key", 1+10*i, 10)
		h.commit(t, events...)
		requireArrival(t, reader, events...)
	}
	require.NoError(t, here.Rollback(background))
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Len(t, arrived, 30, "and what rolled back did not arrive")
}

// Ordering by (xid, id) delivers version 2 before version 1 when the transaction
// that wrote version 2 took its id first.
func TestEarlyTransactionIDDoesNotInvert(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	early, err := h.db.Begin(background)
	require.NoError(t, err)
	_, err = early.Exec(background, "SELECT pg_current_xact_id()")
	require.NoError(t, err)
	versions := numbered("key", 1, 2)
	h.commit(t, versions[0])
	require.NoError(t, h.record(background, early, versions[1]))
	require.NoError(t, early.Commit(background))
	testenv.Run(t, h.relay(t, quick).Run)
	requireArrival(t, reader, versions...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Equal(t, versions, arrived)
}

func TestWake(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	relay := h.relay(t, outbox.RelayConfig{PollInterval: time.Hour})
	testenv.Run(t, relay.Run)
	for i := range 3 {
		events := numbered("key", 1+i, 1)
		h.commit(t, events...)
		relay.Waker().Wake()
		relay.Waker().Wake() // once too often does no harm
		requireArrival(t, reader, events...)
	}
}

func TestRunTwice(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	relay := h.relay(t, quick)
	stop := testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return relay.Health().Leading }, testenv.Patience, time.Millisecond)
	ctx, cancel := context.WithCancel(background)
	cancel()
	require.ErrorIs(t, relay.Run(ctx), outbox.ErrRunning)
	stop()
	events := numbered("key", 1, 3)
	h.commit(t, events...)
	testenv.Run(t, relay.Run) // again, after it was stopped
	requireArrival(t, reader, events...)
}

// A relay that stops releases its lease: the standby need not wait for it to expire, and starts
// where the other one ended.
func TestStandbyTakesOver(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := quick
	cfg.Lease = time.Hour
	first := testenv.Run(t, h.relay(t, cfg).Run)
	before := numbered("key", 1, 100)
	h.commit(t, before...)
	requireArrival(t, reader, before...)
	testenv.Run(t, h.relay(t, cfg).Run)
	first()
	after := numbered("key", 101, 100)
	h.commit(t, after...)
	requireArrival(t, reader, after...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	require.Equal(t, append(before, after...), arrived, "each once and in order")
}

// An operator empties the lease table while the relay is running. No process gets an epoch that was
// used before.
func TestEmptiedLeaseTable(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := quick
	cfg.DeliveryTimeout, cfg.Lease = time.Second, 1600*time.Millisecond
	cfg.Logger = slog.New(slog.DiscardHandler)
	testenv.Run(t, h.relay(t, cfg).Run)
	var epoch int64
	for i := range 4 {
		events := numbered("key", 1+i, 1)
		h.commit(t, events...)
		requireArrival(t, reader, events...)
		var next int64
		require.NoError(t, h.db.QueryRow(background, h.sql(`DELETE FROM {s}.outbox_lease RETURNING epoch`)).Scan(&next))
		require.Greater(t, next, epoch)
		epoch = next
	}
}

// sql completes a statement with the schema.
func (h *relayFixture) sql(s string) string {
	return string(bytes.ReplaceAll([]byte(s), []byte("{s}"), []byte(pgx.Identifier{h.schema}.Sanitize())))
}

// Every relay name has a cursor of its own and publishes everything.
func TestTwoNames(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	reader := h.follow(t)
	events := numbered("key", 1, 10)
	h.commit(t, events...)
	for _, name := range []string{"one", "two"} {
		cfg := quick
		cfg.Name = name
		testenv.Run(t, h.relay(t, cfg).Run)
	}
	require.Eventually(t, func() bool {
		arrived, err := reader.Arrived()
		return err == nil && len(arrived) == 20
	}, testenv.Patience, time.Millisecond)
}

// An idle relay must not use up transaction ids, nor write to the database.
func TestIdlePollWritesNothing(t *testing.T) {
	// Not parallel: a relay is idle only while no transaction of the cluster ends.
	testenv.Direct(t)
	h := newRelayFixture(t)
	reader := h.follow(t)
	cfg := quick
	cfg.PollInterval = time.Millisecond
	testenv.Run(t, h.relay(t, cfg).Run)
	events := numbered("key", 1, 1)
	h.commit(t, events...)
	requireArrival(t, reader, events...)
	h.awaitClaim(t)
	state := func() (cursors int, leaseVersion string, calls int64) {
		require.NoError(t, h.db.QueryRow(background, h.sql(
			`SELECT (SELECT count(*) FROM {s}.outbox_cursor), (SELECT xmin::text || xmax::text || ctid::text FROM {s}.outbox_lease),
			        (SELECT seq_scan + idx_scan FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'outbox')`),
			h.schema).Scan(&cursors, &leaseVersion, &calls))
		return cursors, leaseVersion, calls
	}
	var cursors int
	var lease string
	var calls int64
	require.Eventually(t, func() bool { // the window of that event is closed, and the leader has said how it is
		before := cursors
		cursors, lease, calls = state()
		return before == cursors && cursors > 1 && h.countWhere(t, `SELECT count(*) FROM {s}.outbox_lease WHERE state ->> 'epoch' = epoch::text`) == 1
	}, testenv.Patience, 50*time.Millisecond)
	require.Eventually(t, func() bool { // and many polls later nothing was written
		_, _, now := state()
		return now > calls+100
	}, testenv.Patience, 10*time.Millisecond)
	cursorsNow, leaseNow, _ := state()
	require.Equal(t, cursors, cursorsNow)
	require.Equal(t, lease, leaseNow)
}

// Pools may be set to any way of running queries, for example for PgBouncer.
func TestRelayExecModes(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	modes := []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	}
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			h := newRelayFixture(t)
			reader := h.follow(t)
			h.db = testenv.PoolIn(t, mode)
			events := numbered("key", 1, 250)
			h.commit(t, events...)
			cfg := quick
			cfg.BatchSize = 100
			testenv.Run(t, h.relay(t, cfg).Run)
			requireArrival(t, reader, events...)
			arrived, err := reader.Arrived()
			require.NoError(t, err)
			require.Equal(t, events, arrived)
		})
	}
}

func TestRecordsAreCloudEvents(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	ctx := outbox.WithCorrelationID(background, "corr-1")
	ctx = outbox.WithTraceParent(ctx, "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	event := numbered("key", 7, 1)[0]
	require.NoError(t, pgx.BeginFunc(ctx, h.db, func(tx pgx.Tx) error { return h.record(ctx, tx, event) }))
	var eventID string
	require.NoError(t, h.db.QueryRow(ctx, h.sql(`SELECT event_id::text FROM {s}.outbox`)).Scan(&eventID))
	for name, mode := range map[string]outbox.Mode{"binary": outbox.Binary, "structured": outbox.Structured} {
		cfg := quick
		cfg.Name, cfg.Mode = name, mode
		testenv.Run(t, h.relay(t, cfg).Run)
	}
	binary, structured := h.firstOfEach(t)
	headers := map[string]string{}
	for _, header := range binary.Headers {
		headers[header.Key] = string(header.Value)
	}
	require.Equal(t, map[string]string{
		"ce_specversion": "1.0", "ce_id": eventID, "ce_source": "test", "ce_type": "test.oracle.happened.v1",
		"ce_subject": "key", "ce_time": "2023-11-14T22:13:20.007Z", "ce_aggregatetype": "Key",
		"content-type": "application/json", "ce_correlationid": "corr-1",
		"ce_traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"traceparent":    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
	}, headers)
	require.Equal(t, "key", string(binary.Key))
	var got oracle.Event
	require.NoError(t, json.Unmarshal(binary.Value, &got))
	require.Equal(t, event, got)

	var whole struct {
		ID, Source, Type, Subject, Time, Correlationid string
		Data                                           oracle.Event
	}
	require.Equal(t, "key", string(structured.Key))
	require.NoError(t, json.Unmarshal(structured.Value, &whole))
	require.Equal(t, eventID, whole.ID)
	require.Equal(t, "corr-1", whole.Correlationid)
	require.Equal(t, event, whole.Data)
}

// firstOfEach returns the first record with its attributes in headers, and the
// first with them in its value.
func (h *relayFixture) firstOfEach(t *testing.T) (binary, structured *kgo.Record) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(h.brokers...), kgo.ConsumeTopics(h.topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	for binary == nil || structured == nil {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err())
		fetches.EachRecord(func(r *kgo.Record) {
			if r.Headers[0].Key == "content-type" {
				structured = r
			} else {
				binary = r
			}
		})
	}
	return binary, structured
}

var relayConfigTests = []struct {
	name string
	cfg  outbox.RelayConfig
	want []string // fields that the error names
}{
	{"zero is ready", outbox.RelayConfig{}, nil},
	{"negative batch", outbox.RelayConfig{BatchSize: -1}, []string{"BatchSize"}},
	{"retries by error", outbox.RelayConfig{Retry: outbox.RetryPolicy{RetriesFor: func(error) int { return 1 }}}, []string{"Retry.RetriesFor"}},
	{"batch too large", outbox.RelayConfig{BatchSize: 10_001}, []string{"BatchSize"}},
	{"negative durations", outbox.RelayConfig{PollInterval: -1, DeliveryTimeout: -1, Lease: -1},
		[]string{"PollInterval", "DeliveryTimeout", "Lease"}},
	{"negative retries", outbox.RelayConfig{RetryInterval: -1, Retry: outbox.RetryPolicy{MaxRetries: -1}}, []string{"RetryInterval", "Retry.MaxRetries"}},
	{"negative waits", outbox.RelayConfig{Retry: outbox.RetryPolicy{RetryWait: -1, MaxRetryWait: -1}}, []string{"Retry.RetryWait", "Retry.MaxRetryWait"}},
	{"a first wait above the longest", outbox.RelayConfig{Retry: outbox.RetryPolicy{RetryWait: 6 * time.Minute}}, []string{"Retry.RetryWait is 6m0s: must not be above Retry.MaxRetryWait, 5m0s"}},
	{"waits that go together", outbox.RelayConfig{Retry: outbox.RetryPolicy{RetryWait: time.Minute, MaxRetryWait: time.Minute}}, nil},
	{"a breaker that cannot judge", outbox.RelayConfig{Breaker: outbox.BreakerConfig{FailureRate: 2, OpenFor: -1}},
		[]string{"Breaker.FailureRate", "Breaker.OpenFor"}},
	{"a send as long as the lease", outbox.RelayConfig{DeliveryTimeout: 20 * time.Second},
		[]string{"field DeliveryTimeout is 20s: one and a half DeliveryTimeout must be shorter than Lease, 30s by default"}},
	{"a send that is barely shorter than the lease", outbox.RelayConfig{DeliveryTimeout: 20*time.Second - 1}, nil},
	{"a delivery as long as there is", outbox.RelayConfig{DeliveryTimeout: outbox.Forever, Lease: outbox.Forever}, []string{"field DeliveryTimeout is 2562047h47m16.854775807s: one and a half DeliveryTimeout must be shorter than Lease"}},
	{"a short lease, which is all that was given", outbox.RelayConfig{Lease: 10 * time.Second}, []string{"field Lease is 10s: must be longer than one and a half DeliveryTimeout, 15s by default"}},
	{"a short delivery and a short lease", outbox.RelayConfig{DeliveryTimeout: 6 * time.Second, Lease: 9 * time.Second},
		[]string{"field DeliveryTimeout is 6s: one and a half DeliveryTimeout must be shorter than Lease, 9s"}},
	{"a longest wait below the first", outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxRetryWait: time.Millisecond}}, []string{"field Retry.MaxRetryWait is 1ms: must not be below Retry.RetryWait, 1s by default"}},
	{"unknown mode", outbox.RelayConfig{Mode: 2}, []string{"Mode"}},
	{"schema with NUL and bad name", outbox.RelayConfig{Schema: "a\x00", Name: string([]byte{0xff})}, []string{"Schema", "Name"}},
}

func TestRelayConfig(t *testing.T) {
	t.Parallel()
	db := new(pgxpool.Pool)
	for _, tt := range relayConfigTests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := outbox.NewRelay(db, nil, tt.cfg)
			if len(tt.want) == 0 {
				require.NoError(t, err)
			}
			for _, field := range tt.want {
				require.ErrorContains(t, err, field)
			}
		})
	}
	_, err := outbox.NewRelay(nil, nil, outbox.RelayConfig{})
	require.ErrorIs(t, err, outbox.ErrNilArgument)
}

var kafkaOptionTests = []struct {
	name string
	opt  kgo.Opt
	want string
}{
	{"a group", kgo.ConsumerGroup("g"), "ConsumerGroup"},
	{"topics to consume", kgo.ConsumeTopics("t"), "ConsumeTopics"},
	{"a transactional id", kgo.TransactionalID("t"), "TransactionalID"},
	{"no idempotence", kgo.DisableIdempotentWrite(), "DisableIdempotentWrite"},
	{"manual flushing", kgo.ManualFlushing(), "ManualFlushing"},
	{"one topic for all", kgo.DefaultProduceTopicAlways(), "invalid empty DefaultProduceTopic"},
	{"a partitioner that scatters keys", kgo.RecordPartitioner(kgo.RoundRobinPartitioner()), "RecordPartitioner: kgo.RoundRobinPartitioner"},
	{"what kgo itself refuses", kgo.ProducerBatchMaxBytes(-1), "kafka option ProducerBatchMaxBytes:"},
	{"fewer acks", kgo.RequiredAcks(kgo.LeaderAck()), "idempoten"},
	{"what is no matter of promises", kgo.ClientID("x"), ""},
}

func TestKafkaOptions(t *testing.T) {
	t.Parallel()
	for _, tt := range kafkaOptionTests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := outbox.NewRelay(new(pgxpool.Pool), []kgo.Opt{tt.opt}, outbox.RelayConfig{})
			if tt.want == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, tt.want)
			}
		})
	}
}

// Several may be made of the same options at once, and a relay makes its clients
// when it runs. The race detector finds what franz-go writes to them.
func TestOptionsAreShared(t *testing.T) {
	t.Parallel()
	opts := []kgo.Opt{kgo.ProducerBatchCompression(kgo.ZstdCompression(), kgo.SnappyCompression())}
	var relays sync.WaitGroup
	for range 8 {
		relays.Go(func() {
			_, err := outbox.NewRelay(new(pgxpool.Pool), opts, outbox.RelayConfig{})
			assert.NoError(t, err)
		})
	}
	relays.Wait()
}
