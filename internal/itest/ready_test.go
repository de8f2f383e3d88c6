package itest

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// cabledRelay returns a relay that reaches Kafka by a cable.
func (h *relayFixture) cabledRelay(t *testing.T, cable *brokenDialer, log *slog.Logger) *outbox.Relay {
	t.Helper()
	r, err := outbox.NewRelay(h.db, append(testenv.KafkaOpts(h.brokers), kgo.Dialer(cable.dial)), outbox.RelayConfig{
		Schema: h.schema, PollInterval: 20 * time.Millisecond, DeliveryTimeout: time.Second, Lease: 3 * time.Second, Logger: log,
	})
	require.NoError(t, err)
	return r
}

// In an outage of Kafka that all processes see, relay and consumer stay ready and say that they do not work, what is
// away, how and since when. A worker needs no Kafka. The log says once that Kafka fails, and that it works again.
func TestReadyInAnOutageOfKafka(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	h := newRelayFixture(t)
	cable := &brokenDialer{}
	var log testenv.Buffer
	relay := h.cabledRelay(t, cable, slog.New(slog.NewTextHandler(&log, nil)))
	consumer, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), kgo.Dialer(cable.dial)), s.events, "away-"+s.topic, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart},
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	worker, err := outbox.NewWorker(s.db, s.events, "w-"+s.topic, outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.DiscardHandler)}},
		outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	testenv.Run(t, consumer.Run)
	testenv.Run(t, worker.Run)
	awaitHealth(t, relay, true, true)
	requireReady(t, consumer, 1)
	require.Eventually(t, func() bool { h := worker.Health(); return h.Ready && h.Works && h.Answered }, testenv.Patience, 5*time.Millisecond)
	require.True(t, relay.Health().Answered && consumer.Health().Answered)

	cut := time.Now()
	cable.breakAll()
	h.commit(t, numbered("a", 1, 3)...)
	outageOf := func(all []outbox.Outage) (found *outbox.Outage) {
		for _, o := range all {
			if o.What == "Kafka" {
				found = &o
			}
		}
		return found
	}
	var seen outbox.Outage
	for ; time.Since(cut) < 20*time.Second; time.Sleep(10 * time.Millisecond) {
		r, c, w := relay.Health(), consumer.Health(), worker.Health()
		require.True(t, r.Ready && r.Live, r.Reasons)
		require.True(t, c.Ready && c.Live, c.Reasons)
		require.True(t, w.Ready && w.Works, w.Reasons)
		if ofRelay, ofConsumer := outageOf(r.Outages), outageOf(c.Outages); ofRelay != nil && ofConsumer != nil {
			require.False(t, r.Works || c.Works)
			require.WithinRange(t, ofRelay.Since, cut, time.Now())
			require.WithinRange(t, ofConsumer.Since, cut, time.Now())
			seen = *ofConsumer
			break
		}
	}
	require.Contains(t, seen.Err, "no answer of Kafka at "+s.brokers[0])
	require.Contains(t, seen.Err, errCable.Error())
	cable.broken.Store(false)
	awaitHealth(t, relay, true, true)
	require.Eventually(t, func() bool { return consumer.Health().Works }, testenv.Patience, 5*time.Millisecond)
	require.Equal(t, 1, strings.Count(log.String(), `msg="outbox: Kafka fails, trying until it works"`), log.String())
	require.Equal(t, 1, strings.Count(log.String(), `msg="outbox: Kafka works again"`), log.String())
	first, _, _ := strings.Cut(log.String(), "Kafka works again")
	require.Contains(t, first, "no answer of Kafka at "+h.brokers[0], "the first error says what does not answer")
}

// refuseLogins has a cluster refuse logins as Kafka does. Kfake hangs up otherwise.
func refuseLogins(cluster *kfake.Cluster) {
	cluster.ControlKey(kmsg.SASLAuthenticate.Int16(), func(r kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		answer := r.ResponseKind().(*kmsg.SASLAuthenticateResponse)
		answer.ErrorCode = kerr.SaslAuthenticationFailed.Code
		return answer, nil, true
	})
}

// A relay and a consumer whose login Kafka does not take are not ready, also with nothing to send, and say so.
func TestReadyRefused(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-256", "u", "right"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	refuseLogins(cluster)
	opts := []kgo.Opt{kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.SASL(scram.Auth{User: "u", Pass: "hunter2222"}.AsSha256Mechanism())}
	var log testenv.Buffer
	logger := slog.New(slog.NewTextHandler(&log, nil))
	relay, err := outbox.NewRelay(s.db, opts, outbox.RelayConfig{Schema: s.schema, PollInterval: 20 * time.Millisecond, Logger: logger})
	require.NoError(t, err)
	consumer, err := outbox.NewConsumer(s.db, opts, s.events, "refused-"+s.topic, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logger, From: outbox.FromStart},
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	testenv.Run(t, relay.Run)
	testenv.Run(t, consumer.Run)
	awaitHealth(t, relay, true, false, "Kafka does not serve this process")
	require.Eventually(t, func() bool {
		h := relay.Health()
		return len(h.Outages) == 1 && h.Outages[0].Class == "refused_login"
	}, testenv.Patience, time.Millisecond)
	requireNoWork(t, consumer, "Kafka does not serve this process")
	require.Eventually(t, func() bool {
		h := consumer.Health()
		return !h.Ready && len(h.Outages) == 1 && h.Outages[0].Class == "refused_login"
	}, testenv.Patience, time.Millisecond)
	require.GreaterOrEqual(t, strings.Count(log.String(), cluster.ListenAddrs()[0]), 2)
	require.NotContains(t, log.String(), "hunter2222")
}

