package main

import (
	"context"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { program.Main(m, main) }

const nowhere = "KAFKA_BROKERS=127.0.0.1:1" // where no Kafka is

// start starts the program with a database of its own and more in its environment.
func start(t *testing.T, env ...string) (cmd *exec.Cmd, db *pgxpool.Pool, stdout, stderr *testenv.Buffer) {
	t.Helper()
	db = testenv.OtherDatabase(t)
	address, err := url.Parse(db.Config().ConnString())
	require.NoError(t, err)
	address.Path = db.Config().ConnConfig.Database
	cmd = program.Command(context.Background(), nil, append(env, "DATABASE_URL="+address.String())...)
	stdout, stderr = &testenv.Buffer{}, &testenv.Buffer{}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { t.Logf("it printed:\n%s%s", stdout, stderr) })
	return cmd, db, stdout, stderr
}

// awaitRecorded waits until the event is recorded.
func awaitRecorded(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	require.Eventually(t, func() bool {
		n := 0
		err := db.QueryRow(context.Background(), `SELECT count(*) FROM outbox`).Scan(&n)
		return err == nil && n == 1
	}, testenv.Patience, 10*time.Millisecond)
}

// The event arrives, the program ends by itself, and nothing is logged that a reader has to worry about.
func TestArrives(t *testing.T) {
	for name, broker := range map[string]func(t *testing.T) string{
		"the Kafka of the environment": func(t *testing.T) string { return strings.Join(testenv.Brokers(t), ",") },
		"a fake Kafka": func(t *testing.T) string {
			address, startKafka := testenv.LateKafka(t)
			startKafka(kfake.AllowAutoTopicCreation())
			return address
		},
	} {
		t.Run(name, func(t *testing.T) {
			cmd, _, stdout, stderr := start(t, "KAFKA_BROKERS="+broker(t))
			require.NoError(t, cmd.Wait())
			require.Equal(t, "arrived: gopher, hello\n", stdout.String())
			for _, level := range []string{"WARN", "ERROR"} {
				require.NotContains(t, stderr.String(), level)
			}
		})
	}
}

// An event that is recorded while Kafka is unavailable arrives once Kafka is there.
func TestWithoutKafka(t *testing.T) {
	address, startKafka := testenv.LateKafka(t)
	cmd, db, stdout, _ := start(t, "KAFKA_BROKERS="+address)
	awaitRecorded(t, db)
	startKafka(kfake.AllowAutoTopicCreation())
	require.NoError(t, cmd.Wait())
	require.Equal(t, "arrived: gopher, hello\n", stdout.String())
}

// While Kafka is unavailable the relay tries again and again; a signal ends the program.
func TestSignal(t *testing.T) {
	for _, signal := range program.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			cmd, db, _, _ := start(t, nowhere)
			awaitRecorded(t, db)
			program.RequireEnd(t, cmd, signal)
		})
	}
}

func TestSignalWhileStarting(t *testing.T) {
	testenv.Long(t)
	program.RequireEndWhileStarting(t, program.Command(context.Background(), nil, nowhere), "DATABASE_URL")
}
