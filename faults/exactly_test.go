package faults

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// exactly is the configuration of relays that send exactly once.
func (s *site) exactly(log slog.Handler) outbox.RelayConfig {
	return outbox.RelayConfig{
		ExactlyOnce: s.topic + "-cursors", PollInterval: 5 * time.Millisecond, BatchSize: 20,
		DeliveryTimeout: time.Second, Lease: lease, Logger: slog.New(log),
	}
}

// requireOnce requires that everything that outbox holds arrives, once, each key in its order.
func (s *site) requireOnce(t *testing.T) {
	t.Helper()
	v := s.requireRight(t, nil)
	require.Zero(t, v.Duplicates, "%s", v)
}

// ownKafka is a site with a broker of its own.
func ownKafka(t *testing.T, settings map[string]string) (*site, *kafkaserver.Server) {
	t.Helper()
	testenv.Long(t)
	kafka := newCrew(t).startKafka(t, settings)
	server := startServer(t, nil)
	return newSiteBeside(t, server, server.URL(), kafka.Brokers()), kafka
}

// transactionalIDs returns those that the broker knows.
func (s *site) transactionalIDs(t *testing.T) (ids []string) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	answer, err := kmsg.NewPtrListTransactionsRequest().RequestWith(t.Context(), client)
	require.NoError(t, err)
	for _, one := range answer.TransactionStates {
		ids = append(ids, one.TransactionalID)
	}
	return ids
}

// A broker forgets transactional ids that were not used for long, and partitions forget producers. The relay starts
// again, and goes on.
func TestExactlyOnceForgottenIDs(t *testing.T) {
	t.Parallel()
	s, _ := ownKafka(t, map[string]string{
		"transactional.id.expiration.ms": "3000", "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
		"producer.id.expiration.ms": "3000", "producer.id.expiration.check.interval.ms": "200",
	})
	log := new(testenv.Buffer)
	t.Cleanup(func() { t.Logf("the relay: %s", log) })
	run(t, s.relayPool(t), testenv.KafkaOpts(s.brokers), s.exactly(slog.NewTextHandler(log, nil)))
	for range 4 {
		s.requireArrival(t, s.commit(t, "on", 50))
		require.Eventually(t, func() bool { return len(s.transactionalIDs(t)) == 0 }, testenv.Patience, 50*time.Millisecond)
	}
	s.requireArrival(t, s.commit(t, "on", 50))
	s.requireOnce(t)
	require.Contains(t, log.String(), "INVALID_PRODUCER_ID_MAPPING")
	require.NotContains(t, log.String(), "breaker", "Kafka works")
}

