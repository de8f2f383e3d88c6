package itest

import (
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxhttp"
)

// secret is a password that must not be in any log or answer.
const secret = "hunter2222"

// wrongStart is a service that begins with a wrong configuration.
type wrongStart struct {
	db    *pgxpool.Pool
	kafka []kgo.Opt
}

// A service whose PostgreSQL or Kafka is wrong from the start says so within 5 s, with nothing to send: in its log with
// the address, in its health with what and the class. It is ready only where Kafka is no more than away.
func TestServiceWithWrongConfiguration(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // PgBouncer has one code for all reasons, and tries a login that failed again after 15 s
	secure := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(secure.Close)
	postgres := func(t *testing.T, w *wrongStart, change func(cfg *pgxpool.Config)) string {
		cfg := w.db.Config()
		change(cfg)
		var err error
		w.db, err = pgxpool.NewWithConfig(background, cfg)
		require.NoError(t, err)
		t.Cleanup(w.db.Close)
		return fmt.Sprintf("%s:%d", cfg.ConnConfig.Host, cfg.ConnConfig.Port)
	}
	at := func(t *testing.T, w *wrongStart, address, settings string) string {
		cfg, err := pgxpool.ParseConfig("postgres://u:" + secret + "@" + address + "/d?" + settings)
		require.NoError(t, err)
		return postgres(t, w, func(c *pgxpool.Config) { *c = *cfg })
	}
	brokers := func(w *wrongStart, address string, opts ...kgo.Opt) string {
		w.kafka = append([]kgo.Opt{kgo.SeedBrokers(address)}, opts...)
		return address
	}
	for _, test := range []struct {
		name  string
		set   func(t *testing.T, w *wrongStart) (address string)
		what  string
		class string
		ready bool
	}{
		{"wrong password", func(t *testing.T, w *wrongStart) string {
			return postgres(t, w, func(c *pgxpool.Config) { c.ConnConfig.Password = secret })
		}, "PostgreSQL", "refused_login", false},
		{"missing database", func(t *testing.T, w *wrongStart) string {
			return postgres(t, w, func(c *pgxpool.Config) { c.ConnConfig.Database = "nosuch" })
		}, "PostgreSQL", "no_database", false},
		{"no server", func(t *testing.T, w *wrongStart) string { return at(t, w, testenv.Nowhere(t), "sslmode=disable") }, "PostgreSQL", "unreachable", false},
		{"PostgreSQL with a certificate that is not trusted", func(t *testing.T, w *wrongStart) string {
			return at(t, w, testenv.Serve(t, func(conn net.Conn) {
				_, _ = io.CopyN(io.Discard, conn, 8) // SSLRequest
				_, _ = conn.Write([]byte("S"))
				_ = tls.Server(conn, secure.TLS).HandshakeContext(t.Context())
			}), "sslmode=verify-full")
		}, "PostgreSQL", "refused_tls", false},
		{"wrong brokers", func(t *testing.T, w *wrongStart) string { return brokers(w, testenv.Nowhere(t)) }, "Kafka", "unreachable", true},
		{"a load balancer without brokers", func(t *testing.T, w *wrongStart) string {
			return brokers(w, testenv.Serve(t, func(net.Conn) {}))
		}, "Kafka", "closed", true},
		{"an HTTP server as broker", func(t *testing.T, w *wrongStart) string {
			s := httptest.NewServer(http.NotFoundHandler())
			t.Cleanup(s.Close)
			return brokers(w, strings.TrimPrefix(s.URL, "http://"))
		}, "Kafka", "no_answer", true},
		{"brokers with a certificate that is not trusted", func(_ *testing.T, w *wrongStart) string {
			return brokers(w, strings.TrimPrefix(secure.URL, "https://"), kgo.DialTLSConfig(&tls.Config{MinVersion: tls.VersionTLS12}))
		}, "Kafka", "refused_tls", false},
		{"TLS to a server without", func(t *testing.T, w *wrongStart) string {
			s := httptest.NewServer(http.NotFoundHandler())
			t.Cleanup(s.Close)
			return brokers(w, strings.TrimPrefix(s.URL, "http://"), kgo.DialTLSConfig(&tls.Config{MinVersion: tls.VersionTLS12}))
		}, "Kafka", "refused_tls", false},
		{"SASL with a wrong password", func(t *testing.T, w *wrongStart) string {
			cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.EnableSASL(), kfake.Superuser("SCRAM-SHA-256", "u", "right"))
			require.NoError(t, err)
			t.Cleanup(cluster.Close)
			refuseLogins(cluster)
			return brokers(w, cluster.ListenAddrs()[0], kgo.SASL(scram.Auth{User: "u", Pass: secret}.AsSha256Mechanism()))
		}, "Kafka", "refused_login", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := newConsumerFixture(t, 1)
			w := &wrongStart{db: s.db, kafka: testenv.KafkaOpts(s.brokers)}
			address := test.set(t, w)
			s.requireWrong(t, w, test.what, test.class, address, test.ready)
		})
	}
}

