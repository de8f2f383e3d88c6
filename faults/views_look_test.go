package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	said "github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/tables"
)

const (
	pathReady   = "/readyz"
	pathHealth  = "/healthz"
	pathMetrics = "/metrics"
)

// The views.
const (
	viewHealth  = "health"
	viewReady   = "readiness"
	viewMetrics = "metrics"
	viewRows    = "rows"
	viewStatus  = "outbox status"
	viewAPI     = "API"
	viewPage    = "page"
	viewAlerts  = "alerts"
)

// viewer looks at one view of one process.
type viewer struct {
	view string
	of   string // the process, if the view is of one
	look func(context.Context) ([]claim, error)
}

// lookPatience bounds a look: what takes longer says nothing.
const lookPatience = 5 * time.Second

// saidOutage is what a process says of an outage, in each document in which it does.
type saidOutage struct {
	What  string    `json:"what"`
	Class string    `json:"class"`
	Since time.Time `json:"since"`
	Err   string    `json:"error"`
}

// claimsOf returns what the state of a process says.
func claimsOf(base claim, works bool, outages []saidOutage, breakers []saidBreaker) []claim {
	say := func(says, what, class string, since time.Time) claim {
		c := base
		c.says, c.what, c.class, c.since = says, what, class, since
		return c
	}
	all := []claim{say(map[bool]string{true: saysWorks, false: saysFails}[works], "", "", time.Time{})}
	for _, o := range outages {
		c := say(saysOutage, o.What, o.Class, o.Since)
		c.why = o.Err
		all = append(all, c)
	}
	for _, b := range breakers {
		if b.State != "" && b.State != outbox.BreakerClosed.String() {
			all = append(all, say(saysBreaker, cmpOr(b.Action, roleLeader), "", time.Time{}))
		}
	}
	return all
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// saidBreaker is a breaker of a state.
type saidBreaker struct {
	Action string `json:"action"`
	State  string `json:"state"`
}

// processHealth is the document of GET /healthz.
type processHealth struct {
	Relays    []partHealth `json:"relays"`
	Consumers []partHealth `json:"consumers"`
	Workers   []partHealth `json:"workers"`
}

type partHealth struct {
	Relay   string       `json:"relay"`
	Group   string       `json:"group"`
	Works   bool         `json:"works"`
	Ready   bool         `json:"ready"`
	Leading bool         `json:"leading"`
	Breaker string       `json:"breaker"`
	Outages []saidOutage `json:"outages"`
	Reasons []string     `json:"reasons"`
}

// each calls do with each part and its role.
func (h processHealth) each(do func(part partHealth, role, of string)) {
	for _, p := range h.Relays {
		do(p, map[bool]string{true: roleLeader, false: roleStandby}[p.Leading], "relay "+p.Relay)
	}
	for _, p := range h.Consumers {
		do(p, roleConsumer, "consumer "+p.Group)
	}
	for _, p := range h.Workers {
		do(p, roleWorker, "worker "+p.Group)
	}
}

// lookAtHealth reads GET /healthz of a process.
func lookAtHealth(process string, address func() string) viewer {
	return viewer{viewHealth, process, func(ctx context.Context) (all []claim, err error) {
		var h processHealth
		if _, err := getJSON(ctx, address(), pathHealth, &h); err != nil {
			return nil, err
		}
		h.each(func(p partHealth, role, of string) {
			all = append(all, claimsOf(claim{of: of + " in " + process, role: role, process: process}, p.Works, p.Outages, []saidBreaker{{State: p.Breaker}})...)
		})
		return all, nil
	}}
}

// lookAtReadiness reads GET /readyz of a process.
func lookAtReadiness(process string, address func() string) viewer {
	return viewer{viewReady, process, func(ctx context.Context) (all []claim, err error) {
		var h processHealth
		status, err := getJSON(ctx, address(), pathReady, &h)
		if err != nil {
			return nil, err
		}
		allReady := true
		h.each(func(p partHealth, role, of string) {
			allReady = allReady && p.Ready
			c := claim{of: of + " in " + process, role: role, process: process, says: saysReady}
			if !p.Ready {
				c.says, c.why = saysUnready, strings.Join(p.Reasons, "; ")
			}
			all = append(all, c)
		})
		if (status == http.StatusOK) != allReady && process == viewsService { // a relay's own process asks for more
			return nil, fmt.Errorf("status %d of parts that are ready: %v", status, allReady)
		}
		return all, nil
	}}
}

// get returns the status and the body of a page.
func get(ctx context.Context, address, path string) (int, []byte, error) {
	if address == "" {
		return 0, nil, errors.New("the process has no address yet")
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+path, http.NoBody)
	if err != nil {
		return 0, nil, err
	}
	request.Close = true
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, body, err
}

func getJSON(ctx context.Context, address, path string, into any) (int, error) {
	status, body, err := get(ctx, address, path)
	if err != nil {
		return 0, err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return status, fmt.Errorf("%s: %w: %.200s", path, err, body)
	}
	return status, nil
}

// metricLine is a sample in the text format of Prometheus.
var metricLine = regexp.MustCompile(`^([a-z_]+)\{([^}]*)\} ([-+0-9.eE]+)$`)

var metricLabel = regexp.MustCompile(`([a-z_]+)="([^"]*)"`)

// lookAtMetrics reads /metrics of a relay process: the state of the process itself, and what the database has of all.
func lookAtMetrics(process string, address func() string) viewer {
	return viewer{viewMetrics, process, func(ctx context.Context) ([]claim, error) {
		status, body, err := get(ctx, address(), pathMetrics)
		if err != nil || status != http.StatusOK {
			return nil, errors.Join(err, fmt.Errorf("status %d", status))
		}
		return metricClaims(process, string(body)), nil
	}}
}

// ofRow returns a claim of a metric about the leader of a relay, by its row.
func ofRow(labels map[string]string) claim {
	c := rowClaim(roleLeader, labels["outbox_relay_name"])
	c.lag += metricsRead
	return c
}

// metricClaims returns what metrics say.
func metricClaims(process, text string) (all []claim) {
	leads := strings.Contains(text, "\noutbox_relay_leader{"+`outbox_relay_name="default"} 1`)
	own := claim{of: "relay default in " + process, role: map[bool]string{true: roleLeader, false: roleStandby}[leads], process: process}
	for line := range strings.Lines(text) {
		sample := metricLine.FindStringSubmatch(strings.TrimSpace(line))
		if sample == nil {
			continue
		}
		labels := map[string]string{}
		for _, l := range metricLabel.FindAllStringSubmatch(sample[2], -1) {
			labels[l[1]] = l[2]
		}
		value, _ := strconv.ParseFloat(sample[3], 64) // the expression has matched
		switch sample[1] {
		case "outbox_relay_works":
			all = append(all, claimsOf(own, value == 1, nil, nil)...)
		case "outbox_relay_ready":
			c := own
			c.says = map[bool]string{true: saysReady, false: saysUnready}[value == 1]
			all = append(all, c)
		case "outbox_relay_state":
			if state := labels["outbox_state"]; value == 1 && state != "unknown" {
				all = append(all, claimsOf(ofRow(labels), state == "works", nil, nil)[:1]...)
			}
		case "outbox_relay_breaker_state":
			if state := labels["outbox_state"]; value == 1 && state != "closed" && state != "unknown" {
				all = append(all, claimsOf(ofRow(labels), false, nil, []saidBreaker{{State: state}})[1:]...)
			}
		case "outbox_outage_age_seconds":
			all = append(all, claimsOf(ofRow(labels), false, []saidOutage{{What: labels["outbox_outage"], Class: labels["error_type"]}}, nil)[1:]...)
		}
	}
	return all
}

// rowClaim returns a claim by what a process has written into its row.
func rowClaim(role, name string) claim {
	of, trusted := "relay ", viewsLease
	switch role {
	case roleConsumer:
		of, trusted = "consumer ", consumerTrusted
	case roleWorker:
		of, trusted = "worker ", workerTrusted
	}
	return claim{of: of + name, role: role, lag: newsWritten, trusted: trusted}
}

func groupRole(fromKafka bool) string {
	return map[bool]string{true: roleConsumer, false: roleWorker}[fromKafka]
}

// stateClaims returns what a state in a row says.
func stateClaims(base claim, works bool, s said.State) []claim {
	var outages []saidOutage
	for _, o := range s.Outages {
		outages = append(outages, saidOutage{o.What, o.Class, o.Since, o.Err})
	}
	var breakers []saidBreaker
	for _, b := range s.Breakers {
		breakers = append(breakers, saidBreaker{b.Action, b.State})
	}
	return claimsOf(base, works, outages, breakers)
}

const sqlViewLeases = `
SELECT name, state, expires_at > clock_timestamp() AND state ->> 'epoch' = epoch::text AND holder NOT IN ('outbox cut', 'outbox debezium')
  FROM outbox_lease WHERE name NOT LIKE '%:%'`

const sqlViewMembers = `
SELECT m.consumer_group, m.from_kafka, m.works, m.state FROM event_member AS m WHERE ` + tables.LiveMember

// lookAtRows reads what processes have written down, by the rules by which all views trust it.
func lookAtRows(db *pgxpool.Pool) viewer {
	return viewer{viewRows, "", func(ctx context.Context) (all []claim, err error) {
		rows, err := db.Query(ctx, sqlViewLeases)
		if err != nil {
			return nil, err
		}
		var name string
		var state said.State
		var trusted *bool
		if _, err := pgx.ForEachRow(rows, []any{&name, &state, &trusted}, func() error {
			if trusted != nil && *trusted {
				all = append(all, stateClaims(rowClaim(roleLeader, name), state.Works, state)...)
			}
			state = said.State{}
			return nil
		}); err != nil {
			return nil, err
		}
		if rows, err = db.Query(ctx, sqlViewMembers); err != nil {
			return nil, err
		}
		var fromKafka, works bool
		_, err = pgx.ForEachRow(rows, []any{&name, &fromKafka, &works, &state}, func() error {
			all = append(all, stateClaims(rowClaim(groupRole(fromKafka), name), works, state)...)
			state = said.State{}
			return nil
		})
		return all, err
	}}
}

// relayDocument is what `outbox status --json` and the API say of a relay. State is null where it is not known.
type relayDocument struct {
	Name  string         `json:"name"`
	State *stateDocument `json:"state"`
}

type stateDocument struct {
	Works    bool          `json:"works"`
	Breaker  string        `json:"breaker"`
	Breakers []saidBreaker `json:"breakers"`
	Outages  []saidOutage  `json:"outages"`
}

// memberDocument is what they say of a member of a group. Works is null where it is not known.
type memberDocument struct {
	Group    string        `json:"group"`
	Kind     string        `json:"kind"` // in the API
	As       string        `json:"as"`   // of outbox status
	Works    *bool         `json:"works"`
	Breakers []saidBreaker `json:"breakers"`
	Outages  []saidOutage  `json:"outages"`
}

func (m memberDocument) claims() []claim {
	if m.Works == nil {
		return nil
	}
	return claimsOf(rowClaim(groupRole(m.Kind+m.As == roleConsumer), m.Group), *m.Works, m.Outages, m.Breakers)
}

func (s *stateDocument) claims(base claim) []claim {
	if s == nil {
		return nil
	}
	return claimsOf(base, s.Works, s.Outages, append(s.Breakers, saidBreaker{State: s.Breaker}))
}

func relayClaims(relays []relayDocument) (all []claim) {
	for _, r := range relays {
		all = append(all, r.State.claims(rowClaim(roleLeader, r.Name))...)
	}
	return all
}

func memberClaims(members []memberDocument) (all []claim) {
	for _, m := range members {
		all = append(all, m.claims()...)
	}
	return all
}

// lookAtStatus runs `outbox status --json`.
func lookAtStatus(program, url string) viewer {
	return viewer{viewStatus, "", func(ctx context.Context) ([]claim, error) {
		cmd := exec.CommandContext(ctx, program, "status", "--json", "--timeout", lookPatience.String())
		cmd.Env = []string{"DATABASE_URL=" + url, "HOME=" + os.TempDir()}
		out, err := cmd.Output()
		if err != nil {
			return nil, err
		}
		return statusClaims(out)
	}}
}

func statusClaims(text []byte) ([]claim, error) {
	var document struct {
		Relays []relayDocument `json:"relays"`
		Groups []struct {
			Group   string           `json:"group"`
			Members []memberDocument `json:"members"`
		} `json:"groups"`
	}
	if err := json.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	all := relayClaims(document.Relays)
	for _, g := range document.Groups {
		for i := range g.Members {
			g.Members[i].Group = cmpOr(g.Members[i].Group, g.Group)
		}
		all = append(all, memberClaims(g.Members)...)
	}
	return all, nil
}

// ask asks the operators' page without a network.
func ask(ctx context.Context, page http.Handler, path string) ([]byte, error) {
	w := httptest.NewRecorder()
	page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, http.NoBody).WithContext(ctx))
	if w.Code != http.StatusOK {
		return nil, fmt.Errorf("%s: %d", path, w.Code)
	}
	return w.Body.Bytes(), nil
}

