package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The metrics have the newest transaction of a process that sends exactly once.
func TestRelayProcessExactlyOnce(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	d.record(t, "a", "b")
	p := d.startRelay(t, "OUTBOX_EXACTLY_ONCE="+d.topic+"-cursors")
	d.received(t, "a", "b")
	require.Eventually(t, func() bool {
		_, metrics := get(t, p.address(), "/metrics", nil)
		return regexp.MustCompile(`(?m)^outbox_relay_transaction\{outbox_relay_name="default"\} [1-9]`).MatchString(metrics)
	}, testenv.Patience, 100*time.Millisecond)
}

// A process relays events, answers probes, serves its metrics, and stops on a signal.
func TestRelayProcess(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	d.record(t, "a", "b")
	p := d.startRelay(t)
	d.received(t, "a", "b")
	address := p.address()
	for _, path := range []string{"/livez", "/readyz"} {
		require.Eventually(t, func() bool { status, _ := get(t, address, path, nil); return status == http.StatusOK }, testenv.Patience, 10*time.Millisecond, path)
	}
	status, body := get(t, address, "/readyz", nil)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, `"leading":true`)
	status, _ = get(t, address, "/outbox/", nil)
	require.Equal(t, http.StatusNotFound, status, "no page unless it is asked for")
	for _, line := range []string{
		`messaging_client_sent_messages_total{messaging_system="kafka",messaging_operation_name="send",outbox_relay_name="default",outbox_retry="false",messaging_destination_name="` + d.topic + `"} 2`,
		`outbox_relay_publish_latency_seconds_count{outbox_relay_name="default",messaging_destination_name="` + d.topic + `"} 2`,
		`outbox_relay_leader{outbox_relay_name="default"} 1`,
		`outbox_relay_works{outbox_relay_name="default"} 1`,
		`outbox_relay_state{outbox_relay_name="default",outbox_state="works"} 1`,
		`outbox_relay_breaker_state{outbox_relay_name="default",outbox_state="closed"} 1`,
		`outbox_relay_led{outbox_relay_name="default"} 1`,
		`outbox_relay_pending{outbox_relay_name="default"} 0`,
		`outbox_stale{outbox_relay_name="default"} 0`,
		`outbox_watch_up{outbox_watched="relays"} 1`,
		`outbox_delayed{outbox_status="waiting"} 0`,
		`outbox_delayed_age_seconds 0`,
	} {
		require.EventuallyWithT(t, func(c *assert.CollectT) { // the first look may be from before the events were sent
			status, metrics := get(t, address, "/metrics", nil)
			require.Equal(c, http.StatusOK, status)
			require.Contains(c, metrics, line+"\n")
		}, testenv.Patience, 100*time.Millisecond)
	}
	code, took := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
	require.Less(t, took, stopTime)
	require.Empty(t, p.out.String(), "logs go to stderr")
	for line := range strings.Lines(p.log.String()) {
		require.True(t, strings.HasPrefix(line, "{"), line)
	}
}

// Flags come before variables, and both are checked before anything is connected to.
func TestRelayIsConfigured(t *testing.T) {
	t.Parallel()
	vars := map[string]string{"DATABASE_URL": "postgres://u:hunter22@127.0.0.1:1/d", "KAFKA_BROKERS": "127.0.0.1:1"}
	for _, test := range []struct{ args, variable, want string }{
		{"--poll 0s --poll -1s", "", "--poll -1s: must not be negative"},
		{"", "OUTBOX_POLL=soon", `$OUTBOX_POLL "soon"`},
		{"--max-retries 3", "OUTBOX_MAX_RETRIES=-1 OUTBOX_BATCH=-2", "$OUTBOX_BATCH -2: must not be negative"},
		{"", "OUTBOX_POLL=-1s", "$OUTBOX_POLL -1s"},
		{"", "OUTBOX_LEASE=1s", "$OUTBOX_LEASE 1s"},
		{"--lease 1s", "OUTBOX_LEASE=5s", "--lease 1s"},
		{"", "OUTBOX_LOG=xml", `$OUTBOX_LOG "xml"`},
		{"--listen off", "OUTBOX_PAGE=users", "$OUTBOX_PAGE wants an address to --listen at"},
		{"--lease 2s", "", "--lease 2s: at least 3s"},
		{"--log xml", "", `--log "xml": want text, json`},
		{"", "OUTBOX_LOG_LEVEL=loud", `$OUTBOX_LOG_LEVEL "loud"`},
		{"--page users --listen off", "", "--page wants an address"},
		{"--published-for 0", "", "want a time such as"},
		{"", "OUTBOX_STRUCTURED=maybe", `$OUTBOX_STRUCTURED "maybe"`},
		{"", "KAFKA_TLS=maybe", `$KAFKA_TLS "maybe"`},
		{"", "OUTBOX_SLACK_URL=http://example.com/hunter22", "$OUTBOX_SLACK_URL"},
		{"", "KAFKA_BROKERS=", "which Kafka?"},
		{"", "DATABASE_URL=", "which database?"},
	} {
		t.Run(test.args+test.variable, func(t *testing.T) {
			t.Parallel()
			d := &commandFixture{vars: map[string]string{}}
			for name, value := range vars {
				d.vars[name] = value
			}
			for _, v := range strings.Fields(test.variable) {
				name, value, _ := strings.Cut(v, "=")
				d.vars[name] = value
			}
			a := d.call(t, append([]string{"relay"}, strings.Fields(test.args)...)...)
			require.Equal(t, exitUsage, a.code, a.err)
			require.Contains(t, a.err, test.want)
			require.NotContains(t, a.err, "hunter22")
		})
	}
}

