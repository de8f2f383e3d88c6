package outboxarchive_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxarchive"
)

// Variables for the child process, which archives until it is killed.
const (
	childVar  = "OUTBOXARCHIVE_TEST_DATABASE"
	schemaVar = "OUTBOXARCHIVE_TEST_SCHEMA"
	brokerVar = "OUTBOXARCHIVE_TEST_BROKER"
	folderVar = "OUTBOXARCHIVE_TEST_FOLDER" // empty: archive into the table
)

func archiveUntilKilled() {
	if err := runChild(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func runChild() error {
	db, err := pgxpool.New(background, os.Getenv(childVar))
	if err != nil {
		return err
	}
	f := &archiveFixture{db: db, schema: os.Getenv(schemaVar)}
	var archive func(context.Context, pgx.Tx, []outbox.ArchivedEvent) error
	if folder := os.Getenv(folderVar); folder == "" {
		table, err := outboxarchive.NewTable(db, f.config())
		if err != nil {
			return err
		}
		archive = table.Archive
	} else {
		folder, err := outboxarchive.OpenFolder(folder)
		if err != nil {
			return err
		}
		files, err := outboxarchive.NewFiles(folder, outboxarchive.FilesConfig{})
		if err != nil {
			return err
		}
		archive = files.Archive
	}
	relay, err := outbox.NewRelay(db, testenv.KafkaOpts([]string{os.Getenv(brokerVar)}), f.quick(archive))
	if err != nil {
		return err
	}
	return relay.Run(background)
}

// startChild starts a process that archives. The function kill ends the process at once.
func (f *archiveFixture) startChild(t testing.TB, folder string) (kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Stderr = os.Stderr
	cmd.Env = append(os.Environ(), childVar+"="+f.db.Config().ConnString(), schemaVar+"="+f.schema, brokerVar+"="+f.brokers[0], folderVar+"="+folder)
	require.NoError(t, cmd.Start())
	return func() {
		require.NoError(t, cmd.Process.Kill())
		require.ErrorContains(t, cmd.Wait(), "killed", "it has not ended by itself")
	}
}