// lookAtAPI reads relays and members from the JSON API.
func lookAtAPI(page http.Handler) viewer {
	return viewer{viewAPI, "", func(ctx context.Context) ([]claim, error) {
		var relays struct {
			Relays []relayDocument `json:"relays"`
		}
		var groups struct {
			Members []memberDocument `json:"members"`
		}
		for path, into := range map[string]any{"/api/relays": &relays, "/api/consumers": &groups} {
			body, err := ask(ctx, page, path)
			if err != nil {
				return nil, err
			}
			if err := json.Unmarshal(body, into); err != nil {
				return nil, err
			}
		}
		return slices.Concat(relayClaims(relays.Relays), memberClaims(groups.Members)), nil
	}}
}

var (
	htmlTag    = regexp.MustCompile(`<[^>]*>`)
	htmlNotice = regexp.MustCompile(`(?s)<li class="notice[^"]*">(.*?)</li>`)
	// pageOutage is what a notice of the page says of an outage: "Relay default: Kafka has not answered since 12:03:04
	// UTC (no answer: …)".
	pageOutage = regexp.MustCompile(`\b(default|` + viewsReaders + `|` + viewsWorkers + `)\b.*?\b(PostgreSQL[^:]*?|Kafka|fetching|committing [^:]*?|(?:dead-letter )?topic \S+|partition \S+|the move of delayed events|renewing deliveries|renewing the row of this process) has (?:been failing|not answered)[^(]*\(([a-z_ ]+)`)
)