// requireWrong runs a service and requires what it says.
func (s *consumerFixture) requireWrong(t *testing.T, w *wrongStart, what, class, address string, ready bool) {
	t.Helper()
	const within = 5 * time.Second
	logs := map[string]*testenv.Buffer{"relay": {}, "consumer": {}, "worker": {}}
	logger := func(part string) *slog.Logger { return slog.New(slog.NewTextHandler(logs[part], nil)) }
	relay, err := outbox.NewRelay(w.db, w.kafka, outbox.RelayConfig{Schema: s.schema, PollInterval: 20 * time.Millisecond, Logger: logger("relay")})
	require.NoError(t, err)
	consumer, err := outbox.NewConsumer(w.db, w.kafka, s.events, "c-"+s.topic, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logger("consumer"), From: outbox.FromStart},
	}, outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	worker, err := outbox.NewWorker(w.db, s.events, "w-"+s.topic, outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: s.schema, Logger: logger("worker")}},
		outbox.Handle("COUNTED", s.count))
	require.NoError(t, err)
	parts := []outboxhttp.Part{outboxhttp.Relay(relay), outboxhttp.Consumer(consumer), outboxhttp.Worker(worker)}
	ask := func(h http.Handler) (int, string) {
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", http.NoBody))
		require.NotContains(t, answer.Body.String(), secret)
		return answer.Code, answer.Body.String()
	}
	began := time.Now()
	testenv.Run(t, relay.Run)
	testenv.Run(t, consumer.Run)
	testenv.Run(t, worker.Run)
	concerned := map[string]func() []outbox.Outage{
		"relay":    func() []outbox.Outage { return relay.Health().Outages },
		"consumer": func() []outbox.Outage { return consumer.Health().Outages },
	}
	if what == "PostgreSQL" {
		concerned["worker"] = func() []outbox.Outage { return worker.Health().Outages }
	}
	for part, outages := range concerned {
		require.Eventually(t, func() bool { return strings.Contains(logs[part].String(), address) }, testenv.Patience, time.Millisecond, "%s: %s", part, logs[part])
		require.Less(t, time.Since(began), within, part)
		require.Eventually(t, func() bool {
			for _, o := range outages() {
				if o.What == what && o.Class == class && !o.Since.Before(began) {
					return true
				}
			}
			return false
		}, testenv.Patience, time.Millisecond, "%s: %v", part, outages())
	}
	for time.Since(began) < within {
		code, body := ask(outboxhttp.Ready(parts...))
		if ready && code != http.StatusOK {
			require.Regexp(t, "PostgreSQL has not answered yet|its handlers are not stored yet", body)
		} else if !ready {
			require.Equal(t, http.StatusServiceUnavailable, code, body)
		}
		code, body = ask(outboxhttp.Live(parts...))
		require.Equal(t, http.StatusOK, code, body)
		code, body = ask(outboxhttp.Ready(outboxhttp.Own(parts[0])))
		require.Equal(t, http.StatusServiceUnavailable, code, body)
		time.Sleep(20 * time.Millisecond)
	}
	if ready {
		code, body := ask(outboxhttp.Ready(parts...))
		require.Equal(t, http.StatusOK, code, body)
	}
	_, body := ask(outboxhttp.Health(parts...))
	require.Contains(t, body, `"class":"`+class+`"`)
	if what == "PostgreSQL" {
		require.NotContains(t, body, "Kafka does not serve this process")
	}
	for part, log := range logs {
		require.NotContains(t, log.String(), secret, part)
	}
}