// A short lease shortens the times that must be below it.
func TestRelayTakesAShortLease(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.record(t, "a")
	p := d.startRelay(t, "OUTBOX_LEASE=3s", "OUTBOX_STRUCTURED=true", "OUTBOX_RELAY=second", "OUTBOX_LISTEN=off", "OUTBOX_HEADERS=event-id")
	require.Equal(t, 1, d.received(t, "a")["header event-id"])
	relays, err := d.inspector(t).Relays(background)
	require.NoError(t, err)
	require.Len(t, relays, 1)
	require.Equal(t, "second", relays[0].Name)
	require.LessOrEqual(t, time.Until(relays[0].LeaseUntil), 3*time.Second)
	require.Equal(t, listenOff, p.address())
	code, _ := p.stop(syscall.SIGINT)
	require.Equal(t, exitOK, code)
}

// Without tables, or if its port is in use, the process ends and says what to do.
func TestRelayEndsByItself(t *testing.T) {
	t.Parallel()
	empty := newCommandFixture(t)
	p := empty.startRelay(t)
	require.Equal(t, exitError, p.wait())
	require.Contains(t, p.log.String(), "outbox migrate up")

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	p = newShop(t).startRelay(t, "OUTBOX_LISTEN="+taken.Addr().String())
	require.Equal(t, exitError, p.wait())
	require.Contains(t, p.log.String(), "$OUTBOX_LISTEN "+taken.Addr().String())
	require.Contains(t, p.log.String(), "address already in use")
	p = newShop(t).startRelay(t, "OUTBOX_PAGE=/nosuch")
	require.Equal(t, exitError, p.wait())
	require.Contains(t, p.log.String(), "$OUTBOX_PAGE: users: open /nosuch")
}

// Without PostgreSQL and Kafka, the process starts, is live and not ready. It works as soon as they are
// available.
func TestRelayWaitsForServices(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	d := newShop(t)
	d.record(t, "a")
	c := d.db.Config().ConnConfig
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String()
	require.NoError(t, free.Close())
	unreachable := strings.Replace(d.relayURL(), fmt.Sprintf("%s:%d", c.Host, c.Port), address, 1)
	p := d.startRelay(t, "DATABASE_URL="+unreachable)
	p.awaitLine("outbox: PostgreSQL fails, trying until it works")
	status, body := get(t, p.address(), "/livez", nil)
	require.Equal(t, http.StatusOK, status, body)
	status, metrics := get(t, p.address(), "/metrics", nil)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, metrics, `outbox_watch_up{outbox_watched="relays"} 0`)
	require.NotContains(t, metrics, "outbox_relay_pending")

	// Now PostgreSQL is at this address.
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	proxyAt(t, l, fmt.Sprintf("%s:%d", c.Host, c.Port))
	d.received(t, "a")
	code, _ := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
}

