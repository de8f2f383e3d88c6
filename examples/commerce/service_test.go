package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/stretchr/testify/require"
)

// running is a service in this process, with products on its shelves.
type running struct {
	*service
	*street
	logs testenv.Buffer
}

func startService(t *testing.T) *running {
	t.Helper()
	a := newApp(t)
	a.withRedis(t)
	r := &running{}
	a.log = slog.New(outboxhttp.LogTrace(slog.NewTextHandler(&r.logs, &slog.HandlerOptions{Level: slog.LevelDebug})))
	ensureTopics(t, a.kafka, a.events)
	require.NoError(t, a.fillShelves(t.Context()))
	var err error
	r.service, err = newService(t.Context(), a, config{listen: "127.0.0.1:0", password: "secret"})
	require.NoError(t, err)
	testenv.Run(t, r.run)
	r.street = newStreet("http://" + r.listener.Addr().String())
	t.Cleanup(r.client.CloseIdleConnections)
	return r
}

func (r *running) post(t *testing.T, path string, body, answer any) {
	t.Helper()
	require.NoError(t, r.call(t.Context(), http.MethodPost, path, "my-own", body, answer))
}

// get returns status and body.
func (r *running) get(t *testing.T, path, password string) (status int, body string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, r.street.shop+path, http.NoBody)
	require.NoError(t, err)
	if password != "" {
		request.SetBasicAuth("operator", password)
	}
	response, err := r.client.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(text)
}

// What is ordered, liked and viewed is counted, the page of what is sold out goes, and the trace
// id of the request is in the lines that the consumers log, and in what they have read.
func TestFromRequestToStatistic(t *testing.T) {
	t.Parallel()
	r := startService(t)
	page := func() string {
		status, body := r.get(t, "/products/3?user=7", "")
		require.Equal(t, http.StatusOK, status, body)
		return body
	}
	require.Contains(t, page(), "in stock")
	var placed orderAnswer
	r.post(t, "/orders", orderRequest{UserID: 7, Items: []orderItem{{ProductID: 3, Quantity: 10}, {ProductID: 1, Quantity: 1}}}, &placed)
	require.Equal(t, int64(10*1250+750), placed.Total)
	r.post(t, fmt.Sprintf("/orders/%d/payment", placed.OrderID), nil, nil)
	r.post(t, "/products/3/likes", map[string]int64{"userId": 7}, nil)
	require.Eventually(t, func() bool {
		_, body := r.get(t, "/products/3/statistic", "")
		return strings.TrimSpace(body) == `{"likes":1,"sales":10,"views":1}`
	}, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool { return strings.Contains(page(), "sold out") }, testenv.Patience, 10*time.Millisecond)

	for _, line := range []string{"order counted", "like counted"} {
		require.Regexp(t, `msg="`+line+`" trace_id=my-own `, r.logs.String())
	}
	var traced int
	require.NoError(t, r.db.QueryRow(t.Context(), `SELECT count(*) FROM outbox WHERE headers->>'x-trace-id' = 'my-own'`).Scan(&traced))
	require.Equal(t, 6, traced, "order and payment created, both paid, stock depleted, liked")
}

// Strangers send anything. They are told what is wrong, and nothing is committed.
var badRequests = []struct {
	name, method, path, body string
	status                   int
}{
	{"no JSON", "POST", "/orders", "order", 400},
	{"no items", "POST", "/orders", `{"userId": 1}`, 400},
	{"a product twice", "POST", "/orders", `{"items": [{"productId": 1, "quantity": 1}, {"productId": 1, "quantity": 2}]}`, 400},
	{"none of a product", "POST", "/orders", `{"items": [{"productId": 1}]}`, 400},
	{"too many of a product", "POST", "/orders", `{"items": [{"productId": 1, "quantity": 9223372036854775807}]}`, 400},
	{"unknown product", "POST", "/orders", `{"items": [{"productId": 99, "quantity": 1}]}`, 404},
	{"too large", "POST", "/orders", `{"note": "` + strings.Repeat("x", maxBody) + `"}`, 400},
	{"unknown order", "POST", "/orders/99/payment", "", 404},
	{"order without a number", "POST", "/orders/first/payment", "", 400},
	{"unknown order is declined", "POST", "/orders/99/decline", "", 404},
	{"unknown product is liked", "POST", "/products/99/likes", `{"userId": 1}`, 404},
	{"unknown product is viewed", "GET", "/products/99", "", 404},
	{"viewer without a number", "GET", "/products/1?user=me", "", 400},
	{"wrong method", "DELETE", "/orders", "", 405},
}

