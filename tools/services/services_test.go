package main_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/tools/internal/long"
	"github.com/outboxgo/outbox/tools/kafkaserver"
	"github.com/outboxgo/outbox/tools/pgserver"
)

// program is the tool, built once.
var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "services-test-")
	if err != nil {
		panic(err)
	}
	program = filepath.Join(dir, "services")
	out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput()
	if err != nil {
		panic(string(out))
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		os.RemoveAll(dir)
		os.Exit(code)
	}))
}

// tool is a run of the tool.
type tool struct {
	*exec.Cmd
	out, err bytes.Buffer
	tmp      string
}

// newTool prepares a run with a temporary directory of its own, without
// addresses in its environment.
func newTool(t *testing.T, args ...string) *tool {
	t.Helper()
	tmp, err := os.MkdirTemp("", "services-test-") // t.TempDir is closed to the user that runs PostgreSQL
	require.NoError(t, err)
	require.NoError(t, os.Chmod(tmp, 0o755))
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(tmp)) })
	c := &tool{Cmd: exec.Command(program, args...), tmp: tmp}
	c.Dir, c.Stdout, c.Stderr = tmp, &c.out, &c.err
	for _, kv := range os.Environ() {
		if !regexp.MustCompile(`^(OUTBOX_POSTGRES_|OUTBOX_KAFKA_|OUTBOX_SCHEMA_|DATABASE_URL=|KAFKA_BROKERS=)`).MatchString(kv) {
			c.Env = append(c.Env, kv)
		}
	}
	c.Env = append(c.Env, "TMPDIR="+tmp)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("services %q printed:\n%s", args, c.err.String())
		}
	})
	return c
}

// code runs the tool and returns its exit code.
func (c *tool) code(t *testing.T) int {
	t.Helper()
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		require.NoError(t, err)
	}
	return c.ProcessState.ExitCode()
}

// variables parses lines KEY=value.
func variables(text string) map[string]string {
	found := map[string]string{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			found[name] = value
		}
	}
	return found
}

func requireEmpty(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, entries)
}

func requireGone(t *testing.T, pid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	}, 5*time.Second, 5*time.Millisecond, "process %d", pid)
}

// children finds the processes that the tool has started, by their parent.
func children(t *testing.T, parent int) []int {
	t.Helper()
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	var ids []int
	for _, path := range stats {
		b, _ := os.ReadFile(path) // it may have ended
		m := regexp.MustCompile(`^(\d+) \(.*\) \S (\d+) `).FindStringSubmatch(string(b))
		if m != nil && m[2] == strconv.Itoa(parent) {
			id, _ := strconv.Atoi(m[1])
			ids = append(ids, id)
		}
	}
	return ids
}

func skipIfShort(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs a real Kafka")
	}
}

func TestArgumentErrorsNameTheFlag(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ args, want string }{
		{"", "want run or up"},
		{"down", `"down"`},
		{"run", "wants a command"},
		{"run -postgres 13 true", "-postgres: want one of"},
		{"run -kafka rabbit true", "-kafka: want one of"},
		{"run -kafka 4.9.0 true", "4.0.2, 4.1.0, 4.4.0"},
		{"run -pg-set fsync true", "-pg-set: want name=value"},
		{"run -kafka-set =1 true", "-kafka-set: want name=value"},
		{"run -postgres none -pg-set a=b true", "-pg-set needs a server"},
		{"run -postgres none -pgbouncer true", "-pgbouncer needs a server"},
		{"run -kafka none -kafka-set a=b true", "-kafka-set needs a broker"},
		{"run -quiet -v true", "-quiet and -v"},
		{"run -env-file x true", "-env-file"},
		{"up -env-file= ", "-env-file is empty"},
		{"up true", "up runs no command"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			c := newTool(t, strings.Fields(tt.args)...)
			require.Equal(t, 2, c.code(t))
			require.Contains(t, c.err.String(), tt.want)
			require.Empty(t, c.out.String())
		})
	}
}

func TestHelp(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ args, want string }{
		{"-h", "Exit codes:"},
		{"run -h", "-kafka-set"},
		{"run -h", "4.0.2, 4.1.0, 4.4.0"},
		{"up -h", "-env-file"},
	} {
		c := newTool(t, strings.Fields(tt.args)...)
		require.Equal(t, 0, c.code(t), tt.args)
		require.Contains(t, c.out.String(), tt.want)
		require.Empty(t, c.err.String())
	}
}

