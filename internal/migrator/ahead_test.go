package migrator_test

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/migrator"
	"github.com/outboxgo/outbox/internal/testenv"
)

// On the tables of a newer release, Run of an older one succeeds if all newer files allow that. So processes of the
// older release can start during an upgrade.
func TestMigrateBesideANewerRelease(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	version := len(names(t))
	run := func() (*migrator.Migrator, string, error) {
		var log testenv.Buffer
		m := f.migrator(nil)
		m.Logger = slog.New(slog.NewTextHandler(&log, nil))
		err := m.Run(t.Context())
		return m, log.String(), err
	}
	m, log, err := run()
	require.NoError(t, err)
	require.False(t, m.Ahead)
	require.Empty(t, log)

	files := nextFiles(t).(fstest.MapFS)
	files[nextName(t, 0)].Data = fmt.Appendf(nil, "-- +goose Up\n-- outbox: compatible from %d\n%s", version, nextRelease[0].sql)
	delete(files, nextName(t, 1))
	delete(files, nextName(t, 2))
	require.NoError(t, f.migrator(files).Run(t.Context()))
	m, log, err = run()
	require.NoError(t, err)
	require.True(t, m.Ahead)
	require.Equal(t, 1, strings.Count(log, "level=WARN"), log)
	require.Contains(t, log, "a newer release has migrated the database")

	require.NoError(t, f.migrator(nextFiles(t)).Run(t.Context()), "the other files have no such line")
	m, _, err = run()
	require.ErrorIs(t, err, migrator.ErrDatabaseAhead)
	require.ErrorContains(t, err, fmt.Sprintf("for releases from version %d on", version+len(nextRelease)))
	require.False(t, m.Ahead)
	f.exec(t, `UPDATE {s}.outbox_migration SET compatible_from = $1 WHERE version > $1`, version)
	_, _, err = run()
	require.NoError(t, err)
	f.exec(t, `UPDATE {s}.outbox_migration SET compatible_from = $1 WHERE version = $1`, version+2)
	_, _, err = run()
	require.ErrorIs(t, err, migrator.ErrDatabaseAhead)
}