func TestBadRequests(t *testing.T) {
	t.Parallel()
	r := startService(t)
	for _, tt := range badRequests {
		t.Run(tt.name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(t.Context(), tt.method, r.street.shop+tt.path, strings.NewReader(tt.body))
			require.NoError(t, err)
			response, err := r.client.Do(request)
			require.NoError(t, err)
			defer response.Body.Close()
			require.Equal(t, tt.status, response.StatusCode)
		})
	}
	var placed orderAnswer
	r.post(t, "/orders", orderRequest{UserID: 7, Items: []orderItem{{ProductID: 1, Quantity: 1}}}, &placed)
	path := fmt.Sprintf("/orders/%d/", placed.OrderID)
	r.post(t, path+"decline", nil, nil)
	for _, again := range []string{"decline", "payment"} {
		err := r.call(t.Context(), http.MethodPost, path+again, "my-own", nil, nil)
		require.ErrorContains(t, err, "409")
	}
	var events int
	require.NoError(t, r.db.QueryRow(context.Background(), `SELECT count(*) FROM outbox`).Scan(&events))
	require.Equal(t, 4, events, "order and payment created, payment failed, order canceled")
}

// Without Redis the shop sells.
func TestPagesWithoutRedis(t *testing.T) {
	t.Parallel()
	r := startService(t)
	require.NoError(t, r.pages.redis.Close())
	status, body := r.get(t, "/products/3", "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "in stock")
}

// The operators' page needs the password; the probes do not.
func TestOperatorsPage(t *testing.T) {
	t.Parallel()
	r := startService(t)
	for password, want := range map[string]int{"": http.StatusUnauthorized, "guess": http.StatusUnauthorized, "secret": http.StatusOK} {
		status, body := r.get(t, operatorsPath+"/", password)
		require.Equal(t, want, status)
		require.True(t, want == http.StatusOK || !strings.Contains(body, "default"), "the relay")
	}
	require.Eventually(t, func() bool { // it has a row once it has begun
		_, body := r.get(t, operatorsPath+"/", "secret")
		return strings.Contains(body, "default")
	}, testenv.Patience, 10*time.Millisecond)
	require.Eventually(t, func() bool {
		status, _ := r.get(t, "/readyz", "")
		return status == http.StatusOK
	}, testenv.Patience, 10*time.Millisecond)
	status, _ := r.get(t, "/livez", "")
	require.Equal(t, http.StatusOK, status)
}

var metricName = regexp.MustCompile(`\b(outbox|messaging)_[a-z_]+\b`)

// nothingFailed are the metrics that are there once something has failed, waits, or was removed.
var nothingFailed = []string{"outbox_outage", "outbox_outage_age_seconds", "outbox_group_breakers", "outbox_group_waiting", "outbox_group_waiting_age_seconds", "outbox_consumer_failed_total", "outbox_relay_dead_total", "outbox_relay_rejected_total", "outbox_relay_removed_total"}

// The dashboard shows this service, too: it has all metrics for which
// that asks, but for those of workers, which it does not run, and of what did not fail.
func TestMetricsOfTheDashboard(t *testing.T) {
	t.Parallel()
	r := startService(t)
	require.NoError(t, r.visit(t.Context()))
	dashboard, err := os.ReadFile("../../deploy/outbox-monitoring/files/dashboard.json")
	require.NoError(t, err)
	asked := metricName.FindAllString(string(dashboard), -1)
	require.Contains(t, asked, "outbox_consumer_lag")
	var missing []string
	defer func() { t.Log("missing:", missing) }()
	require.Eventually(t, func() bool { // each comes with what it counts
		_, body := r.get(t, "/metrics", "")
		exported := metricName.FindAllString(body, -1)
		missing = slices.DeleteFunc(slices.Clone(asked), func(name string) bool {
			return strings.HasPrefix(name, "outbox_worker_") || slices.Contains(nothingFailed, name) || slices.Contains(exported, name)
		})
		return len(missing) == 0
	}, testenv.Patience, 50*time.Millisecond)
}

// Requests with one Idempotency-Key place one order, however many come at the same time, and all get the same answer.
func TestIdempotencyKey(t *testing.T) {
	t.Parallel()
	r := startService(t)
	post := func(key string, order orderRequest) (status int, answer string) {
		body, err := json.Marshal(order)
		require.NoError(t, err)
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.street.shop+"/orders", bytes.NewReader(body))
		require.NoError(t, err)
		request.Header.Set("Idempotency-Key", key)
		response, err := r.client.Do(request)
		require.NoError(t, err)
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return response.StatusCode, string(text)
	}
	order := orderRequest{UserID: 7, Items: []orderItem{{ProductID: 1, Quantity: 2}}}
	const clicks = 12
	answers := make(chan string, clicks)
	var all sync.WaitGroup
	for range clicks {
		all.Go(func() {
			status, answer := post("a", order)
			answers <- fmt.Sprint(status, " ", answer)
		})
	}
	all.Wait()
	first := <-answers
	require.Regexp(t, `^201 \{"orderId":\d+,"totalAmount":1500\}\s$`, first)
	for range clicks - 1 {
		require.Equal(t, first, <-answers)
	}
	count := func(sql string) (n int) {
		require.NoError(t, r.db.QueryRow(t.Context(), sql).Scan(&n))
		return n
	}
	require.Equal(t, []int{1, 2}, []int{count(`SELECT count(*) FROM orders`), count(`SELECT count(*) FROM outbox`)})

	more := order
	more.Items = []orderItem{{ProductID: 1, Quantity: 3}}
	status, _ := post("a", more)
	require.Equal(t, http.StatusUnprocessableEntity, status, "the same key for another order")
	status, another := post("b", order)
	require.Equal(t, http.StatusCreated, status)
	require.NotContains(t, first, another)
	theirs := order
	theirs.UserID = 8
	status, another = post("a", theirs)
	require.Equal(t, http.StatusCreated, status)
	require.NotContains(t, first, another)
	unknown := order
	unknown.Items = []orderItem{{ProductID: 99, Quantity: 1}}
	for range 2 {
		status, _ = post("c", unknown)
		require.Equal(t, http.StatusNotFound, status)
	}
	status, _ = post("c", order)
	require.Equal(t, http.StatusCreated, status, "what has failed is not kept")
	for _, key := range []string{"", strings.Repeat("k", 256), "\xff"} {
		status, _ = post(key, order)
		require.Equal(t, http.StatusBadRequest, status, "%q", key)
	}
	require.Equal(t, 4, count(`SELECT count(*) FROM orders`))

	tx, err := r.db.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background()) //nolint:errcheck // nothing is to be kept
	_, err = r.service.shop.inbox.Once(t.Context(), tx, outbox.InboxMessage{Source: "user 7", ID: "d", Action: "ORDER_PLACED"}, func() ([]byte, error) { return nil, nil })
	require.NoError(t, err)
	status, _ = post("d", order)
	require.Equal(t, http.StatusConflict, status, "the first request takes too long")
}
