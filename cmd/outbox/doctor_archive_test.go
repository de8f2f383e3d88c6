package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// The doctor finds that events wait for an archive which no process has any more.
func TestDoctorOnArchive(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	require.Empty(t, d.findings(t, "--only", "archive"))
	d.exec(t, `INSERT INTO {s}.outbox_archiver (name, epoch) VALUES ('shop', 5), ('worker:stats', 2)`)
	f := d.requireFinding(t, "archive.none", severityWarning, "by relay shop, group stats since ", "--only", "archive")
	d.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at) VALUES ('shop', 'h', 6, 'infinity')`)
	d.requireFinding(t, "archive.none", severityWarning, "relay shop", "--only", "archive") // its leader has no archive
	d.exec(t, `UPDATE {s}.outbox_lease SET epoch = 5`)
	require.Empty(t, d.findings(t, "--only", "archive"))
	d.exec(t, `DELETE FROM {s}.outbox_lease`)
	_, err := d.db.Exec(background, f.Do[len("Start a process with Retention.Archive. If you have given up the archive: "):])
	require.NoError(t, err)
	require.Empty(t, d.findings(t, "--only", "archive"))
}
