package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// What users install.
const (
	dashboardFile = "../../deploy/outbox-monitoring/files/dashboard.json"
	alertRules    = "../../deploy/outbox-monitoring/files/alerts.yml"
)

// need skips under -short, and fails where a program is missing.
func need(t *testing.T, program string) string {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs Prometheus")
	}
	path, err := exec.LookPath(program)
	require.NoError(t, err, "this test needs Prometheus: tools/needs.sh test says how to install it")
	return path
}

// promtool takes the rules, and each alert fires when it should.
func TestAlerts(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	promtool := need(t, "promtool")
	for _, args := range [][]string{{"check", "config", "prometheus.yml"}, {"check", "rules", alertRules}, {"test", "rules", "alerts_test.yml"}} {
		out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput()
		require.NoError(t, err, "promtool %s:\n%s", strings.Join(args, " "), out)
	}
	rules, err := os.ReadFile(alertRules)
	require.NoError(t, err)
	tests, err := os.ReadFile("alerts_test.yml")
	require.NoError(t, err)
	runbooks, err := os.ReadFile("../../docs/runbooks.md")
	require.NoError(t, err)
	for _, alert := range regexp.MustCompile(`alert: (\w+)`).FindAllSubmatch(rules, -1) {
		section := strings.ToLower(string(alert[1]))
		require.Contains(t, string(rules), "runbook_url: https://github.com/outboxgo/outbox/blob/main/docs/runbooks.md#"+section+"\n")
		require.Contains(t, string(runbooks), "\n## "+string(alert[1])+"\n", "no runbook")
		require.Regexp(t, `alertname: `+string(alert[1])+`\n +exp_alerts:\n`, string(tests), "no test in which %s fires", alert[1])
	}
}

// server is a Prometheus that scrapes a service every second.
type server struct {
	t   *testing.T
	url string
	log bytes.Buffer // complete when it has ended
}

func startPrometheus(t *testing.T, target string) *server {
	t.Helper()
	program := need(t, "prometheus")
	dir := t.TempDir()
	rules, err := filepath.Abs(alertRules)
	require.NoError(t, err)
	config := fmt.Sprintf("global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [%q]\n"+
		"scrape_configs: [{job_name: orders, static_configs: [{targets: [%q]}]}]\n", rules, target)
	file := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(file, []byte(config), 0o600))

	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := free.Addr().String()
	require.NoError(t, free.Close())
	p := &server{t: t, url: "http://" + address}
	cmd := exec.Command(program, "--config.file="+file, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address,
		"--enable-feature=exemplar-storage")
	cmd.Stdout, cmd.Stderr = &p.log, &p.log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it has nothing to save
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(p.log.String())
		}
	})
	return p
}

// sample is one of what a query brings.
type sample struct {
	Metric map[string]string `json:"metric"`
	Value  [2]any            `json:"value"`
}

// get asks Prometheus, and reports whether it answers.
func (p *server) get(path string, data any) (answers bool) {
	response, err := http.Get(p.url + path)
	if err != nil {
		return false // it is not there yet
	}
	defer response.Body.Close()
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if json.NewDecoder(response.Body).Decode(&answer) != nil {
		return false
	}
	require.Equal(p.t, "success", answer.Status, "%s: %s", path, answer.Error)
	require.NoError(p.t, json.Unmarshal(answer.Data, data))
	return true
}

// query returns the samples of an expression.
func (p *server) query(expr string) (samples []sample) {
	var data struct{ Result []sample }
	p.get("/api/v1/query?query="+url.QueryEscape(expr), &data)
	return data.Result
}

// exemplars returns the trace ids of the exemplars of an expression.
func (p *server) exemplars(expr string) (traces []string) {
	var data []struct {
		Exemplars []struct {
			Labels struct {
				TraceID string `json:"trace_id"`
			}
		}
	}
	p.get(fmt.Sprintf("/api/v1/query_exemplars?start=%d&end=%d&query=%s", time.Now().Add(-time.Hour).Unix(), time.Now().Add(time.Hour).Unix(), url.QueryEscape(expr)), &data)
	for _, series := range data {
		for _, e := range series.Exemplars {
			traces = append(traces, e.Labels.TraceID)
		}
	}
	return traces
}