func TestRunPassesEverythingThrough(t *testing.T) {
	t.Parallel()
	c := newTool(t, "run", "-postgres", "none", "-kafka", "fake", "--", "sh", "-c", "cat; env; echo oops >&2; exit 7")
	c.Stdin = strings.NewReader("from stdin\n")
	require.Equal(t, 7, c.code(t))
	require.Contains(t, c.out.String(), "from stdin\n")
	require.Contains(t, c.err.String(), "oops\n")
	env := variables(c.out.String())
	require.Regexp(t, `^127\.0\.0\.1:\d+$`, env["OUTBOX_KAFKA_BROKERS"])
	require.Equal(t, "kfake", env["OUTBOX_KAFKA_KIND"])
	require.Equal(t, env["OUTBOX_KAFKA_BROKERS"], env["KAFKA_BROKERS"])
	require.NotContains(t, env, "OUTBOX_POSTGRES_URL")
	require.NotContains(t, env, "DATABASE_URL")
}

func TestRunExitCodes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, command string
		want          int
	}{
		{"command not found", "no-such-command", 127},
		{"file not found", "./no-such-file", 127},
		{"a directory", "/", 126},
		{"killed by a signal", "kill -TERM $$", 143},
	} {
		t.Run(tt.name, func(t *testing.T) {
			args := []string{"run", "-postgres", "none", "-kafka", "none", "--", tt.command}
			if strings.Contains(tt.command, " ") {
				args = append(args[:len(args)-1], "sh", "-c", tt.command)
			}
			require.Equal(t, tt.want, newTool(t, args...).code(t))
		})
	}
}

func TestQuietPrintsNothing(t *testing.T) {
	t.Parallel()
	c := newTool(t, "run", "-quiet", "-postgres", "none", "-kafka", "fake", "true")
	require.Equal(t, 0, c.code(t))
	require.Empty(t, c.err.String())
}

func TestRunStartsRealServicesAndLeavesNothing(t *testing.T) {
	long.Test(t)
	t.Parallel()
	skipIfShort(t)
	c := newTool(t, "run", "-postgres", "embedded", "-kafka", "local", "-pg-set", "work_mem=7MB", "--",
		"sh", "-c", "env; exec sleep 60")
	began := time.Now()
	require.NoError(t, c.Start())
	require.Eventually(t, func() bool { return len(children(t, c.Process.Pid)) == 3 && time.Since(began) > time.Second },
		2*time.Minute, 50*time.Millisecond)
	time.Sleep(200 * time.Millisecond) // the shell is there, and its traps are the default
	started := children(t, c.Process.Pid)
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	require.Error(t, c.Wait())
	require.Equal(t, 143, c.ProcessState.ExitCode(), "the command died of the signal that was forwarded")
	for _, pid := range started {
		requireGone(t, pid)
	}
	requireEmpty(t, c.tmp)
	env := variables(c.out.String())
	require.Contains(t, env["OUTBOX_POSTGRES_URL"], "@127.0.0.1:")
	require.Equal(t, "kafka", env["OUTBOX_KAFKA_KIND"])
	t.Log(c.err.String())
}

func TestRunThroughPgBouncer(t *testing.T) {
	long.Test(t)
	t.Parallel()
	skipIfShort(t)
	c := newTool(t, "run", "-postgres", "embedded", "-kafka", "none", "-pgbouncer", "--", "env")
	require.Equal(t, 0, c.code(t))
	env := variables(c.out.String())
	require.NotEqual(t, env["OUTBOX_POSTGRES_URL"], env["OUTBOX_POSTGRES_DIRECT_URL"])
	require.Contains(t, env["OUTBOX_POSTGRES_URL"], "default_query_exec_mode=")
	require.Contains(t, env["OUTBOX_POSTGRES_DIRECT_URL"], "@127.0.0.1:")
	require.Equal(t, env["OUTBOX_POSTGRES_URL"], env["DATABASE_URL"])
	requireEmpty(t, c.tmp)
}

func TestRunWithRegistry(t *testing.T) {
	long.Test(t)
	t.Parallel()
	skipIfShort(t)
	c := newTool(t, "run", "-postgres", "none", "-kafka", "none", "-registry", "--",
		"env")
	require.Equal(t, 0, c.code(t))
	require.Regexp(t, "^http://127.0.0.1:[0-9]+/apis/ccompat/v7$", variables(c.out.String())["OUTBOX_SCHEMA_REGISTRY_URL"])
	requireEmpty(t, c.tmp)

	given := newTool(t, "run", "-postgres", "none", "-kafka", "none", "-registry", "--", "env")
	given.Env = append(given.Env, "OUTBOX_SCHEMA_REGISTRY_URL=http://127.0.0.1:1")
	require.Equal(t, 125, given.code(t), "what is given must answer")
	require.Contains(t, given.err.String(), "use the address in OUTBOX_SCHEMA_REGISTRY_URL")
}

