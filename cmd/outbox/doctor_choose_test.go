package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// --only and --skip know exactly the ids of all findings in the sources.
func TestFindingIDs(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	inSources := map[string]bool{}
	for _, name := range files {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		for _, m := range regexp.MustCompile(`(?:d\.add\(|finding\{+|f\.ID = )"([a-z_.]+)"(?:,|\n)`).FindAllSubmatch(source, -1) {
			inSources[string(m[1])] = true
		}
	}
	known := findingIDs()
	require.Greater(t, len(inSources), 30)
	for id := range inSources {
		require.Contains(t, known, id)
	}
	seen := map[string]bool{}
	for _, id := range known {
		require.False(t, seen[id], id)
		seen[id] = true
		composed := beginsWithAny(id, []string{"doctor", "tables", "privileges", "kafka.topic"}) // of a beginning and a name
		require.True(t, composed || inSources[id], id)
	}
}

// Only the checks with the wanted findings are made and counted. An error of such a check is always shown.
func TestDoctorMakesTheChecksAskedFor(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newClinic(t)
	d.relay(t)()
	checks := func(args ...string) int {
		var out doctorJSON
		unmarshal(t, d.call(t, append([]string{"doctor", "--json", "--open-for", "1h"}, args...)...).out, &out)
		return out.Checks
	}
	require.Equal(t, 19, checks())
	require.Equal(t, 3, checks("--only", "relay.leader"), "connect, migrations, relay")
	require.Equal(t, 2, checks("--only", "clock"), "connect, clock")
	require.Equal(t, 14, checks("--skip", "server,clock"))
	require.Equal(t, 19, checks("--only", "doctor"))
	d.requireFinding(t, "relay.leader", severityError, "no process leads", "--only", "relay.leader")
	require.Empty(t, d.findings(t, "--only", "sequence"))
	require.Contains(t, d.ok(t, "doctor", "--only", "clock,server.slot"), "Nothing is wrong: 3 checks.")

	d.requireFinding(t, "migrations.none", severityError, "schema public", "--only", "relay", "--schema", "public")
	d.vars["DATABASE_URL"] = "postgres://someone@127.0.0.1:1/nowhere?connect_timeout=2"
	d.requireFinding(t, "database.connect", severityError, "127.0.0.1:1", "--only", "relay.leader")
}
