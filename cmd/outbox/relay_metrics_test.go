package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The text follows the format: escapes, cumulative buckets, one type for a name.
func TestMetricsText(t *testing.T) {
	t.Parallel()
	h := newHistogram([]float64{0.5, 1})
	for _, v := range []float64{0.5, 0.7, 3} {
		h.observe(v)
	}
	var x exposition
	x.values("c_total", typeCounter, "What.", counters{labelsOf("a", "q\"b\\s\nn\xff", "none", ""): 1e15, "": 2})
	x.values("g", typeGauge, "Size.", map[labels]float64{labelsOf("a", "b").with("c", "d"): -0.5})
	x.histograms("h_seconds", "How long.", map[labels]*histogram{labelsOf("a", "b"): h})
	require.Equal(t, `# HELP c_total What.
# TYPE c_total counter
c_total 2
c_total{a="q\"b\\s\nn`+"\uFFFD"+`"} 1e+15
# HELP g Size.
# TYPE g gauge
g{a="b",c="d"} -0.5
# HELP h_seconds How long.
# TYPE h_seconds histogram
h_seconds_bucket{a="b",le="0.5"} 1
h_seconds_bucket{a="b",le="1"} 2
h_seconds_bucket{a="b",le="+Inf"} 3
h_seconds_sum{a="b"} 4.2
h_seconds_count{a="b"} 3
`, x.String())
	require.Equal(t, "+Inf", number(math.Inf(1)))
	promtool(t, x.String())
	require.Equal(t, textFormat, x.end())
}

// OpenMetrics has the exemplars of sampled traces. Texts that are no traceparent are not written.
func TestOpenMetrics(t *testing.T) {
	t.Parallel()
	h, at := newHistogram([]float64{0.5, 1}), time.UnixMilli(1764400000125)
	const trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	for v, traceParent := range map[float64]string{0.25: "00-" + trace + "-" + span + "-01", 0.75: "00-" + trace + "-" + span + "-00", 2: "00-\"} 1\n" + trace + "-01"} {
		h.observeIn(v, traceParent, at)
	}
	text, open := exposition{}, exposition{open: true}
	for _, x := range []*exposition{&text, &open} {
		x.values("c_total", typeCounter, "What.", counters{"": 2})
		x.histograms("h_seconds", "How long.", map[labels]*histogram{"": h})
	}
	require.Equal(t, openFormat, open.end())
	require.Equal(t, `# HELP c What.
# TYPE c counter
c_total 2
# HELP h_seconds How long.
# TYPE h_seconds histogram
h_seconds_bucket{le="0.5"} 1 # {trace_id="0af7651916cd43dd8448eb211c80319c",span_id="b7ad6b7169203331"} 0.25 1764400000.125
h_seconds_bucket{le="1"} 2
h_seconds_bucket{le="+Inf"} 3
h_seconds_sum 3
h_seconds_count 3
# EOF
`, open.String())
	require.NotContains(t, text.String(), "trace_id")
	require.Contains(t, text.String(), "# TYPE c_total counter")
}

// Rows that retention removes are counted by table.
func TestRelayMetricsCountRemovedRows(t *testing.T) {
	t.Parallel()
	m := newRelayMetrics("")
	m.hooks().RowsRemoved(outbox.RetentionResult{Published: 3, Audited: 1})
	m.hooks().RowsRemoved(outbox.RetentionResult{Published: 2})
	var x exposition
	m.write(&x, outbox.RelayHealth{})
	require.Contains(t, x.String(), `outbox_relay_removed_total{outbox_relay_name="default",db_collection_name="outbox"} 5`+"\n")
	require.Contains(t, x.String(), `outbox_relay_removed_total{outbox_relay_name="default",db_collection_name="outbox_audit"} 1`+"\n")
	require.NotContains(t, x.String(), "event_handled")
	promtool(t, x.String())
}

