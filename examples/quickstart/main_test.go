package main

import (
	"bytes"
	"context"
	"net/url"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { program.Main(m, main) }

func quickstart() *exec.Cmd {
	return program.Command(context.Background(), nil, "KAFKA_BROKERS=127.0.0.1:1") // where no Kafka is
}

// While Kafka is unavailable the relay tries again and again; a signal ends the program.
func TestSignal(t *testing.T) {
	for _, signal := range program.Signals {
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
			program.RequireEnd(t, cmd, signal)
		})
	}
}

func TestSignalWhileStarting(t *testing.T) {
	testenv.Long(t)
	program.RequireEndWhileStarting(t, quickstart(), "DATABASE_URL")
}
