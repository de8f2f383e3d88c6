package main

import (
	"context"
	"strings"
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
