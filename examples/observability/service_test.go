package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxhttp"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
)

// running is a service that serves.
type running struct {
	*service
	t     *testing.T
	spans *tracetest.InMemoryExporter
	logs  testenv.Buffer
}

// startService runs a service on a port of its own until the test ends. Its topic
// takes 20,000 bytes, what it refuses is soon dead, and what is published soon goes.
func startService(t *testing.T) *running {
	t.Helper()
	r := &running{t: t, spans: tracetest.NewInMemoryExporter()}
	topic := "observability-" + uuid.NewString()
	for _, name := range []string{topic, topic + ".dlq"} {
		testenv.CreateTopic(t, testenv.Brokers(t), name, 1, "max.message.bytes", "20000")
	}
	relay := outbox.RelayConfig{Retry: outbox.RetryPolicy{MaxRetries: 1}, RetryInterval: 10 * time.Millisecond, PollInterval: 50 * time.Millisecond}
	relay.Retention.PublishedFor = time.Second
	var err error
	r.service, err = open(t.Context(), config{
		listen: "127.0.0.1:0", Services: show.Services{Postgres: testenv.Pool(t, nil).Config().ConnString(), Brokers: testenv.Brokers(t)}, topic: topic,
		spans: r.spans, interval: 50 * time.Millisecond, relay: relay,
		log: slog.New(outboxhttp.LogTrace(slog.NewJSONHandler(&r.logs, &slog.HandlerOptions{Level: slog.LevelDebug}))),
	})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, r.close()) })
	testenv.Run(t, r.run)
	return r
}

// order places an order.
func (r *running) order(o orderPlaced, headers ...string) *http.Response {
	r.t.Helper()
	body, err := json.Marshal(o)
	require.NoError(r.t, err)
	request, err := http.NewRequestWithContext(r.t.Context(), http.MethodPost, r.url("/orders"), bytes.NewReader(body))
	require.NoError(r.t, err)
	for pair := range slices.Chunk(headers, 2) {
		request.Header.Set(pair[0], pair[1])
	}
	response, err := http.DefaultClient.Do(request)
	require.NoError(r.t, err)
	defer response.Body.Close()
	return response
}

func (r *running) url(path string) string { return "http://" + r.listener.Addr().String() + path }

// problem places five good orders, one whose event no topic takes, and one that no
// handler does, and publishes all of it once more, as a crash might.
func (r *running) problem() {
	r.t.Helper()
	again, err := outbox.NewRelay(r.db, r.kafka, r.tel.Relay(outbox.RelayConfig{Schema: r.id, Name: "again", Logger: r.log}))
	require.NoError(r.t, err)
	testenv.Run(r.t, again.Run)
	// Retention keeps events for the relays that have a position.
	r.await(func(s scraped) bool { return s.value("outbox_relay_led", "outbox_relay_name", "again") == 1 })
	for i := range 5 {
		require.Equal(r.t, http.StatusCreated, r.order(orderPlaced{ID: fmt.Sprint("order-", i), Cents: 100}).StatusCode)
	}
	require.Equal(r.t, http.StatusCreated, r.order(orderPlaced{ID: "large", Cents: 100, Note: noise(30_000)}).StatusCode)
	require.Equal(r.t, http.StatusCreated, r.order(orderPlaced{ID: "free"}).StatusCode)
	require.Equal(r.t, http.StatusBadRequest, r.order(orderPlaced{}).StatusCode)
}

// lose has Kafka remove all records before a group has read them.
func (r *running) lose() {
	r.t.Helper()
	admin, err := kadm.NewOptClient(r.kafka...)
	require.NoError(r.t, err)
	defer admin.Close()
	group := "late-" + r.id
	var start kadm.Offsets
	start.AddOffset(r.cfg.topic, 0, 0, -1)
	require.NoError(r.t, admin.CommitAllOffsets(r.t.Context(), group, start))
	ends, err := admin.ListEndOffsets(r.t.Context(), r.cfg.topic)
	require.NoError(r.t, err)
	removed, err := admin.DeleteRecords(r.t.Context(), ends.Offsets())
	require.NoError(r.t, err)
	require.NoError(r.t, removed.Error())
	late, err := outbox.NewConsumer(r.db, r.kafka, r.events,
		group, r.tel.Consumer(group, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Schema: r.id, Logger: r.log}}),
		outbox.Handle("SALE_COUNTED", r.countSale))
	require.NoError(r.t, err)
	testenv.Run(r.t, late.Run)
}

// illMember adds the row of a process elsewhere with an open breaker and an outage.
func (r *running) illMember() {
	r.t.Helper()
	_, err := r.db.Exec(r.t.Context(), r.sql(`INSERT INTO {schema}.event_member (consumer_group, member, from_kafka, renewed_at, renewed_every, routes, state)
		VALUES ('ill', 'there/1/x', true, now(), '1 hour', '{}', jsonb_build_object('breakers', '[{"action": "A", "state": "open"}]'::jsonb,
			'outages', jsonb_build_array(jsonb_build_object('what', 'fetching', 'class', 'no_answer', 'since', now()))))`))
	require.NoError(r.t, err)
}