// A process that Kafka does not answer is not ready while Kafka answers another one of the relay: a leader learns it
// from its standby, and a standby from its leader.
func TestReadyHereButNotThere(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	cables := [2]*brokenDialer{{}, {}}
	quiet := slog.New(slog.DiscardHandler)
	leader, standby := h.cabledRelay(t, cables[0], quiet), h.cabledRelay(t, cables[1], quiet)
	testenv.Run(t, leader.Run)
	require.Eventually(t, func() bool { return leader.Health().Leading }, testenv.Patience, 5*time.Millisecond)
	testenv.Run(t, standby.Run)
	awaitHealth(t, leader, true, true)
	awaitHealth(t, standby, true, true)

	cables[1].breakAll()
	awaitHealth(t, standby, true, false, "Kafka does not answer this process, and has answered another one")
	require.True(t, leader.Health().Ready)
	cables[1].broken.Store(false)
	awaitHealth(t, standby, true, true)

	cables[0].breakAll()
	awaitHealth(t, leader, true, false, "Kafka does not answer this process, and has answered another one")
	require.True(t, standby.Health().Ready)
	cables[0].broken.Store(false)
	awaitHealth(t, leader, true, true)
	require.True(t, leader.Health().Leading)
}

// The same with two consumers of a group.
func TestReadyHereButNotThereOfConsumers(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 2)
	cable := &brokenDialer{}
	member := func(opts ...kgo.Opt) *outbox.Consumer {
		c, err := outbox.NewConsumer(s.db, append(testenv.KafkaOpts(s.brokers), opts...), s.events, "there-"+s.topic, outbox.ConsumerConfig{
			HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart},
		}, outbox.Handle("COUNTED", s.count))
		require.NoError(t, err)
		testenv.Run(t, c.Run)
		return c
	}
	there, here := member(), member(kgo.Dialer(cable.dial))
	requireReady(t, there, 1)
	requireReady(t, here, 1)
	cable.breakAll()
	requireNoWork(t, here, "Kafka does not answer this process, and has answered another one")
	require.False(t, here.Health().Ready)
	require.True(t, there.Health().Ready)
	cable.broken.Store(false)
	require.Eventually(t, func() bool { return here.Health().Ready }, testenv.Patience, 5*time.Millisecond)
}

// An outage of Kafka for all processes makes none of them not ready: what Kafka has answered the standby before
// does not count.
func TestReadyWhileKafkaAnswersNoRelay(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	cable := &brokenDialer{}
	quiet := slog.New(slog.DiscardHandler)
	leader, standby := h.cabledRelay(t, cable, quiet), h.cabledRelay(t, cable, quiet)
	testenv.Run(t, leader.Run)
	require.Eventually(t, func() bool { return leader.Health().Leading }, testenv.Patience, 5*time.Millisecond)
	testenv.Run(t, standby.Run)
	awaitHealth(t, leader, true, true)
	awaitHealth(t, standby, true, true)

	cable.breakAll()
	h.commit(t, numbered("a", 1, 3)...)
	seen := false
	for cut := time.Now(); time.Since(cut) < 13*time.Second && (!seen || len(standby.Health().Outages) == 0); time.Sleep(10 * time.Millisecond) {
		health := leader.Health()
		require.True(t, health.Ready, health.Reasons)
		seen = seen || len(health.Outages) > 0
	}
	require.True(t, seen && len(standby.Health().Outages) > 0, "the outage is not seen")
	cable.broken.Store(false)
	awaitHealth(t, leader, true, true)
}

// A process whose relay has ended by a cut says so: it is ready and does not work.
func TestStandbyOfEndedRelay(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	var log testenv.Buffer
	_, err := h.db.Exec(background, h.sql(`INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at, lasts) VALUES ('default', 'outbox cut', 7, 'infinity', '1 s')`))
	require.NoError(t, err)
	h.commit(t, numbered("a", 1, 3)...)
	standby := h.relay(t, outbox.RelayConfig{PollInterval: 20 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	testenv.Run(t, standby.Run)
	awaitHealth(t, standby, true, true, "relay default has ended by a cut to workers, nothing of it is sent")
	require.Equal(t, 1, strings.Count(log.String(), "has ended by a cut"), log.String())
}

// The row of the lease says what the leader knows: shortly after a takeover, and when an outage begins and ends.
func TestLeaseRowSaysTheState(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	cable := &brokenDialer{}
	relay := h.cabledRelay(t, cable, slog.New(slog.DiscardHandler))
	testenv.Run(t, relay.Run)
	said := func() (epoch, state string, reached bool) {
		require.NoError(t, h.db.QueryRow(background, h.sql(`
			SELECT coalesce((state ->> 'epoch' = epoch::text)::text, 'none'),
			       coalesce(state ->> 'works', '') || ' ' || coalesce(state #>> '{outages,0,what}', '') || ' ' || coalesce(state #>> '{outages,0,class}', ''),
			       coalesce(kafka_at > now() - interval '30 s' AND state_at <= now(), false)
			  FROM {s}.outbox_lease WHERE name = 'default'`)).Scan(&epoch, &state, &reached))
		return epoch, state, reached
	}
	await := func(want string) {
		t.Helper()
		require.Eventually(t, func() bool {
			epoch, state, reached := said()
			return epoch == "true" && state == want && reached
		}, testenv.Patience, 10*time.Millisecond, want)
	}
	require.Eventually(t, func() bool { return relay.Health().Leading }, testenv.Patience, 5*time.Millisecond)
	await("true  ")
	cable.breakAll()
	h.commit(t, numbered("a", 1, 3)...)
	awaitHealth(t, relay, true, true, "Kafka has been failing")
	await("false Kafka unavailable")
	cable.broken.Store(false)
	await("true  ")
}