// lookAtPage reads the overview.
func lookAtPage(page http.Handler) viewer {
	return viewer{viewPage, "", func(ctx context.Context) ([]claim, error) {
		body, err := ask(ctx, page, "/")
		if err != nil {
			return nil, err
		}
		return pageClaims(string(body)), nil
	}}
}

// pageClaims returns what the overview says. A notice that names a class of an outage is a claim.
func pageClaims(text string) (all []claim) {
	if strings.Contains(text, "<strong>All is well</strong>") {
		all = append(all, claim{of: "page", role: rolePage, says: saysWell, lag: newsWritten, trusted: viewsLease})
	}
	roles := map[string]string{"default": roleLeader, viewsReaders: roleConsumer, viewsWorkers: roleWorker}
	for _, item := range htmlNotice.FindAllStringSubmatch(text, -1) {
		words := strings.Join(strings.Fields(html.UnescapeString(htmlTag.ReplaceAllString(item[1], " "))), " ")
		if m := pageOutage.FindStringSubmatch(words); m != nil {
			outages := []saidOutage{{What: m[2], Class: strings.ReplaceAll(strings.TrimSpace(m[3]), " ", "_")}}
			all = append(all, claimsOf(rowClaim(roles[m[1]], m[1]), false, outages, nil)[1:]...)
		}
	}
	return all
}