// Series of topics and types that others choose are bounded. Those that were not counted for an hour make room.
func TestRelayMetricsForgetTopics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newRelayMetrics("")
		reject := func(prefix string, n int) {
			for i := range n {
				m.hooks().Rejected(outbox.FailedEvent{Topic: fmt.Sprint(prefix, i), Type: fmt.Sprint("type", i), Class: "policy_violation"})
				m.hooks().Dead(outbox.FailedEvent{Topic: "orders", Type: fmt.Sprint("type,", i), Class: "policy_violation"})
			}
		}
		reject("bad,", 3_000)
		m.latency[labelsOf(relayLabel, m.relay, topicLabel, "bad,7")] = newHistogram(latencyBounds)
		m.sent[m.send[0].with(topicLabel, "bad,7")]++
		m.sent[m.send[0].with(topicLabel, "bad,77")]++
		require.LessOrEqual(t, len(m.rejected)+len(m.dead), 99+200+2)
		var x exposition
		m.write(&x, outbox.RelayHealth{})
		require.Contains(t, x.String(), `outbox_relay_rejected_total{outbox_relay_name="default",messaging_destination_name="bad,7",cloudevents_event_type="type7",error_type="policy_violation"} 1`+"\n")
		require.Contains(t, x.String(), `outbox_relay_rejected_total{outbox_relay_name="default",messaging_destination_name="_other",cloudevents_event_type="_other",error_type="policy_violation"} 2901`+"\n")
		require.Contains(t, x.String(), `outbox_relay_dead_total{outbox_relay_name="default",messaging_destination_name="orders",cloudevents_event_type="_other",error_type="policy_violation"} 2899`+"\n")

		time.Sleep(time.Hour)
		m.topics.Name("bad,77", false)
		time.Sleep(time.Minute)
		reject("later,", 1)
		x.Reset()
		m.write(&x, outbox.RelayHealth{})
		require.Contains(t, x.String(), `messaging_destination_name="later,0",cloudevents_event_type="type0"`)
		require.NotContains(t, x.String(), `"bad,7"`)
		require.Contains(t, x.String(), `"bad,77"`)
	})
}

// The state of relays, their breakers and outages are those of the leader's row, in a standby and after a lost lease,
// too. What no leader says is unknown. Names of outages are bounded.
func TestRelayMetricsOfTheLeader(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newRelayMetrics("")
		relays := []outbox.RelayStatus{
			{Name: "default", Holder: "there", Said: &outbox.RelayState{Works: true}},
			{Name: "gone"},
			{Name: "ill", Holder: "there", Said: &outbox.RelayState{Breaker: outbox.BreakerHalfOpen, Outages: []outbox.Outage{
				{What: "Kafka", Class: "unreachable", Since: time.Now().Add(-90 * time.Second)},
				{What: "PostgreSQL, for retries,", Class: "locked", Since: time.Now().Add(-time.Second)}}}},
		}
		m.look = func(context.Context) (seenRelays, error) { return seenRelays{relays: relays}, nil }
		scrape := func(name string) (series []string) {
			m.refresh(t.Context())
			var x exposition
			m.write(&x, outbox.RelayHealth{Breaker: outbox.BreakerOpen})
			promtool(t, x.String())
			for line := range strings.Lines(x.String()) {
				if rest, is := strings.CutPrefix(strings.TrimSpace(line), name+"{"); is && !strings.HasSuffix(rest, " 0") {
					series = append(series, strings.TrimPrefix(rest, "outbox_relay_name="))
				}
			}
			return series
		}
		require.Equal(t, []string{`"default",outbox_state="closed"} 1`, `"gone",outbox_state="unknown"} 1`, `"ill",outbox_state="half-open"} 1`}, scrape("outbox_relay_breaker_state"))
		require.Equal(t, []string{`"default",outbox_state="works"} 1`, `"gone",outbox_state="unknown"} 1`, `"ill",outbox_state="not_working"} 1`}, scrape("outbox_relay_state"))
		require.Equal(t, []string{`"ill",outbox_outage="Kafka",error_type="unreachable"} 90`, `"ill",outbox_outage="PostgreSQL, for retries",error_type="locked"} 1`}, scrape("outbox_outage_age_seconds"))
		relays = relays[:1]
		require.Empty(t, scrape("outbox_outage_age_seconds"))
		for i := range 3_000 {
			relays[0].Said.Outages = append(relays[0].Said.Outages, outbox.Outage{What: fmt.Sprint("topic ", i), Class: "no_leader", Since: time.Now().Add(-time.Duration(i+1) * time.Second)})
		}
		all := scrape("outbox_outage_age_seconds")
		require.LessOrEqual(t, len(all), maxOwners+1)
		require.Contains(t, all, `"_other",outbox_outage="_other",error_type="_other"} 3000`)
	})
}

