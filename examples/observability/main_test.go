package main

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
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
	code := make(chan int, 1)
	go func() { code <- start(ctx, []string{"-listen=127.0.0.1:0", "-rate=50", "-traces"}, &stdout, &stderr) }()
	require.Eventually(t, func() bool { return strings.Contains(stdout.String(), `"Name":"process observability_`) },
		testenv.Patience, 10*time.Millisecond, "no span of the consumer: %s", &stderr)
	require.Contains(t, stdout.String(), "metrics: http://127.0.0.1:")
	stop()
	require.Equal(t, exitDone, <-code, &stderr)
	require.Equal(t, before, schemas())
}

// asObservability makes the test binary be the program.
const asObservability = "OUTBOX_TEST_AS_OBSERVABILITY"

func TestMain(m *testing.M) {
	if os.Getenv(asObservability) != "" {
		main()
	}
	goleak.VerifyTestMain(m)
}

func observability(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asObservability+"=1")
	return cmd
}

func TestSignal(t *testing.T) {
	t.Parallel()
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			cmd := observability("-listen=127.0.0.1:0", "-rate=50")
			cmd.Env = append(cmd.Env, "OUTBOX_POSTGRES_URL="+testenv.Pool(t, nil).Config().ConnString(),
				"OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
			var stdout, stderr testenv.Buffer
			cmd.Stdout, cmd.Stderr = &stdout, &stderr
			defer func() { t.Logf("it printed:\n%s", stderr.String()) }()
			require.NoError(t, cmd.Start())
			require.Eventually(t, func() bool { return strings.Contains(stdout.String(), "metrics: http://127.0.0.1:") },
				testenv.Patience, 10*time.Millisecond)
			ending.Require(t, cmd, signal)
		})
	}
}

func TestSignalWhileStarting(t *testing.T) {
	t.Parallel()
	cmd := observability("-listen=127.0.0.1:0")
	cmd.Env = append(cmd.Env, "OUTBOX_KAFKA_BROKERS=127.0.0.1:1")
	ending.RequireWhileStarting(t, cmd, "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, brokers, args string
	code                          int
	stdout, stderr                string
}{
	{"help", "", "", "--help", exitDone, "-listen", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-ratez=1", exitUsage, "", "-ratez"},
	{"not a flag", "postgres://h/d", "b:1", "rate", exitUsage, "", `"rate" is not a flag`},
	{"too many orders", "postgres://h/d", "b:1", "-rate=1001", exitUsage, "", "-rate"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "b:1", "", exitFailed, "", "connect"},
}

func TestUsage(t *testing.T) {
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("OUTBOX_POSTGRES_URL", tt.postgres)
			t.Setenv("OUTBOX_KAFKA_BROKERS", tt.brokers)
			var stdout, stderr strings.Builder
			require.Equal(t, tt.code, start(t.Context(), strings.Fields(tt.args), &stdout, &stderr))
			require.Contains(t, stdout.String(), tt.stdout)
			require.Contains(t, stderr.String(), tt.stderr)
		})
	}
}