// alerted keeps the alerts that are not over.
type alerted struct {
	mu     sync.Mutex
	active map[outbox.AlertKind]bool
}

// Alert implements outbox.Alerter.
func (a *alerted) Alert(_ context.Context, alert outbox.Alert) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if alert.Kind == outbox.AlertBreaker || alert.Kind == outbox.AlertNoLeader {
		a.active[alert.Kind] = !alert.Over
	}
	return nil
}

// alertsInterval is the monitor's AlertConfig.Interval.
const alertsInterval = time.Second

// lookAtAlerts returns what the alerts say that are not over. While the monitor cannot read, nothing is known.
func lookAtAlerts(a *alerted, db *pgxpool.Pool) viewer {
	return viewer{viewAlerts, "", func(ctx context.Context) (all []claim, err error) {
		if err := db.Ping(ctx); err != nil {
			return nil, err
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		base := rowClaim(roleLeader, "default")
		base.lag += alertsInterval + outageTried // after an outage of PostgreSQL it pauses
		if a.active[outbox.AlertBreaker] {
			all = append(all, claimsOf(base, false, nil, []saidBreaker{{State: "open"}})[1:]...)
		}
		if a.active[outbox.AlertNoLeader] {
			base.says = saysFails
			all = append(all, base)
		}
		return all, nil
	}}
}

// What a process logs about an outage.
const (
	logFails     = "fails, trying until it works"
	logWorks     = "works again"
	logAbandoned = "has failed, and is not tried any more"
)

// logLine is a line of a process about an outage.
type logLine struct {
	at   time.Time
	what string
	of   string // the group or the part of the process
	says string
	text string
}

var logged = regexp.MustCompile(`^time=(\S+) level=WARN msg="outbox: (.*?) (` + logFails + `|` + logWorks + `|` + logAbandoned + `)\b[^"]*"(.*)$`)

var logOwner = regexp.MustCompile(` (?:group=\S+|of="[^"]*")`)

// outagesIn returns the lines of a log about outages.
func outagesIn(file string) (all []logLine, err error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		m := logged.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		at, err := time.Parse(time.RFC3339Nano, m[1])
		if err != nil {
			return nil, err
		}
		all = append(all, logLine{at, m[2], strings.Join(logOwner.FindAllString(m[4], -1), ""), m[3], lines.Text()})
	}
	return all, lines.Err()
}