// A real Prometheus scrapes the process, the relay's panels of the dashboard show something, and its rules
// work.
func TestRelayMetricsInPrometheus(t *testing.T) {
	testenv.Long(t)
	// Not parallel: Prometheus scrapes every second, and rates are of the last seconds.
	prometheus := needProgram(t, "prometheus")
	d := newShop(t).withKafka(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 1, "max.message.bytes", "2000")
	p := d.startRelay(t, "OUTBOX_MAX_RETRIES=1")
	s := startPrometheus(t, prometheus, p.address())
	d.recordLarge(t, "large", 10_000)
	const trace = "0af7651916cd43dd8448eb211c80319c"
	ctx := outbox.WithTraceParent(background, "00-"+trace+"-b7ad6b7169203331-01")
	for n := range 5 {
		require.NoError(t, pgx.BeginFunc(ctx, d.db, func(tx pgx.Tx) error {
			return d.rec.Record(ctx, tx, happened{Key: fmt.Sprint(n), At: time.Now()})
		}))
	}
	s.eventually(func() bool { return s.value(`outbox_relay_dead_total`) == 1 }, "no dead event")
	s.eventually(func() bool {
		return s.value(`messaging_client_sent_messages_total{error_type="", outbox_retry="false"}`) == 5
	}, "not sent")
	median := s.value(`histogram_quantile(0.5, outbox_relay_publish_latency_seconds_bucket{outbox_relay_name="default"})`)
	require.Greater(t, median, 0.0)
	require.Less(t, median, testenv.Patience.Seconds())
	_, metrics := get(t, p.address(), "/metrics", nil)
	promtool(t, metrics)
	for _, name := range []string{"outbox_relay_publish_latency_seconds", "outbox_relay_batch_size", "messaging_client_operation_duration_seconds"} {
		s.eventually(func() bool { return slices.Contains(s.exemplars(name+"_bucket"), trace) }, "no exemplar of %s", name)
	}

	shown := 0
	for title, expr := range relayPanels(t) {
		if strings.Contains(expr, "outbox_relay_removed_total") { // nothing is old enough to be removed
			continue
		}
		shown++
		s.eventually(func() bool { return len(s.query(expr)) > 0 }, "%s shows nothing: %s", title, expr)
	}
	require.GreaterOrEqual(t, shown, 20)
	s.eventually(func() bool {
		return len(s.query(`ALERTS{alertname="OutboxDeadEvents", outbox_relay_name="default"}`)) == 1
	}, "no alert")
	require.Empty(t, s.query(`ALERTS{alertname!="OutboxDeadEvents"}`))
	code, _ := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
}

// recordLarge records an event that does not become smaller by compression.
func (d *commandFixture) recordLarge(t testing.TB, key string, size int) {
	t.Helper()
	filler := make([]byte, size/2)
	for i := range filler {
		filler[i] = byte(rand.Uint32())
	}
	require.NoError(t, pgx.BeginFunc(background, d.db, func(tx pgx.Tx) error {
		return d.rec.Record(background, tx, happened{Key: key, Filler: hex.EncodeToString(filler), At: time.Now()})
	}))
}

