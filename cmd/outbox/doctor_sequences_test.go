package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The doctor looks at the sequence of each table, and its statement mends what it finds.
func TestDoctorOnSequences(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.record(t, "a")
	d.fail(t, outbox.StatusResolved, "b")
	d.deliver(t, "k", "PENDING")
	d.exec(t, sqlDelay, "later", 3600.0)
	d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
		SELECT 'default', 0, '1:1:', 0, system_identifier, 1 FROM pg_control_system()`)
	d.exec(t, `INSERT INTO {s}.outbox_audit (operator, action, reason, relay, parking_key) VALUES ('kim', 'read', 'x', '', '')`)
	d.exec(t, `INSERT INTO {s}.event_handled (consumer_group, aggregate_type, aggregate_id, action) VALUES ('stats', 'a.b.c.v1', '1', 'COUNTED')`)

	var names []string
	rows, err := d.db.Query(background, `SELECT t.relname FROM pg_class AS s JOIN pg_depend AS p ON p.objid = s.oid AND p.deptype = 'a'
		JOIN pg_class AS t ON t.oid = p.refobjid WHERE s.relkind = 'S' AND s.relnamespace = to_regnamespace($1)`, pgx.Identifier{d.schema}.Sanitize())
	require.NoError(t, err)
	names, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	var known []string
	for _, n := range numbered {
		known = append(known, n.table)
	}
	require.ElementsMatch(t, names, known, "every sequence of the schema is looked at")

	require.Empty(t, d.findings(t, "--only", "sequence"))
	for _, name := range known {
		sequence := strings.ReplaceAll(`{s}.X_id_seq`, "X", name)
		d.exec(t, fmt.Sprintf(`SELECT setval('%s', (SELECT max(id) FROM {s}.%s), false)`, sequence, name))
		f := d.requireFinding(t, "sequence.behind", severityError, "the sequence of "+name+".id is at ", "--only", "sequence")
		_, err := d.db.Exec(background, f.Do)
		require.NoError(t, err)
		require.Empty(t, d.findings(t, "--only", "sequence"), name)
		d.exec(t, `ALTER SEQUENCE `+sequence+` CACHE 20`)
		f = d.requireFinding(t, "sequence.cache", severityError, "the sequence of "+name+".id has CACHE 20", "--only", "sequence")
		_, err = d.db.Exec(background, f.Do)
		require.NoError(t, err)
	}
	for highest, found := range map[int64]bool{100: true, math.MaxInt64: false} { // no group can have come that far
		d.exec(t, `DELETE FROM {s}.outbox_cursor`)
		d.exec(t, `INSERT INTO {s}.outbox_cursor (relay, last_processed_id, snapshot, highest_id, system_identifier, epoch)
			SELECT 'worker:mine', 0, '1:1:', $1::bigint, system_identifier, 1 FROM pg_control_system()`, highest)
		all := d.findings(t, "--only", "sequence.behind")
		require.Equal(t, found, len(all) == 1, "%d: %v", highest, all)
	}
	slices.Reverse(known)
	for _, name := range known {
		d.exec(t, `ALTER SEQUENCE {s}.`+name+`_id_seq OWNED BY NONE`)
	}
	require.Len(t, d.findings(t, "--only", "sequence"), len(known))
}
