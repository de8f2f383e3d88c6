package main

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

const look = 50 * time.Millisecond

func TestMain(m *testing.M) { program.Main(m, main) }

// What docs/guide.md tells its reader to do has the results that it shows.
func TestGuide(t *testing.T) {
	db := testenv.OtherDatabase(t)
	kafka := outboxtest.Kafka(t)
	s := start(t, db, kafka)
	require.Equal(t, http.StatusOK, s.ask(t, "GET", "/live", ""))
	require.Equal(t, http.StatusBadRequest, s.ask(t, "POST", "/orders", `{"product": "tea", "cents": 450}`))
	require.Equal(t, http.StatusCreated, s.ask(t, "POST", "/orders", `{"orderId": "order-1", "product": "tea", "cents": 450}`))
	s.waitForSales(t, "tea", "450")

	require.Equal(t, http.StatusCreated, s.ask(t, "POST", "/orders", `{"orderId": "order-2", "product": "coffee", "cents": 300}`))
	deadLetters := outboxtest.Records(t.Context(), t, kafka, "order-events.dlq", 1)
	require.Contains(t, deadLetters[0].Headers, kgo.RecordHeader{Key: outbox.DeadLetterError, Value: []byte(`no product "coffee"`)})

	require.Equal(t, http.StatusOK, s.ask(t, "PUT", "/products/coffee", ""))
	report, err := outboxdlq.Replay(t.Context(), kafka, outboxdlq.ReplayConfig{Topic: "order-events.dlq"})
	require.NoError(t, err)
	require.Equal(t, 1, report.Sent)
	s.waitForSales(t, "coffee", "300")
	s.stop(t)
}

// Without Kafka the service starts, is live and takes orders. They are published when Kafka is there.
func TestWithoutKafka(t *testing.T) {
	db := testenv.OtherDatabase(t)
	address, startKafka := testenv.LateKafka(t)
	s := start(t, db, []kgo.Opt{kgo.SeedBrokers(address)})
	require.Equal(t, http.StatusOK, s.ask(t, "GET", "/live", ""))
	require.Equal(t, http.StatusCreated, s.ask(t, "POST", "/orders", `{"orderId": "order-1", "product": "tea", "cents": 450}`))
	require.Eventually(t, func() bool { return strings.Contains(s.log.String(), "outbox: Kafka, to make topics, fails") }, testenv.Patience, look, s.log)
	startKafka()
	s.waitForSales(t, "tea", "450")
	s.stop(t)
}

// An order that is placed just before SIGTERM is published, by this process or by
// the next one.
func TestStop(t *testing.T) {
	db := testenv.OtherDatabase(t)
	kafka := outboxtest.Kafka(t)
	s := start(t, db, kafka)
	require.Equal(t, http.StatusCreated, s.ask(t, "POST", "/orders", `{"orderId": "order-1", "product": "tea", "cents": 450}`))
	s.stop(t)
	s = start(t, db, kafka)
	s.waitForSales(t, "tea", "450")
	s.stop(t)
}

// Two signals that come together are one: GNU timeout signals a process and its group. The service still finishes a
// request that it has begun.
func TestSecondSignal(t *testing.T) {
	db := testenv.OtherDatabase(t)
	s := start(t, db, []kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")})
	address := strings.TrimPrefix(s.url, "http://")
	var dialer net.Dialer
	request, err := dialer.DialContext(t.Context(), "tcp", address)
	require.NoError(t, err)
	defer request.Close()
	_, err = request.Write([]byte("POST /orders HTTP/1.1\r\nHost: shop\r\nContent-Length: 100\r\n\r\n{"))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, s.ask(t, "GET", "/live", "")) // later than the request
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	require.Eventually(t, func() bool { // the service has heard the signal
		conn, err := dialer.DialContext(t.Context(), "tcp", address)
		if err == nil {
			_ = conn.Close()
		}
		return err != nil
	}, testenv.Patience, time.Millisecond)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, request.Close())
	require.NoError(t, s.cmd.Wait())
	require.Contains(t, s.log.String(), "stopped")
}

// A test of an order need not know when it was placed.
func TestPlace(t *testing.T) {
	db := testenv.OtherDatabase(t)
	require.NoError(t, setUp(t.Context(), db))
	events, err := registry()
	require.NoError(t, err)
	s := &shop{db: db}
	s.recorder, err = outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	s.relay, err = outbox.NewRelay(db, nil, outbox.RelayConfig{})
	require.NoError(t, err)
	body := `{"orderId": "order-1", "product": "tea", "cents": 450}`
	answer := httptest.NewRecorder()
	s.postOrder(answer, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/orders", strings.NewReader(body)))
	require.Equal(t, http.StatusCreated, answer.Code, answer.Body)
	outboxtest.RequireRecorded(t.Context(), t, db, events, OrderPlaced{OrderID: "order-1", Product: "tea", Cents: 450})
}

func TestStopWhileStarting(t *testing.T) {
	program.RequireEndWhileStarting(t, guide(), "DATABASE_URL")
}

// guide is the guide's program as a process.
func guide() *exec.Cmd { return program.Command(context.Background(), nil, "LISTEN=127.0.0.1:0") }

// service is a process that runs and listens.
type service struct {
	cmd *exec.Cmd
	log *testenv.Buffer
	url string
}

// start starts the service and waits until it listens.
func start(t *testing.T, db *pgxpool.Pool, kafka []kgo.Opt) *service {
	t.Helper()
	client, err := kgo.NewClient(kafka...)
	require.NoError(t, err)
	defer client.Close()
	brokers, _ := client.OptValue(kgo.SeedBrokers).([]string)
	dsn, err := url.Parse(db.Config().ConnString())
	require.NoError(t, err)
	dsn.Path = db.Config().ConnConfig.Database

	s := &service{cmd: guide(), log: &testenv.Buffer{}}
	s.cmd.Env = append(s.cmd.Env, "DATABASE_URL="+dsn.String(), "KAFKA_BROKERS="+strings.Join(brokers, ","))
	s.cmd.Stderr = s.log
	require.NoError(t, s.cmd.Start())
	t.Cleanup(func() { _ = s.cmd.Process.Kill() })
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	address := regexp.MustCompile(`listening address=(\S+)`)
	require.Eventually(t, func() bool {
		found := address.FindStringSubmatch(s.log.String())
		if found != nil {
			s.url = "http://" + found[1]
		}
		return found != nil
	}, testenv.Patience, look, s.log)
	return s
}

// ask sends a request and returns the status of the answer.
func (s *service) ask(t *testing.T, method, path, body string) int {
	t.Helper()
	status, _ := s.answer(t, method, path, body)
	return status
}

func (s *service) answer(t *testing.T, method, path, body string) (int, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, s.url+path, strings.NewReader(body))
	require.NoError(t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(bytes.TrimSpace(text))
}

func (s *service) waitForSales(t *testing.T, product, cents string) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, text := s.answer(t, "GET", "/sales/"+product, "")
		return text == cents
	}, testenv.Patience, look, s.log)
}

// stop ends the service as a scheduler does.
func (s *service) stop(t *testing.T) {
	t.Helper()
	program.RequireEnd(t, s.cmd, syscall.SIGTERM)
	require.Contains(t, s.log.String(), "stopped")
	for line := range strings.Lines(s.log.String()) {
		require.True(t, !strings.Contains(line, "ERROR") || strings.Contains(line, "event is dead"), line)
	}
}