func TestInterruptedStartLeavesNothing(t *testing.T) {
	long.Test(t)
	t.Parallel()
	skipIfShort(t)
	for _, after := range []time.Duration{30 * time.Millisecond, 300 * time.Millisecond, 700 * time.Millisecond, 1500 * time.Millisecond} {
		t.Run(after.String(), func(t *testing.T) {
			c := newTool(t, "run", "-postgres", "embedded", "-kafka", "local", "--", "sleep", "60")
			require.NoError(t, c.Start())
			time.Sleep(after)
			started := children(t, c.Process.Pid)
			require.NoError(t, c.Process.Signal(os.Interrupt))
			require.Error(t, c.Wait())
			require.Equal(t, 130, c.ProcessState.ExitCode())
			for _, pid := range started {
				requireGone(t, pid)
			}
			requireEmpty(t, c.tmp)
		})
	}
}

// The kernel ends what a killed tool leaves, and the next run removes its data.
func TestKilledToolLeavesNoProcess(t *testing.T) {
	long.Test(t)
	t.Parallel()
	skipIfShort(t)
	if _, err := os.Stat("/proc/self/stat"); err != nil {
		t.Skip("Linux only")
	}
	file := ".services.env"
	c := newTool(t, "up", "-postgres", "embedded", "-kafka", "none")
	require.NoError(t, c.Start())
	require.Eventually(t, func() bool { _, err := os.Stat(filepath.Join(c.tmp, file)); return err == nil },
		time.Minute, 20*time.Millisecond)
	started := children(t, c.Process.Pid)
	require.Len(t, started, 1)
	require.NoError(t, c.Process.Kill())
	require.Error(t, c.Wait())
	for _, pid := range started {
		requireGone(t, pid)
	}

	next := newTool(t, "run", "-postgres", "embedded", "-kafka", "none", "true")
	next.Env = append(next.Env, "TMPDIR="+c.tmp)
	require.Equal(t, 0, next.code(t))
	require.NoError(t, os.Remove(filepath.Join(c.tmp, file)))
	requireEmpty(t, c.tmp)
}

func TestHalfFailedStartLeavesNothing(t *testing.T) {
	t.Parallel()
	skipIfShort(t)
	c := newTool(t, "run", "-postgres", "embedded", "-kafka", "local", "-pg-set", "wal_level=nonsense", "true")
	require.Equal(t, 125, c.code(t))
	require.Contains(t, c.err.String(), "nonsense")
	require.NotContains(t, c.err.String(), "another service")
	requireEmpty(t, c.tmp)
}

func TestUpWritesAndRemovesAddresses(t *testing.T) {
	t.Parallel()
	skipIfShort(t)
	c := newTool(t, "up", "-postgres", "embedded", "-kafka", "fake", "-env-file", "addresses")
	file := filepath.Join(c.tmp, "addresses")
	require.NoError(t, c.Start())
	require.Eventually(t, func() bool { _, err := os.Stat(file); return err == nil }, time.Minute, 20*time.Millisecond)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	env := variables(string(b))
	_, err = pgserver.Ping(t.Context(), env["OUTBOX_POSTGRES_URL"])
	require.NoError(t, err)
	require.NoError(t, kafkaserver.Ready(t.Context(), []string{env["OUTBOX_KAFKA_BROKERS"]}))
	require.Equal(t, env["OUTBOX_POSTGRES_URL"], env["DATABASE_URL"])
	require.Equal(t, env["OUTBOX_KAFKA_BROKERS"], env["KAFKA_BROKERS"])
	require.Equal(t, "kfake", env["OUTBOX_KAFKA_KIND"])

	// A second instance uses the addresses of the first.
	second := newTool(t, "run", "env")
	second.Env = append(second.Env, "DATABASE_URL=postgres://127.0.0.1:1/another", "OUTBOX_POSTGRES_URL="+env["OUTBOX_POSTGRES_URL"],
		"OUTBOX_KAFKA_BROKERS="+env["OUTBOX_KAFKA_BROKERS"], "OUTBOX_KAFKA_KIND=kfake")
	require.Equal(t, 0, second.code(t))
	require.Subset(t, variables(second.out.String()), env)
	require.NotContains(t, second.err.String(), "postgres:postgres@", "a password")

	require.NoError(t, c.Process.Signal(os.Interrupt))
	require.NoError(t, c.Wait())
	requireEmpty(t, c.tmp)
	require.Error(t, kafkaserver.Ping(t.Context(), []string{env["OUTBOX_KAFKA_BROKERS"]}))
}

