package main

import (
	"bytes"
	"context"
	"net/url"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// asQuickstart makes the test binary be the program.
const asQuickstart = "OUTBOX_TEST_AS_QUICKSTART"

func TestMain(m *testing.M) {
	if os.Getenv(asQuickstart) != "" {
		main()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func quickstart() *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asQuickstart+"=1", "KAFKA_BROKERS=127.0.0.1:1") // where no Kafka is
	return cmd
}

// While Kafka is unavailable the relay tries again and again; a signal ends the program.
func TestSignal(t *testing.T) {
	for _, signal := range ending.Signals {
		t.Run(signal.String(), func(t *testing.T) {
			db := testenv.OtherDatabase(t)
			address, err := url.Parse(db.Config().ConnString())
			require.NoError(t, err)
			address.Path = db.Config().ConnConfig.Database
			cmd := quickstart()
			cmd.Env = append(cmd.Env, "DATABASE_URL="+address.String())
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			defer func() { t.Logf("it printed:\n%s", &stderr) }()
			require.NoError(t, cmd.Start())
			require.Eventually(t, func() bool {
				n := 0
				err := db.QueryRow(context.Background(), `SELECT count(*) FROM outbox`).Scan(&n)
				return err == nil && n == 1
			}, testenv.Patience, 10*time.Millisecond)
			ending.Require(t, cmd, signal)
		})
	}
}

func TestSignalWhileStarting(t *testing.T) {
	ending.RequireWhileStarting(t, quickstart(), "DATABASE_URL")
}