// value returns the only sample of an expression, or -1 if there is none.
func (p *server) value(expr string) float64 {
	samples := p.query(expr)
	if len(samples) == 0 {
		return -1
	}
	require.Len(p.t, samples, 1, expr)
	value, err := strconv.ParseFloat(samples[0].Value[1].(string), 64)
	require.NoError(p.t, err)
	return value
}

func (p *server) eventually(met func() bool, msg string, args ...any) {
	p.t.Helper()
	require.Eventuallyf(p.t, met, testenv.Patience, 100*time.Millisecond, msg, args...)
}

// A real Prometheus scrapes the service, understands every query of the dashboard, and
// fires the alert that is due.
func TestPrometheus(t *testing.T) {
	testenv.Long(t)
	// Not parallel: Prometheus scrapes every second, and rates are of the last seconds.
	r := startService(t)
	p := startPrometheus(t, r.listener.Addr().String())
	p.eventually(func() bool { return p.value(`sum(outbox_relay_led)`) == 1 }, "nobody leads")
	r.problem()
	r.awaitOutage()
	r.illMember()
	p.eventually(func() bool { return p.value(`max(outbox_relay_stored{outbox_status="dead"})`) == 1 }, "no dead event")
	require.Equal(t, 12.0, p.value(`sum(messaging_client_sent_messages_total{error_type=""})`))
	require.Equal(t, 1.0, p.value(`up{job="orders"}`))
	median := p.value(`histogram_quantile(0.5, sum by (le) (outbox_relay_publish_latency_seconds_bucket{outbox_relay_name="default"}))`)
	require.Greater(t, median, 0.0)
	require.Less(t, median, testenv.Patience.Seconds())

	require.NoError(t, r.tel.tracers.ForceFlush(t.Context()))
	traces := map[string]bool{}
	for _, span := range r.spans.GetSpans() {
		traces[span.SpanContext.TraceID().String()] = true
	}
	for _, name := range []string{"outbox_relay_publish_latency_seconds", "outbox_relay_batch_size", "messaging_client_operation_duration_seconds", "messaging_process_duration_seconds"} {
		p.eventually(func() bool { return len(p.exemplars(name+"_bucket")) > 0 }, "no exemplar of %s", name)
		for _, trace := range p.exemplars(name + "_bucket") {
			require.True(t, traces[trace], "%s leads to no span", name)
		}
	}

	for title, expr := range dashboardQueries(t) {
		p.eventually(func() bool {
			// Counters of what happened once were not there before, so they have no rate,
			// but that of 0 from the second scrape on.
			return len(p.query(expr)) > 0
		}, "%s shows nothing: %s", title, expr)
	}
	p.eventually(func() bool {
		return len(p.query(`ALERTS{alertname="OutboxDeadEvents", alertstate="firing", outbox_relay_name="default"}`)) == 1
	}, "no alert of a dead event")
	p.eventually(func() bool { return len(p.query(`ALERTS{alertname="OutboxDeadLetters"}`)) == 1 }, "no alert of dead letters")
	require.Empty(t, p.query(`ALERTS{alertname=~"OutboxManyDead|OutboxAbsent|OutboxBreakerOpen|OutboxOutage|OutboxActionBreakerOpen|OutboxStaleEvents|OutboxLostRecords|OutboxDeliveriesWait|OutboxWorkersBehind"}`))
	var rules struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	require.True(t, p.get("/api/v1/rules", &rules))
	require.Len(t, rules.Groups[0].Rules, 17)
	for _, rule := range rules.Groups[0].Rules {
		require.Equal(t, "ok", rule.Health, "%s: %s", rule.Name, rule.LastError)
	}
}

// dashboardQueries returns what the panels ask for, by panel and place, with the
// variables replaced as Grafana would.
func dashboardQueries(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
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
			queries[panel.Title+" "+target.RefID] = variables.Replace(target.Expr)
		}
	}
	require.Greater(t, len(queries), 25)
	return queries
}