func TestGivenAddressMustAnswer(t *testing.T) {
	t.Parallel()
	c := newTool(t, "run", "true")
	c.Env = append(c.Env, "OUTBOX_POSTGRES_URL=postgres://127.0.0.1:1/x", "OUTBOX_KAFKA_BROKERS=127.0.0.1:1")
	require.Equal(t, 125, c.code(t))
	require.Contains(t, c.err.String(), "OUTBOX_POSTGRES_URL")
}

func TestExplicitModesDoNotFallBack(t *testing.T) {
	t.Parallel()
	c := newTool(t, "run", "-postgres", "none", "-kafka", "local", "true")
	c.Env = append(c.Env, "PATH="+c.tmp, "JAVA_HOME=", "OUTBOX_KAFKA_BROKERS=127.0.0.1:1")
	require.Equal(t, 125, c.code(t))
	require.Contains(t, c.err.String(), "no java command")
}

func TestAutoWithoutJavaWarns(t *testing.T) {
	t.Parallel()
	c := newTool(t, "run", "-quiet", "-postgres", "none", "/usr/bin/env")
	c.Env = append(c.Env, "PATH="+c.tmp, "JAVA_HOME=", "DOCKER_HOST=unix:///no-such-socket")
	require.Equal(t, 0, c.code(t))
	require.Contains(t, c.err.String(), "WARNING")
	require.Equal(t, "kfake", variables(c.out.String())["OUTBOX_KAFKA_KIND"])
}

// Where a real broker is wanted, an imitation is refused, wherever it comes from.
func TestRealWithoutJavaFails(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		want string
		env  []string
	}{
		{"no java command", nil},
		{"an imitation", []string{"OUTBOX_KAFKA_BROKERS=127.0.0.1:1", "OUTBOX_KAFKA_KIND=kfake"}},
	} {
		c := newTool(t, "run", "-postgres", "none", "-kafka", "real", "/usr/bin/env")
		c.Env = append(append(c.Env, "PATH="+c.tmp, "JAVA_HOME=", "DOCKER_HOST=unix:///no-such-socket"), tt.env...)
		require.Equal(t, 125, c.code(t))
		require.Contains(t, c.err.String(), tt.want)
		require.Empty(t, c.out.String())
	}
}

// brokenEngine answers as a Docker engine that cannot get an image.
func brokenEngine(t *testing.T) (host string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	require.NoError(t, err)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Api-Version", "1.50")
		w.Header().Set("Content-Type", "application/json")
		switch {
		case strings.HasSuffix(r.URL.Path, "/_ping"):
		case strings.HasSuffix(r.URL.Path, "/info"), strings.HasSuffix(r.URL.Path, "/version"):
			io.WriteString(w, `{"ApiVersion": "1.50", "OSType": "linux"}`)
		default:
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"message": "no such image"}`)
		}
	})}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	return "unix://" + socket
}

func TestDockerWithoutImages(t *testing.T) {
	// In a container the library would look for the engine on another host.
	t.Setenv("TESTCONTAINERS_HOST_OVERRIDE", "localhost")
	host := brokenEngine(t)
	t.Run("auto falls back", func(t *testing.T) {
		c := newTool(t, "run", "-postgres", "none", "/usr/bin/env")
		c.Env = append(c.Env, "PATH="+c.tmp, "JAVA_HOME=", "DOCKER_HOST="+host)
		require.Equal(t, 0, c.code(t))
		require.Contains(t, c.err.String(), "no container, a local broker instead")
		require.Equal(t, "kfake", variables(c.out.String())["OUTBOX_KAFKA_KIND"])
	})
	t.Run("a version is that of the image, whatever the environment names", func(t *testing.T) {
		c := newTool(t, "run", "-postgres", "none", "-kafka", "4.4.0", "true")
		c.Env = append(c.Env, "PATH="+c.tmp, "JAVA_HOME=", "DOCKER_HOST="+host,
			"OUTBOX_KAFKA_BROKERS=127.0.0.1:1", "OUTBOX_KAFKA_IMAGE=example/kafka:4.1.0")
		require.Equal(t, 125, c.code(t))
		require.Contains(t, c.err.String(), "container of apache/kafka:4.4.0")
		require.Contains(t, c.err.String(), "no java command")
	})
	t.Run("docker does not", func(t *testing.T) {
		c := newTool(t, "run", "-postgres", "docker", "-kafka", "none", "true")
		c.Env = append(c.Env, "DOCKER_HOST="+host)
		require.Equal(t, 125, c.code(t))
		require.Contains(t, c.err.String(), "container of postgres:18-alpine")
	})
}
