package itest

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A relay that is started again after kill -9 waits for the lease of the process that is gone, half
// a minute by default. It logs that.
func TestStandbySaysWhatItWaitsFor(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	held := func(until string) {
		h.exec(t, `INSERT INTO {s}.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ('default', 'gone/17/x', 7, $1::text::timestamptz, '20 s')
			ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at`, until)
	}
	held("infinity")
	log := new(testenv.Buffer)
	cfg := quick
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	stop := testenv.Run(t, h.relay(t, cfg).Run)
	requireLoggedOnce(t, log, "another process holds a lease that does not expire", cfg.PollInterval, "holder=gone/17/x")
	stop()
	held(time.Now().Add(15 * time.Second).Format(time.RFC3339Nano))
	testenv.Run(t, h.relay(t, cfg).Run)
	requireLoggedOnce(t, log, "if that one is gone, this one takes over within at_most", cfg.PollInterval, "holder=gone/17/x at_most=20.01s")
	held("-infinity")
	requireLoggedOnce(t, log, `level=INFO msg="outbox: lease taken, this process relays"`, cfg.PollInterval)
}

// A relay that leads at once has nothing to say.
func TestLeaderIsQuiet(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // through a pooler it says that it is behind one
	h := newRelayFixture(t)
	log := new(testenv.Buffer)
	cfg := quick
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	relay := h.relay(t, cfg)
	testenv.Run(t, relay.Run)
	require.Eventually(t, func() bool { return relay.Health().Leading }, testenv.Patience, time.Millisecond)
	require.Empty(t, log.String())
}

// requireLoggedOnce waits for a line with a text, which does not come again within ten polls.
func requireLoggedOnce(t testing.TB, log *testenv.Buffer, text string, poll time.Duration, parts ...string) {
	t.Helper()
	require.Eventually(t, func() bool { return strings.Contains(log.String(), text) }, testenv.Patience, time.Millisecond, text)
	time.Sleep(10 * poll)
	require.Equal(t, 1, strings.Count(log.String(), text), "%s", log)
	for line := range strings.Lines(log.String()) {
		for _, part := range parts {
			if strings.Contains(line, text) {
				require.Contains(t, line, part)
			}
		}
	}
}

// A pool without a free connection is as silent as a PostgreSQL that does not answer: what waits
// for one says so before its first try has failed.
func TestWaitingForPostgresIsSaid(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	db := testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.MaxConns = 1 })
	conn, err := db.Acquire(background)
	require.NoError(t, err)
	defer conn.Release()
	handler := outbox.Handle("COUNTED", s.count)
	for name, run := range map[string]func(*slog.Logger) (func(context.Context) error, error){
		"at_most=30s relay=default": func(log *slog.Logger) (func(context.Context) error, error) {
			r, err := outbox.NewRelay(db, testenv.KafkaOpts(s.brokers), outbox.RelayConfig{Schema: s.schema, Logger: log})
			return r.Run, err
		},
		"at_most=10s group=c": func(log *slog.Logger) (func(context.Context) error, error) {
			c, err := outbox.NewConsumer(db, testenv.KafkaOpts(s.brokers), s.events,
				"c", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: log}}, handler)
			return c.Run, err
		},
		"at_most=10s group=w": func(log *slog.Logger) (func(context.Context) error, error) {
			w, err := outbox.NewWorker(db, s.events, "w", outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: log}}, handler)
			return w.Run, err
		},
	} {
		log := new(testenv.Buffer)
		runs, err := run(slog.New(slog.NewTextHandler(log, nil)))
		require.NoError(t, err)
		stop := testenv.Run(t, runs)
		requireLoggedOnce(t, log, `level=INFO msg="outbox: waiting for PostgreSQL, or for a connection of its pool"`, time.Millisecond, strings.Fields(name)...)
		stop()
	}
}

// A member without partitions says whether it waits for the group, or has nothing to do until
// another member leaves.
func TestMemberWithoutPartitionsSaysWhy(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	s := newStartFixture(t, 1)
	slow, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...), kgo.ConsumerGroup(s.group), kgo.ConsumeTopics(s.topic), kgo.BlockRebalanceOnPoll(),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()), kgo.RebalanceTimeout(time.Minute))
	require.NoError(t, err)
	defer slow.CloseAllowingRebalance()
	s.put(t, 0, 1)
	require.Positive(t, slow.PollRecords(t.Context(), 1).NumRecords()) // and it lets no rebalance happen

	cfg := outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}
	s.run(t, cfg, kgo.SessionTimeout(12*time.Second), kgo.HeartbeatInterval(time.Second))
	const waits = `level=INFO msg="outbox: waiting for the group to assign partitions; a member that is gone has to be expelled, and others have to give up theirs"`
	requireLoggedOnce(t, s.log, waits, 100*time.Millisecond, "at_most=5m0s", "group="+s.group)
	slow.CloseAllowingRebalance()
	s.requireSeen(t, s.put(t, 0, 3)...)

	require.NotContains(t, s.log.String(), "standing by")
	s.run(t, cfg, kgo.SessionTimeout(12*time.Second), kgo.HeartbeatInterval(time.Second)) // of two members one has nothing to do
	requireLoggedOnce(t, s.log, "standing by, the group has no partition for this member; if another member is gone, its partitions are assigned within at_most",
		100*time.Millisecond, "at_most=13s")
}

// A worker that is started again after kill -9 waits for what the one before had, and says so once.
// One that begins alone has nothing to say.
func TestWorkerSaysWhatOthersHave(t *testing.T) {
	t.Parallel()
	f := newWorkerFixture(t)
	var first, second workerLog
	works, goOn := make(chan struct{}), make(chan struct{})
	handler := outbox.HandleNoTx("STEP", func(context.Context, step, outbox.Metadata) error {
		works <- struct{}{}
		<-goOn
		return nil
	})
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, Lease: 12 * time.Second}
	cfg.Logger = first.logger()
	f.commit(step{"a", 1}, step{"a", 2})
	f.start(cfg, handler)
	<-works
	cfg.Logger = second.logger()
	_, stop := f.start(cfg, handler)
	const said = `level=INFO msg="outbox: other processes have deliveries, and later ones of the same keys wait for them; the deliveries of a process that is gone are taken over within at_most"`
	requireLoggedOnce(t, &second.Buffer, said, time.Millisecond, "group=bank deliveries=", "at_most=1") // 12 s, or a little less, and 4 s
	stop()
	close(goOn)
	<-works
	require.Zero(t, first.count(said))
}