// What a transaction waits for lasts longer than the transaction may: Kafka aborts it, and the relay goes on.
func TestExactlyOnceTimedOut(t *testing.T) {
	t.Parallel()
	const longer = 12 * time.Second // than a transaction may last
	for name, hold := range map[string]func(t *testing.T, kafka *kafkaserver.Server, toKafka, toPostgres *proxy.Proxy){
		"the broker stands still": func(t *testing.T, kafka *kafkaserver.Server, _, _ *proxy.Proxy) {
			require.NoError(t, kafka.Freeze())
			time.Sleep(longer)
			require.NoError(t, kafka.Thaw())
		},
		"records are late": func(_ *testing.T, _ *kafkaserver.Server, toKafka, _ *proxy.Proxy) {
			toKafka.Set(proxy.Fault{HoldUp: true})
			time.Sleep(longer)
			toKafka.Set(proxy.Fault{})
		},
		"answers are late": func(_ *testing.T, _ *kafkaserver.Server, toKafka, _ *proxy.Proxy) {
			toKafka.Set(proxy.Fault{HoldDown: true})
			time.Sleep(longer)
			toKafka.Set(proxy.Fault{})
		},
		"PostgreSQL is late": func(_ *testing.T, _ *kafkaserver.Server, _, toPostgres *proxy.Proxy) {
			toPostgres.Set(proxy.Fault{HoldUp: true})
			time.Sleep(longer)
			toPostgres.Set(proxy.Fault{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, kafka := ownKafka(t, map[string]string{"transaction.abort.timed.out.transaction.cleanup.interval.ms": "200"})
			toKafka := through(t, kafka.Brokers()[0])
			toPostgres := through(t, fmt.Sprintf("127.0.0.1:%d", s.server.Port()))
			cfg := s.exactly(new(warnings))
			cfg.DeliveryTimeout, cfg.Lease = 9*time.Second, 40*time.Second // it waits longer than a transaction lasts
			run(t, openPool(t, s.via(t, toPostgres)), append(testenv.KafkaOpts(s.brokers), kafkaVia(toKafka.Addr())), cfg)
			stop := s.stream(t)
			s.awaitArrivals(t, 300)
			hold(t, kafka, toKafka, toPostgres)
			s.awaitArrivals(t, 300)
			stop()
			s.requireOnce(t)
		})
	}
}

// via is the pool of a relay that reaches PostgreSQL through a proxy.
func (s *site) via(t *testing.T, p *proxy.Proxy) *pgxpool.Config {
	t.Helper()
	there := *s
	there.url = s.behind(t, p, "relay")
	return there.poolConfig(t)
}

// behind is the address of PostgreSQL behind a proxy, for a client of a name.
func (s *site) behind(t *testing.T, p *proxy.Proxy, name string) string {
	t.Helper()
	address, err := url.Parse(s.url)
	require.NoError(t, err)
	address.Host = p.Addr()
	return address.String() + "&application_name=" + name
}

// A leader is stopped at any moment, also while what it has sent is on its way, until another one leads, and goes on.
// It commits nothing any more, does not take its lost lease for an outage of Kafka, and the two do not fence each
// other in turns.
func TestExactlyOnceStoppedLeader(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	c, seed := newCrew(t), seedOf(t)
	rng := rand.New(rand.NewPCG(seed, 1<<40))
	server := startServer(t, nil)
	s := newSiteBeside(t, server, server.URL(), testenv.Brokers(t))
	testenv.CreateTopic(t, s.brokers, s.topic, 3)
	type member struct {
		*worker
		name    string
		toKafka *proxy.Proxy
	}
	var members [2]member
	for i := range members {
		m := member{name: fmt.Sprint("relay-", i), toKafka: through(t, s.brokers[0])}
		toPostgres := through(t, fmt.Sprintf("127.0.0.1:%d", s.server.Port()))
		m.worker = c.launch(t, workerVar, workerSpec{Postgres: s.behind(t, toPostgres, m.name), Brokers: s.brokers, KafkaVia: m.toKafka.Addr(), Cursors: s.topic + "-cursors"})
		members[i] = m
		if i == 0 {
			s.leads(t, m.cmd)
		}
	}
	t.Cleanup(func() { t.Logf("the relays: %s", c.log) })
	stop := s.stream(t)
	for round := range 8 {
		s.awaitArrivals(t, 100)
		old, next := members[round%2], members[1-round%2]
		time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
		held := rng.IntN(2) == 0
		if held {
			old.toKafka.Set(proxy.Fault{HoldUp: true})
			time.Sleep(time.Duration(rng.IntN(100)) * time.Millisecond)
		}
		require.NoError(t, old.cmd.Process.Signal(syscall.SIGSTOP))
		if rng.IntN(2) == 0 { // its lock is free, as if its machine was gone
			_, err := s.db.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1`, old.name)
			require.NoError(t, err)
		}
		s.leads(t, next.cmd)
		if rng.IntN(2) == 0 {
			s.awaitArrivals(t, 50)
		}
		old.toKafka.Set(proxy.Fault{})
		require.NoError(t, old.cmd.Process.Signal(syscall.SIGCONT))
		s.awaitArrivals(t, 100)
	}
	stop()
	s.requireOnce(t)
	s.requireEpochsInOrder(t)
	for line := range strings.Lines(c.log.String()) {
		require.False(t, strings.Contains(line, "Kafka fails") && (strings.Contains(line, "PRODUCER_FENCED") || strings.Contains(line, "INVALID_PRODUCER_EPOCH")), "%s", line)
	}
}

// A copy of a database goes on where the original was stopped. While the original works, or if it has sent more since
// the copy was made, a copy sends nothing, and does not disturb it. Without the mode the copy goes on.
func TestExactlyOnceRestoredElsewhere(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	t.Run("after a clean stop", func(t *testing.T) {
		t.Parallel()
		from, to := original(t)
		stop := run(t, from.relayPool(t), testenv.KafkaOpts(from.brokers), from.exactly(slog.DiscardHandler))
		from.requireArrival(t, from.commit(t, "on", 50))
		stop()
		from.commit(t, "on", 30) // unsent
		copyTables(t, from, to)
		run(t, to.relayPool(t), testenv.KafkaOpts(to.brokers), to.exactly(slog.DiscardHandler))
		to.requireArrival(t, to.commit(t, "on", 50))
		to.requireOnce(t)

		relay, err := outbox.NewRelay(from.db, testenv.KafkaOpts(from.brokers), from.exactly(slog.DiscardHandler))
		require.NoError(t, err)
		require.ErrorIs(t, relay.Run(t.Context()), outbox.ErrCursorTopic, "the copy has sent since")
		to.requireOnce(t)
	})
	t.Run("while the original works", func(t *testing.T) {
		t.Parallel()
		from, to := original(t)
		log := new(warnings)
		run(t, from.relayPool(t), testenv.KafkaOpts(from.brokers), from.exactly(log))
		from.requireArrival(t, from.commit(t, "on", 50))
		copyTables(t, from, to)
		from.requireArrival(t, from.commit(t, "on", 50))
		relay, err := outbox.NewRelay(to.db, testenv.KafkaOpts(to.brokers), to.exactly(slog.DiscardHandler))
		require.NoError(t, err)
		require.ErrorIs(t, relay.Run(t.Context()), outbox.ErrCursorTopic)
		from.requireArrival(t, from.commit(t, "on", 50))
		from.requireOnce(t)
		require.Empty(t, log.String(), "the copy has disturbed the original")

		require.NoError(t, relay.EndExactlyOnce(t.Context(), false))
		to.relay(t, slog.DiscardHandler)
		to.requireArrival(t, to.commit(t, "on", 50))
	})
}

// original returns a database and an empty one in another cluster.
func original(t *testing.T) (from, to *site) {
	t.Helper()
	from = newSite(t)
	return from, from.elsewhere(t, startServer(t, nil))
}

// A standby that lagged takes over, and lacks the row that the newest record names: nothing is sent. Once an operator
// has ended the mode, what PostgreSQL has is sent, some of it again.
func TestExactlyOnceLaggingStandby(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := newPair(t, "read-write")
	relay, err := outbox.NewRelay(p.relayPool(t), testenv.KafkaOpts(p.brokers), p.exactly(slog.DiscardHandler))
	require.NoError(t, err)
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(t.Context()) }()
	p.requireArrival(t, p.commit(t, "on", 3))
	p.cutOff(t)
	lost := p.commit(t, "on", 30)
	p.requireArrival(t, lost)
	p.failOver(t)
	p.commit(t, "on", 50) // takes the ids of those that were lost
	select {
	case err := <-ended:
		require.ErrorIs(t, err, outbox.ErrCursorTopic)
		require.ErrorContains(t, err, "lacks row")
	case <-time.After(testenv.Patience):
		require.Fail(t, "the relay goes on")
	}
	arrived, err := p.reader.Arrived()
	require.NoError(t, err)
	require.Len(t, arrived, 33, "something was sent")

	require.NoError(t, relay.EndExactlyOnce(t.Context(), false))
	p.relay(t, slog.DiscardHandler)
	p.requireArrival(t, p.commit(t, "on", 3))
	p.requireAll(t)
}