// noise returns n characters that do not compress well.
func noise(n int) string {
	var b strings.Builder
	for b.Len() < n {
		b.WriteString(uuid.NewString())
	}
	return b.String()[:n]
}

// scraped is what /metrics said, by the names of metrics.
type scraped map[string]*dto.MetricFamily

func (r *running) scrape() scraped {
	r.t.Helper()
	request, err := http.NewRequestWithContext(r.t.Context(), http.MethodGet, r.url("/metrics"), nil)
	require.NoError(r.t, err)
	response, err := http.DefaultClient.Do(request)
	require.NoError(r.t, err)
	defer response.Body.Close()
	require.Equal(r.t, http.StatusOK, response.StatusCode)
	parser := expfmt.NewTextParser(model.LegacyValidation) // what a Prometheus before 3 takes
	families, err := parser.TextToMetricFamilies(response.Body)
	require.NoError(r.t, err)
	return families
}

// value adds up the metrics of a family that have all labels, given as name and value;
// of a histogram how many values it has. It is -1 if there are none.
func (s scraped) value(name string, labels ...string) float64 {
	sum := -1.0
	for _, m := range s[name].GetMetric() {
		has := map[string]string{}
		for _, l := range m.GetLabel() {
			has[l.GetName()] = l.GetValue()
		}
		fits := true
		for pair := range slices.Chunk(labels, 2) {
			fits = fits && has[pair[0]] == pair[1]
		}
		if fits {
			sum = max(sum, 0) + m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// await scrapes until a condition is met.
func (r *running) await(met func(scraped) bool) (s scraped) {
	r.t.Helper()
	require.Eventually(r.t, func() bool { s = r.scrape(); return met(s) }, testenv.Patience, 20*time.Millisecond)
	return s
}

// awaitOutage waits until all has happened that problem brings about.
func (r *running) awaitOutage() scraped {
	r.t.Helper()
	return r.await(func(s scraped) bool {
		return s.value("outbox_relay_dead_total") == 1 && s.value("outbox_consumer_lag") == 0 &&
			s.value("outbox_consumer_processed_total", "outbox_result", "repeated") == 6 &&
			s.value("outbox_consumer_processed_total", "outbox_result", "dead_lettered") == 1 &&
			s.value("outbox_relay_pending") == 0 && s.value("outbox_relay_removed_total") > 0 &&
			s.value("outbox_relay_stored", "outbox_status", "dead") == 1 &&
			s.value("outbox_worker_processed_total", "outbox_result", "done") == 6 && s.value("outbox_worker_dead") == 2 && s.value("outbox_worker_pending") == 0
	})
}

// Each metric comes over HTTP as Prometheus wants it, with the value that it must have.
func TestMetricsAreScraped(t *testing.T) {
	t.Parallel()
	r := startService(t)
	before := r.await(func(s scraped) bool { return s.value("outbox_relay_led", "outbox_relay_name", "default") == 1 })
	require.Equal(t, 0.0, before.value("outbox_relay_pending"))
	require.Equal(t, 0.0, before.value("outbox_relay_pending_age_seconds"))
	r.problem()
	s := r.awaitOutage()
	first := []string{"outbox_relay_name", "default"}
	for _, tt := range []struct {
		want   float64
		name   string
		labels []string
	}{
		{1, "target_info", []string{"service_name", "observability"}},
		{7, "outbox_recorder_events_total", nil},
		{6, "messaging_client_sent_messages_total", []string{"outbox_relay_name", "default", "error_type", ""}},
		{2, "messaging_client_sent_messages_total", []string{"outbox_relay_name", "default", "error_type", "message_too_large", "messaging_destination_name", r.cfg.topic}},
		{6, "messaging_client_sent_messages_total", []string{"outbox_relay_name", "again", "error_type", ""}},
		{6, "outbox_relay_publish_latency_seconds", first},
		{1, "outbox_relay_rejected_total", first},
		{1, "outbox_relay_dead_total", []string{"cloudevents_event_type", "acme.order.placed.v1"}},
		{1, "outbox_relay_leader", first},
		{1, "outbox_relay_breaker_state", []string{"outbox_relay_name", "default", "outbox_state", "closed"}},
		{0, "outbox_relay_breaker_state", []string{"outbox_relay_name", "default", "outbox_state", "open"}},
		{2, "outbox_relay_led", nil},
		{1, "outbox_relay_stored", []string{"outbox_relay_name", "default", "outbox_status", "dead"}},
		{0, "outbox_relay_keys", first},
		{0, "outbox_consumer_lag", []string{"messaging_destination_name", r.cfg.topic, "messaging_destination_partition_id", "0"}},
		{5, "outbox_consumer_processed_total", []string{"outbox_result", "handled", "outbox_action", "SALE_COUNTED"}},
		{1, "outbox_consumer_breaker_state", []string{"outbox_action", "SALE_COUNTED", "outbox_state", "closed"}},
		{1, "outbox_worker_breaker_state", []string{"outbox_action", "MAIL_SENT", "outbox_state", "closed"}},
		{1, "outbox_worker_dead", []string{"outbox_action", "SALE_COUNTED"}},
		{1, "outbox_worker_dead", []string{"outbox_action", "MAIL_SENT"}},
		{1, "outbox_consumer_failed_total", []string{"error_type", "_OTHER"}},
		{3, "outbox_watch_up", nil},
		{1, "outbox_worker_processed_total", []string{"outbox_result", "dead", "outbox_action", "MAIL_SENT"}},
		{1, "outbox_worker_failed_total", []string{"error_type", "_OTHER"}},
		{2, "outbox_group_members", nil},
		{0, "outbox_worker_processing", nil},
		{0, "outbox_worker_backlog", nil},
		{0, "outbox_worker_backlog_age_seconds", nil},
	} {
		require.Equal(t, tt.want, s.value(tt.name, tt.labels...), "%s %v\n%v", tt.name, tt.labels, s[tt.name])
	}
	for _, name := range []string{"messaging_client_operation_duration_seconds", "outbox_relay_batch_size",
		"messaging_process_duration_seconds", "messaging_client_consumed_messages_total"} {
		require.Positive(t, s.value(name), name)
	}
	latency := s["outbox_relay_publish_latency_seconds"].GetMetric()[0].GetHistogram()
	require.Greater(t, latency.GetSampleSum(), 0.0)
	require.Less(t, latency.GetSampleSum()/float64(latency.GetSampleCount()), testenv.Patience.Seconds())
}

// What dashboard and alerts ask for is there: every metric and every label.
func TestDashboardAsksForWhatIsThere(t *testing.T) {
	t.Parallel()
	r := startService(t)
	r.problem()
	r.awaitOutage()
	r.lose()
	r.illMember()
	there := map[string]bool{"outbox_failed": true, "outbox_lease": true} // tables that texts name
	for name, family := range r.await(func(s scraped) bool { return s.value("outbox_consumer_lost_total") > 0 }) {
		there[name] = true
		for _, m := range family.GetMetric() {
			if m.GetHistogram() != nil {
				there[name+"_bucket"], there[name+"_sum"], there[name+"_count"] = true, true, true
			}
			for _, l := range m.GetLabel() {
				there[l.GetName()] = true
			}
		}
	}
	asked := map[string]bool{}
	for _, file := range []string{dashboardFile, alertRules} {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, name := range ours.FindAllString(string(text), -1) {
			asked[name] = true
			require.True(t, there[name], "%s asks for %s", file, name)
		}
	}
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	for _, name := range ours.FindAllString(string(readme), -1) {
		require.True(t, there[name], "README.md names %s", name)
	}
	for name := range r.scrape() {
		if ours.MatchString(name) {
			require.True(t, asked[name] || asked[name+"_bucket"], "no panel and no alert has %s", name)
		}
	}
	require.Greater(t, len(slices.Collect(maps.Keys(asked))), 30)
}

// ours are names of metrics and labels.
var ours = regexp.MustCompile(`\b((outbox|messaging|cloudevents|db_collection)_[a-z_]+|error_type)\b`)

// One trace goes from the HTTP request through the relay to the consumer's handler,
// and so does the trace id of the request, into the lines that are logged on the way.
func TestTraceFromRequestToHandler(t *testing.T) {
	t.Parallel()
	r := startService(t)
	const caller = "0af7651916cd43dd8448eb211c80319c"
	response := r.order(orderPlaced{ID: "order-1", Cents: 100}, "traceparent", "00-"+caller+"-b7ad6b7169203331-01", "X-Trace-Id", "my-own")
	require.Equal(t, http.StatusCreated, response.StatusCode)
	require.Equal(t, "my-own", response.Header.Get("X-Trace-Id"))
	r.await(func(s scraped) bool { return s.value("outbox_consumer_processed_total") == 1 })
	require.NoError(t, r.tel.tracers.ForceFlush(t.Context()))

	spans := map[string]tracetest.SpanStub{}
	for _, span := range r.spans.GetSpans() {
		require.Equal(t, caller, span.SpanContext.TraceID().String(), span.Name)
		spans[span.Name] = span
	}
	parents := map[string]string{}
	for name, span := range spans {
		parents[name] = span.Parent.SpanID().String()
	}
	id := func(name string) string { return spans[name].SpanContext.SpanID().String() }
	require.Equal(t, map[string]string{
		"POST /orders":           "b7ad6b7169203331",
		"record":                 id("POST /orders"),
		"send " + r.cfg.topic:    id("record"),
		"process " + r.cfg.topic: id("record"),
	}, parents)
	require.Regexp(t, `"msg":"sale counted","trace_id":"my-own"`, r.logs.String())
}