// relayMetric are the metrics of the dashboard that a relay process has.
var relayMetric = regexp.MustCompile(`outbox_relay_[a-z_]+\{|outbox_stale[a-z_]*\{|outbox_watch_up\{|messaging_client_(sent_messages|operation_duration)[a-z_]*\{`)

// relayPanels returns the queries of the panels about relays.
func relayPanels(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../../deploy/outbox-monitoring/files/dashboard.json")
	require.NoError(t, err)
	var dashboard struct {
		Panels []struct {
			Title   string
			Targets []struct{ RefID, Expr string }
		}
	}
	require.NoError(t, json.Unmarshal(text, &dashboard))
	queries := map[string]string{}
	variables := strings.NewReplacer("$job", ".*", "$relay", ".*", "$__rate_interval", "1m")
	for _, panel := range dashboard.Panels {
		for _, target := range panel.Targets {
			if relayMetric.MatchString(target.Expr) {
				queries[panel.Title+" "+target.RefID] = variables.Replace(target.Expr)
			}
		}
	}
	return queries
}

// scraper is a Prometheus that scrapes a process every second, with the rules of the runbooks.
type scraper struct {
	t   *testing.T
	url string
}

func startPrometheus(t *testing.T, program, target string) *scraper {
	t.Helper()
	dir := t.TempDir()
	rules, err := filepath.Abs("../../deploy/outbox-monitoring/files/alerts.yml")
	require.NoError(t, err)
	config := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\n"+
		"scrape_configs: [{job_name: relay, static_configs: [{targets: [%q]}]}]\n", rules, target)
	file := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String()
	require.NoError(t, free.Close())
	cmd := exec.Command(program, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address,
		"--enable-feature=exemplar-storage")
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it has nothing to save
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	return &scraper{t, "http://" + address}
}

// sampled is a sample in the result of a query.
type sampled struct {
	Metric map[string]string `json:"metric"`
	Value  [2]any            `json:"value"`
}

// query returns the samples of an expression; none while Prometheus is not there yet.
func (s *scraper) query(expr string) []sampled {
	var data struct{ Result []sampled }
	s.get("/api/v1/query?query="+url.QueryEscape(expr), &data)
	return data.Result
}

// exemplars returns the trace ids of the exemplars of an expression.
func (s *scraper) exemplars(expr string) (traces []string) {
	var data []struct {
		Exemplars []struct{ Labels map[string]string }
	}
	s.get(fmt.Sprintf("/api/v1/query_exemplars?start=%d&end=%d&query=%s", time.Now().Add(-time.Hour).Unix(), time.Now().Add(time.Hour).Unix(), url.QueryEscape(expr)), &data)
	for _, series := range data {
		for _, e := range series.Exemplars {
			traces = append(traces, e.Labels["trace_id"])
		}
	}
	return traces
}

// get reads an answer, which is empty while Prometheus is not there yet.
func (s *scraper) get(path string, data any) {
	response, err := http.Get(s.url + path)
	if err != nil {
		return
	}
	defer response.Body.Close()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if json.NewDecoder(response.Body).Decode(&answer) != nil {
		return
	}
	require.Equal(s.t, "success", answer.Status, "%s: %s", path, answer.Error)
	require.NoError(s.t, json.Unmarshal(answer.Data, data))
}

// value returns the only sample of an expression, or -1 if there is none.
func (s *scraper) value(expr string) float64 {
	samples := s.query(expr)
	if len(samples) == 0 {
		return -1
	}
	require.Len(s.t, samples, 1, expr)
	value, err := strconv.ParseFloat(samples[0].Value[1].(string), 64)
	require.NoError(s.t, err)
	return value
}

func (s *scraper) eventually(met func() bool, msg string, args ...any) {
	s.t.Helper()
	require.Eventuallyf(s.t, met, testenv.Patience, 100*time.Millisecond, msg, args...)
}
