package main

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The program serves and sells until it is told to end, and cleans up.
func TestStart(t *testing.T) {
	db := testenv.Pool(t, nil)
	t.Setenv("OUTBOX_POSTGRES_URL", db.Config().ConnString())
	t.Setenv("OUTBOX_KAFKA_BROKERS", strings.Join(testenv.Brokers(t), ","))
	schemas := func() (names []string) {
		rows, err := db.Query(context.Background(), `SELECT nspname FROM pg_namespace WHERE nspname LIKE 'observability\_%'`)
		require.NoError(t, err)
		names, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return names
	}
	before := schemas()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var stdout, stderr testenv.Buffer
	ended := make(chan error, 1)
	go func() {
		ended <- start(ctx, []string{"-listen=127.0.0.1:0", "-rate=50", "-traces"}, nil, &stdout, &stderr)
	}()
	require.Eventually(t, func() bool { return strings.Contains(stdout.String(), `"Name":"process observability_`) },
		testenv.Patience, 10*time.Millisecond, "no span of the consumer: %s", &stderr)
	require.Contains(t, stdout.String(), "metrics: http://127.0.0.1:")
	stop()
	require.NoError(t, <-ended, &stderr)
	require.Equal(t, before, schemas())
}

func TestMain(m *testing.M) { program.Main(m, main) }

func TestSignal(t *testing.T) {
	t.Parallel()
	for _, signal := range program.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			cmd := program.Command(context.Background(), []string{"-listen=127.0.0.1:0", "-rate=50"},
				"OUTBOX_POSTGRES_URL="+testenv.Pool(t, nil).Config().ConnString(), "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
			var stdout, stderr testenv.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			defer func() { t.Logf("it printed:\n%s", stderr.String()) }()
			require.NoError(t, cmd.Start())
			require.Eventually(t, func() bool { return strings.Contains(stdout.String(), "metrics: http://127.0.0.1:") },
				testenv.Patience, 10*time.Millisecond)
			program.RequireEnd(t, cmd, signal)
		})
	}
}

// Without Kafka the service starts and takes orders by HTTP. They are published once Kafka is there.
func TestWithoutKafka(t *testing.T) {
	t.Parallel()
	address, startKafka := testenv.LateKafka(t)
	cmd := program.Command(context.Background(), []string{"-listen=127.0.0.1:0", "-rate=0", "-traces"},
		"OUTBOX_POSTGRES_URL="+testenv.Pool(t, nil).Config().ConnString(), "OUTBOX_KAFKA_BROKERS="+address)
	var stdout, stderr testenv.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	defer func() { t.Logf("it printed:\n%s", stderr.String()) }()
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	orders := ""
	require.Eventually(t, func() bool {
		orders = regexp.MustCompile(`http://\S+/orders\b`).FindString(stdout.String())
		return orders != ""
	}, testenv.Patience, 10*time.Millisecond)
	order, err := http.NewRequestWithContext(t.Context(), http.MethodPost, orders, strings.NewReader(`{"id": "order-1", "cents": 450}`))
	require.NoError(t, err)
	answer, err := http.DefaultClient.Do(order)
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.Equal(t, http.StatusCreated, answer.StatusCode)
	require.Eventually(t, func() bool { return strings.Contains(stderr.String(), "Kafka, to make topics, fails") }, testenv.Patience, 10*time.Millisecond)
	startKafka()
	require.Eventually(t, func() bool { return strings.Contains(stdout.String(), `"Name":"process observability_`) }, testenv.Patience, 10*time.Millisecond)
	program.RequireEnd(t, cmd, syscall.SIGTERM)
}

func TestSignalWhileStarting(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	program.TestInterruptedWhileStarting(t)
}

// Wrong usage names what is wrong.
func TestUsage(t *testing.T) {
	program.TestUsage(t, "-listen",
		program.NoKafka,
		program.Misuse("too many orders", "-rate=1001", "-rate"),
	)
}
