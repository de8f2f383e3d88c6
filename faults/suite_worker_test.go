package faults

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/faults/internal/proxy"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// workerVar makes this test's program a relay of the suite: it holds a
// workerSpec as JSON.
const workerVar = "OUTBOX_FAULTS_WORKER"

// workerSpec says how a relay of the suite reaches the servers.
type workerSpec struct {
	Postgres string   // address of the database
	Brokers  []string // as they advertise themselves
	KafkaVia string   // where connections to any of them really go
	Traced   bool     // it is one of TestTraces
	Cursors  string   // the cursor topic, if the relay sends exactly once
}

// batch is the most that a relay of the suite sends before it moves its cursor.
const batch = 200

// tracedBatch is the same for a relay of TestTraces.
const tracedBatch = 10

// statementTimeout is what every other relay of the suite gets for a statement.
const statementTimeout = "1s"

// runWorker is the whole life of a relay of the suite.
func runWorker(value string) error {
	var s workerSpec
	return runAsChild(workerVar, value, &s, &s.Postgres, s.run)
}

func (s *workerSpec) run(ctx context.Context, db *pgxpool.Pool) error {
	cfg := outbox.RelayConfig{
		PollInterval: 20 * time.Millisecond, BatchSize: batch, ExactlyOnce: s.Cursors,
		DeliveryTimeout: time.Second, Lease: lease,
		// Failed events become dead within the time of a test, and their keys are released.
		RetryInterval: time.Second / 2, Retry: outbox.RetryPolicy{MaxRetries: 5}, Breaker: outbox.BreakerConfig{OpenFor: 2 * time.Second},
	}
	if s.Traced { // many batches, takeovers and deaths in a short time
		cfg.BatchSize, cfg.RetryInterval = tracedBatch, 100*time.Millisecond
		cfg.Retry = outbox.RetryPolicy{MaxRetries: 2, RetryWait: 100 * time.Millisecond, MaxRetryWait: 200 * time.Millisecond}
	}
	relay, err := outbox.NewRelay(db, s.kafkaOpts(), cfg)
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

func (s workerSpec) kafkaOpts() []kgo.Opt {
	return []kgo.Opt{
		kgo.SeedBrokers(s.Brokers...), kafkaVia(s.KafkaVia),
		kgo.ProducerBatchCompression(kgo.NoCompression()), // what is too large stays so
		kgo.WithHooks(dropKey{}),
	}
}

// kafkaVia makes all connections to brokers go to one address.
func kafkaVia(address string) kgo.Opt { return kgo.Dialer(dialTo(address)) }

// dialTo makes connections to one address, whatever else is asked for.
func dialTo(address string) func(ctx context.Context, network, _ string) (net.Conn, error) {
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, address)
	}
}

// ways are how one relay reaches the servers. They lead into the ways that all relays
// share, so that what befalls those befalls each relay.
type ways struct {
	name                string // by which PostgreSQL knows the relay
	toPostgres, toKafka *proxy.Proxy
}

// startWorker starts one more, with ways of its own, and waits until it has a connection to
// PostgreSQL. It is killed when the test ends, if it still runs. It leads a
// process group of its own, so that Ctrl-C does not reach it. Its ways stay when it is killed: what it
// has sent is still on them.
func (s *suite) startWorker(t *testing.T) {
	t.Helper()
	s.started++
	name := fmt.Sprintf("relay-%d", s.started)
	own := ways{name, through(t, s.toPostgres.Addr()), through(t, s.toKafka.Addr())}
	address := *s.address
	address.Host = own.toPostgres.Addr()
	spec := workerSpec{Postgres: address.String() + "&application_name=" + name, Brokers: s.brokers, KafkaVia: own.toKafka.Addr(), Traced: s.traced}
	if *faultExactly {
		spec.Cursors = s.topic + "-cursors"
	}
	if s.started%2 == 0 && s.bouncer == nil { // as the role of a careful operator has it; PgBouncer refuses such a setting
		spec.Postgres += "&statement_timeout=" + statementTimeout
	}
	s.ways[s.launch(t, workerVar, spec)] = own
	connected := func() (is bool) {
		require.NoError(t, s.db.QueryRow(s.ctx, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1)`, name).Scan(&is))
		return is
	}
	require.True(t, s.await(t, testenv.Patience, connected), "a relay does not come up")
}

// replace starts relays for those that were killed.
func (s *suite) replace(t *testing.T) {
	t.Helper()
	for len(s.workers) < workers {
		s.startWorker(t)
	}
}
