package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/testenv"
)

// stopTime is the longest time that a stop may take.
const stopTime = 5 * time.Second

// relayRun is a relay process under test.
type relayRun struct {
	t    testing.TB
	log  testenv.Buffer
	out  testenv.Buffer
	cmd  *exec.Cmd
	code chan int
}

// variables returns the variables of a relay process for the fixture, which listens at a free port.
func (d *commandFixture) variables(more ...string) []string {
	return append([]string{"DATABASE_URL=" + d.relayURL(), "KAFKA_BROKERS=" + strings.Join(d.brokers, ","), "OUTBOX_SCHEMA=" + d.schema,
		"OUTBOX_LISTEN=127.0.0.1:0", "OUTBOX_LOG=json", "OUTBOX_POLL=20ms"}, more...)
}

// relayURL has the way to run queries that PgBouncer needs, where it is in between.
func (d *commandFixture) relayURL() string {
	return d.url("&default_query_exec_mode=" + strings.ReplaceAll(d.db.Config().ConnConfig.DefaultQueryExecMode.String(), " ", "_"))
}

// startRelay runs the test binary as the program.
func (d *commandFixture) startRelay(t testing.TB, variables ...string) *relayRun {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(program, "relay")
	cmd.Env = append(d.variables(variables...), asProgram+"=1", "HOME="+t.TempDir())
	return startProcess(t, cmd)
}

// startProcess starts a relay process, which is killed when the test ends.
func startProcess(t testing.TB, cmd *exec.Cmd) *relayRun {
	t.Helper()
	p := &relayRun{t: t, cmd: cmd, code: make(chan int, 1)}
	cmd.Stdout, cmd.Stderr = &p.out, &p.log
	require.NoError(t, cmd.Start(), "a process like that of a container cannot be started here")
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var exit *exec.ExitError
		if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
			p.code <- -1
			return
		}
		p.code <- cmd.ProcessState.ExitCode()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Log(p.log.String())
		}
	})
	return p
}

// address returns where the process listens, by its log.
func (p *relayRun) address() string {
	p.t.Helper()
	return p.awaitLine("outbox: relay process starts")["listen"].(string)
}

// awaitLine waits for a line of the log.
func (p *relayRun) awaitLine(msg string) (found map[string]any) {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		for line := range strings.Lines(p.log.String()) {
			var l map[string]any
			if json.Unmarshal([]byte(line), &l) == nil && l["msg"] == msg {
				found = l
			}
		}
		return found != nil
	}, testenv.Patience, 5*time.Millisecond, "no line %q", msg)
	return found
}

// stop sends a signal. It returns the exit code of the process, and how long the stop takes.
func (p *relayRun) stop(signal syscall.Signal) (code int, took time.Duration) {
	p.t.Helper()
	began := time.Now()
	require.NoError(p.t, p.cmd.Process.Signal(signal))
	return p.wait(), time.Since(began)
}

func (p *relayRun) wait() int {
	p.t.Helper()
	select {
	case code := <-p.code:
		return code
	case <-time.After(testenv.Patience):
		p.t.Fatal("the process does not end")
		return 0
	}
}

// get asks the process, and returns its status and body; 0 while it does not listen.
func get(t testing.TB, address, path string, change func(*http.Request)) (status int, body string) {
	t.Helper()
	r, err := http.NewRequest(http.MethodGet, "http://"+address+path, http.NoBody)
	require.NoError(t, err)
	if change != nil {
		change(r)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err.Error()
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(text)
}

// received reads the topic until it has records of all keys. It returns the number of records of each key,
// and of records with a header.
func (d *commandFixture) received(t testing.TB, keys ...string) map[string]int {
	t.Helper()
	client, err := kgo.NewClient(append(testenv.KafkaOpts(d.brokers), kgo.ConsumeTopics(d.topic), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
	require.NoError(t, err)
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	found := map[string]int{}
	for notFound(found, keys) > 0 {
		fetches := client.PollFetches(ctx)
		require.NoError(t, ctx.Err(), "%d of %d events have not arrived", notFound(found, keys), len(keys))
		fetches.EachRecord(func(r *kgo.Record) {
			found[string(r.Key)]++
			for _, h := range r.Headers {
				found["header "+h.Key]++
			}
		})
	}
	return found
}

func notFound(found map[string]int, keys []string) (n int) {
	for _, key := range keys {
		if found[key] == 0 {
			n++
		}
	}
	return n
}

// silentProxy passes bytes on, until it goes silent: its connections stay open, and nothing comes any more.
type silentProxy struct {
	listener net.Listener
	target   string
	silent   chan struct{}
	conns    sync.WaitGroup
}

func newSilentProxy(t testing.TB, target string) *silentProxy {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	return proxyAt(t, l, target)
}

func proxyAt(t testing.TB, l net.Listener, target string) *silentProxy {
	t.Helper()
	p := &silentProxy{listener: l, target: target, silent: make(chan struct{})}
	ended := make(chan struct{})
	p.conns.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.conns.Go(func() { p.pass(conn, ended) })
		}
	})
	t.Cleanup(func() {
		close(ended)
		_ = l.Close()
		p.conns.Wait()
	})
	return p
}

func (p *silentProxy) pass(client net.Conn, ended chan struct{}) {
	defer client.Close()
	server, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	p.conns.Go(func() { p.copy(server, client) })
	p.conns.Go(func() { p.copy(client, server) })
	<-ended
}

func (p *silentProxy) copy(to, from net.Conn) {
	b := make([]byte, 32<<10)
	for {
		n, err := from.Read(b)
		select {
		case <-p.silent:
			if err != nil {
				return
			}
			continue // it is read and goes nowhere
		default:
		}
		if _, err2 := to.Write(b[:n]); err != nil || err2 != nil {
			_ = to.Close()
			return
		}
	}
}

// through returns the URL of the database by way of the proxy.
func (p *silentProxy) through(t testing.TB, database string) string {
	t.Helper()
	u, err := url.Parse(database)
	require.NoError(t, err)
	u.Host = p.listener.Addr().String()
	return u.String()
}

// promtool checks metrics.
func promtool(t testing.TB, metrics string) {
	t.Helper()
	program := needProgram(t, "promtool")
	cmd := exec.Command(program, "check", "metrics")
	cmd.Stdin = strings.NewReader(metrics)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	require.NoError(t, cmd.Run(), "%s\n%s", out.String(), metrics)
	require.Empty(t, out.String())
}

// needProgram skips under -short, and fails where a program is missing.
func needProgram(t testing.TB, name string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs Prometheus")
	}
	path, err := exec.LookPath(name)
	require.NoError(t, err, "this test needs Prometheus: tools/needs.sh test says how to install it")
	return path
}