// While PostgreSQL does not answer, the process cannot stop cleanly. It still ends in time, and at once
// after a second signal. Events whose sending it had not noted are sent again.
func TestRelayStopsWhateverHangs(t *testing.T) {
	t.Parallel()
	for _, second := range []bool{false, true} {
		t.Run(fmt.Sprint("second signal ", second), func(t *testing.T) {
			t.Parallel()
			d := newShop(t)
			c := d.db.Config().ConnConfig
			proxy := newSilentProxy(t, fmt.Sprintf("%s:%d", c.Host, c.Port))
			p := d.startRelay(t, "OUTBOX_LEASE=8s", "DATABASE_URL="+proxy.through(t, d.relayURL()))
			d.record(t, "a")
			d.received(t, "a")
			close(proxy.silent)
			d.record(t, "b")
			if second {
				require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
				p.awaitLine("outbox: relay process stops")
				time.Sleep(600 * time.Millisecond) // an earlier one would belong to the first
				code, took := p.stop(syscall.SIGTERM)
				require.Equal(t, exitSignal+int(syscall.SIGTERM), code)
				require.Less(t, took, relayStops/2)
			} else {
				code, took := p.stop(syscall.SIGTERM)
				require.Less(t, took, stopTime)
				if code == exitOK { // no statement was running
					require.Contains(t, p.log.String(), "lease not released")
				} else {
					require.Equal(t, exitError, code)
					require.Contains(t, p.log.String(), errHangs.Error())
				}
			}
			d.startRelay(t)
			d.received(t, "a", "b")
		})
	}
}

// Two signals that come together stop the process as one does: it gives back its lease. GNU timeout in a pipeline sends
// two.
func TestTwoSignalsAtOnce(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	p := d.startRelay(t)
	d.record(t, "a")
	d.received(t, "a")
	require.NoError(t, p.cmd.Process.Signal(syscall.SIGTERM))
	code, _ := p.stop(syscall.SIGINT) // a second SIGTERM might be one with the first
	require.Equal(t, exitOK, code)
	var free bool
	require.NoError(t, d.db.QueryRow(t.Context(), pg.InSchema(`SELECT bool_and(expires_at = '-infinity') FROM {schema}.outbox_lease`, d.schema)).Scan(&free))
	require.True(t, free)
}

// The users of the page are the present users in the file.
func TestRelayServesThePage(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	file := filepath.Join(t.TempDir(), "users")
	write := func(text string) { require.NoError(t, os.WriteFile(file, []byte(text), 0o600)) }
	write("# who may come in\nreader kim 0123456789abcdef\n\noperator lee fedcba9876543210\n")
	p := d.startRelay(t, "OUTBOX_PAGE="+file)
	address := p.address()
	as := func(name, password string) int {
		status, _ := get(t, address, "/outbox/", func(r *http.Request) { r.SetBasicAuth(name, password) })
		return status
	}
	status, body := get(t, address, "/outbox/", nil)
	require.Equal(t, http.StatusUnauthorized, status, body)
	require.Equal(t, http.StatusOK, as("kim", "0123456789abcdef"))
	require.Equal(t, http.StatusOK, as("lee", "fedcba9876543210"))
	require.Equal(t, http.StatusUnauthorized, as("kim", "fedcba9876543210"))
	require.Equal(t, http.StatusUnauthorized, as("", ""))
	write("reader kim another-password\n")
	require.Equal(t, http.StatusUnauthorized, as("lee", "fedcba9876543210"), "he has gone")
	require.NoError(t, os.Remove(file))
	require.Equal(t, http.StatusUnauthorized, as("kim", "another-password"), "nobody knows who he is")
	require.NotContains(t, p.log.String(), "another-password")
	code, _ := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
}

// An invalid file of users prevents the start of the process, and its content is not shown.
func TestRelayReadsUsers(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                                  "no user is in it",
		"# reader kim 0123456789abcdef":     "no user is in it",
		"kim 0123456789abcdef":              "line 1: want three words",
		"\nadmin kim 0123456789abcdef":      "line 2: the first word is neither reader nor operator",
		"reader kim secret":                 "at least 16 characters",
		"reader kim 0123456789 abcdefgh":    "want three words",
		"reader k\u200bim 0123456789abcdef": "the name is malformed: U+200B is not printable",
	} {
		file := filepath.Join(t.TempDir(), "users")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		_, err := userFile(file).read()
		require.ErrorContains(t, err, want, text)
		require.NotContains(t, err.Error(), "012345")
		require.NotContains(t, err.Error(), "secret")
	}
}

// The log contains no password of any source. A short password does not mask parts of other words.
func TestRelayMasksItsLog(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	e := &env{stderr: &b}
	e.secret("x")
	e.secret("hunter22")
	log := (&relayProcess{log: logJSON}).logger(e)
	log.Info("outbox: relay process starts", "error", "no login with hunter22 at postgres://u:other@h/d, password=third")
	require.Contains(t, b.String(), `"msg":"outbox: relay process starts"`)
	for _, secret := range []string{"hunter22", "other", "third"} {
		require.NotContains(t, b.String(), secret)
	}
}
