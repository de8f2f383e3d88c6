package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/outboxgo/outbox/internal/testenv"
)

// silent returns the address of a server that takes connections and says nothing.
func silent(t testing.TB) string {
	return testenv.Serve(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
}

// A process of its own is live and not ready until PostgreSQL and Kafka have answered it, whatever is wrong and also if
// there is nothing to send. Within 5 s its log says where it asks, without a password.
func TestRelayIsNotReadyBefore(t *testing.T) {
	t.Parallel()
	const secret, showFor = "hunter2222", 5 * time.Second
	at := func(host, user, database string) string {
		return fmt.Sprintf("postgres://%s:%s@%s/%s?sslmode=disable", user, secret, host, database)
	}
	pooled := func(class string) string {
		if testenv.ThroughPgBouncer() { // which has one code for all reasons
			return "refused"
		}
		return class
	}
	for _, test := range []struct {
		name, class string // class: of the outage that /healthz shows, "" for none yet
		set         func(t *testing.T, d *commandFixture) (variables []string, address string)
	}{
		{"wrong password", pooled("refused_login"), func(_ *testing.T, d *commandFixture) ([]string, string) {
			c := d.db.Config().ConnConfig
			host := fmt.Sprintf("%s:%d", c.Host, c.Port)
			return []string{"DATABASE_URL=" + at(host, c.User, c.Database)}, host
		}},
		{"missing database", pooled("no_database"), func(_ *testing.T, d *commandFixture) ([]string, string) {
			c := d.db.Config().ConnConfig
			host := fmt.Sprintf("%s:%d", c.Host, c.Port)
			return []string{fmt.Sprintf("DATABASE_URL=postgres://%s:%s@%s/nosuch?sslmode=disable", c.User, c.Password, host)}, host
		}},
		{"no server", "unreachable", func(t *testing.T, _ *commandFixture) ([]string, string) {
			host := testenv.Nowhere(t)
			return []string{"DATABASE_URL=" + at(host, "u", "d")}, host
		}},
		{"silent server", "", func(t *testing.T, _ *commandFixture) ([]string, string) {
			host := silent(t)
			return []string{"DATABASE_URL=" + at(host, "u", "d")}, host
		}},
		{"wrong brokers", "unreachable", func(t *testing.T, _ *commandFixture) ([]string, string) {
			host := testenv.Nowhere(t)
			return []string{"KAFKA_BROKERS=" + host}, host
		}},
		{"silent broker", "no_answer", func(t *testing.T, _ *commandFixture) ([]string, string) {
			host := silent(t)
			return []string{"KAFKA_BROKERS=" + host}, host
		}},
		{"an HTTP server as broker", "no_answer", func(t *testing.T, _ *commandFixture) ([]string, string) {
			s := httptest.NewServer(http.NotFoundHandler())
			t.Cleanup(s.Close)
			host := strings.TrimPrefix(s.URL, "http://")
			return []string{"KAFKA_BROKERS=" + host}, host
		}},
		{"wrong SASL", "closed", func(t *testing.T, _ *commandFixture) ([]string, string) {
			cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-256", "u", "right"))
			require.NoError(t, err)
			t.Cleanup(cluster.Close)
			host := cluster.ListenAddrs()[0]
			return []string{"KAFKA_BROKERS=" + host, "KAFKA_USER=u", "KAFKA_PASSWORD=" + secret}, host
		}},
		{"a load balancer without brokers", "closed", func(t *testing.T, _ *commandFixture) ([]string, string) {
			host := testenv.Serve(t, func(net.Conn) {})
			return []string{"KAFKA_BROKERS=" + host}, host
		}},
		{"wrong CA of PostgreSQL", "refused_tls", func(t *testing.T, _ *commandFixture) ([]string, string) {
			s := httptest.NewTLSServer(http.NotFoundHandler())
			t.Cleanup(s.Close)
			host := testenv.Serve(t, func(conn net.Conn) {
				_, _ = io.CopyN(io.Discard, conn, 8) // SSLRequest
				_, _ = conn.Write([]byte("S"))
				_ = tls.Server(conn, s.TLS).HandshakeContext(t.Context())
			})
			return []string{"DATABASE_URL=postgres://u:" + secret + "@" + host + "/d?sslmode=verify-full"}, host
		}},
		{"wrong CA", "refused_tls", func(t *testing.T, _ *commandFixture) ([]string, string) {
			s := httptest.NewTLSServer(http.NotFoundHandler())
			t.Cleanup(s.Close)
			host := strings.TrimPrefix(s.URL, "https://")
			return []string{"KAFKA_BROKERS=" + host, "KAFKA_TLS=true"}, host
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			d := newShop(t)
			variables, where := test.set(t, d)
			p := d.startRelay(t, variables...)
			address := p.address()
			said := time.Duration(0)
			for began := time.Now(); time.Since(began) < showFor; time.Sleep(100 * time.Millisecond) {
				status, body := get(t, address, "/livez", nil)
				require.Equal(t, http.StatusOK, status, body)
				status, body = get(t, address, "/readyz", nil)
				require.Equal(t, http.StatusServiceUnavailable, status, body)
				require.NotContains(t, body, secret)
				if said == 0 && logsAddress(p.log.String(), where) {
					said = time.Since(began)
				}
			}
			require.NotZero(t, said, "nothing in the log about %s", where)
			status, body := get(t, address, "/healthz", nil)
			require.Equal(t, http.StatusOK, status)
			require.NotContains(t, body+p.log.String(), secret)
			require.Equal(t, test.class != "", strings.Contains(body, `"class":"`), body)
			if test.class != "" {
				require.Contains(t, body, `"class":"`+test.class+`"`)
			}
			t.Logf("said after %v", said)
		})
	}
}

// logsAddress reports whether a line other than the first names an address.
func logsAddress(log, address string) bool {
	for line := range strings.Lines(log) {
		if !strings.Contains(line, "relay process starts") && strings.Contains(line, address) {
			return true
		}
	}
	return false
}

// It becomes ready once both have answered, and stays so in an outage that comes later.
func TestRelayIsReadyOnceBothHaveAnswered(t *testing.T) {
	t.Parallel()
	testenv.Direct(t)
	d := newShop(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	p := d.startRelay(t, "KAFKA_BROKERS="+address)
	where := p.address()
	status, _ := get(t, where, "/readyz", nil)
	require.Equal(t, http.StatusServiceUnavailable, status)
	_, port, err := net.SplitHostPort(address)
	require.NoError(t, err)
	var number int
	_, err = fmt.Sscan(port, &number)
	require.NoError(t, err)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.Ports(number))
	require.NoError(t, err)
	defer cluster.Close()
	require.Eventually(t, func() bool {
		status, _ := get(t, where, "/readyz", nil)
		return status == http.StatusOK
	}, 15*time.Second, 50*time.Millisecond)
}
