package tools_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outboxgo/outbox/tools/internal/long"

	"github.com/stretchr/testify/require"
)

// machine is a PATH on which only some programs are found.
type machine struct {
	bin string
	env []string
}

// newMachine returns a machine of an ordinary user with what every machine has.
func newMachine(t *testing.T) *machine {
	t.Helper()
	m := &machine{bin: t.TempDir()}
	for _, name := range []string{"bash", "sh", "cat", "chmod", "dirname", "grep", "sed", "uname"} {
		path, err := exec.LookPath(name)
		require.NoError(t, err)
		require.NoError(t, os.Symlink(path, filepath.Join(m.bin, name)))
	}
	certificates := filepath.Join(t.TempDir(), "certificates")
	require.NoError(t, os.WriteFile(certificates, []byte("x"), 0o600))
	m.env = []string{"PATH=" + m.bin, "HOME=" + t.TempDir(), "SSL_CERT_FILE=" + certificates}
	m.add(t, "id", "echo 1000")
	return m
}

// add makes a program of a line of shell.
func (m *machine) add(t *testing.T, name, script string) {
	t.Helper()
	path := filepath.Join(m.bin, name)
	require.NoError(t, os.WriteFile(path, []byte("#!"+m.bin+"/sh\n"+script+"\n"), 0o755))
}

// addAll adds all that is needed, in versions that will do.
func (m *machine) addAll(t *testing.T) {
	t.Helper()
	for _, name := range []string{"git", "gcc", "psql", "pgbouncer", "prometheus", "promtool", "redis-server", "chromium", "python3"} {
		m.add(t, name, "")
	}
	m.add(t, "go", "echo go version go1.26.1 linux/amd64")
	m.add(t, "java", `echo 'openjdk version "17.0.15" 2025-04-15' >&2`)
	m.add(t, "pg_dump", "echo 'pg_dump (PostgreSQL) 14.18'")
}

// needs runs the script, and returns what it printed.
func (m *machine) needs(t *testing.T, code int, command string, env ...string) string {
	t.Helper()
	cmd := exec.Command("./needs.sh", command)
	cmd.Env = slices.Concat(m.env, env)
	began := time.Now()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	require.Equal(t, code, cmd.ProcessState.ExitCode(), string(out))
	require.Less(t, time.Since(began), 10*time.Second, "it compiles and downloads nothing")
	return string(out)
}

func TestNothingIsMissing(t *testing.T) {
	long.Test(t) // make test-all needs more than make test
	m := newMachine(t)
	m.addAll(t)
	for _, command := range []string{"demo", "kafka", "short", "test", "test-all", "test-versions", "test-pgbouncer", "faults", "bench-peers", "screenshots", "ci"} {
		require.Empty(t, m.needs(t, 0, command), command)
	}
	require.Contains(t, m.needs(t, 2, "nonsense"), "tools/needs.sh demo|")
}

// One message names all that is missing, and the command of the platform.
func TestMissingProgramsAreNamed(t *testing.T) {
	for manager, command := range map[string]string{
		"":        "",
		"apt-get": "  sudo apt-get update && sudo apt-get install -y --no-install-recommends default-jre-headless postgresql-client prometheus\n",
		"dnf":     "  sudo dnf install -y java-21-openjdk-headless postgresql /usr/bin/prometheus /usr/bin/promtool\n",
		"brew":    "  brew install temurin libpq prometheus && brew link --force libpq\n",
	} {
		m := newMachine(t)
		m.addAll(t)
		for _, name := range []string{"java", "pg_dump", "psql", "prometheus", "promtool"} {
			require.NoError(t, os.Remove(filepath.Join(m.bin, name)))
		}
		if manager != "" {
			m.add(t, manager, "echo called >&2")
		}
		out := m.needs(t, 1, "test")
		for _, name := range []string{"java", "pg_dump", "psql", "prometheus", "promtool"} {
			require.Equal(t, 1, strings.Count(out, "\n  "+name+" "), out)
		}
		require.Contains(t, out, "make test ARGS=-short")
		require.NotContains(t, out, "called")
		if manager == "" {
			require.NotContains(t, out, "Install them")
		} else {
			require.Contains(t, out, "Install them with:\n"+command)
		}
		require.Empty(t, m.needs(t, 0, "short"), "what needs only Go, git and gcc")
	}
}

// A version that is too old is as good as none.
func TestOldVersions(t *testing.T) {
	m := newMachine(t)
	m.addAll(t)
	m.add(t, "go", `case $1 in env) echo local ;; *) echo go version go1.25.9 linux/amd64 ;; esac`)
	m.add(t, "java", `echo 'openjdk version "11.0.2" 2019-01-15' >&2`)
	m.add(t, "pg_dump", "echo 'pg_dump (PostgreSQL) 13.20'")
	m.add(t, "gcc", "exit 1")
	out := m.needs(t, 1, "test-all")
	for _, line := range []string{
		"  go            version 1.26 or later, ", "  java          version 17 or later, ", "  pg_dump       version 14 or later, ", "  gcc  ",
	} {
		require.Contains(t, out, line)
	}
	m.add(t, "go", `case $1 in env) echo auto ;; *) echo go version go1.25.9 linux/amd64 ;; esac`)
	require.Empty(t, m.needs(t, 0, "demo"), "it downloads a newer one itself")
}

// Who brings Kafka along needs no Java, except for tests that start brokers themselves.
func TestOtherKafka(t *testing.T) {
	m := newMachine(t)
	m.addAll(t)
	require.NoError(t, os.Remove(filepath.Join(m.bin, "java")))
	for _, env := range []string{"KAFKA=fake", "KAFKA=docker", "OUTBOX_KAFKA_BROKERS=broker:9092", "DOCKER_HOST=tcp://engine:2375"} {
		require.Empty(t, m.needs(t, 0, "kafka", env), env)
		require.Contains(t, m.needs(t, 1, "faults", env), "  java ", env)
		require.Contains(t, m.needs(t, 1, "bench-peers", env), "  java ", env)
	}
}

// Root on Debian gets what is missing.
func TestRootInstalls(t *testing.T) {
	m := newMachine(t)
	m.addAll(t)
	m.add(t, "id", "echo 0")
	for _, name := range []string{"psql", "pg_dump"} {
		require.NoError(t, os.Remove(filepath.Join(m.bin, name)))
	}
	install := `echo "apt-get $*"
case $* in *install*)
  for name in $PROGRAMS; do printf '#!/bin/sh\necho 15\n' >"${0%/*}/$name"; chmod +x "${0%/*}/$name"; done ;;
esac`
	m.add(t, "apt-get", install)
	out := m.needs(t, 1, "test", "PROGRAMS=psql")
	require.Contains(t, out, "psql")
	_, after, _ := strings.Cut(out, "install -y --no-install-recommends postgresql-client\n")
	require.Contains(t, after, "  pg_dump  ", "it is still missing")
	require.NotContains(t, after, "psql")

	out = m.needs(t, 0, "test", "PROGRAMS=pg_dump")
	require.Contains(t, out, "installing postgresql-client\n")
	require.Contains(t, out, "apt-get -q update\n")
	require.Empty(t, m.needs(t, 0, "test"))
}
