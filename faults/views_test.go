package faults

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// shortViewsRun is how long the short form of TestViews lasts.
const shortViewsRun = time.Minute

// Outages of servers, topics, logins and of what handlers need come and go, one or two at a time, and the leader is
// killed. Each second every view is read, and each claim that a view makes is compared with what is true: the health
// and the metrics of processes, what they have written into their rows, `outbox status`, the operators' page and its
// API, and the alerts. A claim is false if it was true at no moment within the last 2 s and what is documented for
// the view, see the constants in views_truth_test.go. That a view does not know is never false, but each view must
// have said that something works, and must have shown each kind of outage that it claims to show. The same holds for
// what processes log of outages.
func TestViews(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	v := viewsResult{Seed: seedOf(t)}
	lasts, times, kinds := shortViewsRun, shortViews, viewsKinds()
	if *faultMinutes > 0 {
		lasts, times = time.Duration(*faultMinutes*float64(time.Minute)), longViews
	} else {
		kinds = slices.DeleteFunc(kinds, func(k viewsKind) bool { return !slices.Contains(briefKinds, k.name) })
	}
	s := newViewsSite(t)
	s.start(t)
	events, err := viewsEvents(s.topic)
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	stopRecording := testenv.Run(t, func(ctx context.Context) error {
		s.record(ctx, rec, rand.New(rand.NewPCG(v.Seed, 1<<50)))
		return nil
	})
	s.awaitWorking(t)
	w := newViewsWatch(s)
	stopLooking := testenv.Run(t, w.run)
	v.Outages, v.Seconds = s.outages(t, viewsPlan(v.Seed, lasts, times, kinds), lasts)
	stopLooking()
	stopRecording()
	w.compare(t, &v)
	v.False += w.compareLogs(t)
	w.report(t)
	t.Logf("%s", v)
	require.Zero(t, v.False, "false claims")
	require.Empty(t, w.blind(kinds), "views that do not show what they claim to show")
}

// viewsResult is what TestViews prints in the end.
type viewsResult struct {
	Seed    uint64  `json:"seed"`
	Seconds float64 `json:"seconds"`
	Outages int     `json:"outages"`
	Looks   int     `json:"looks"`
	// False counts claims that were false, each once for as long as its view made it.
	False int `json:"false"`
	// LongestFalse is for how long a view said something false: from its first such look to its last one, in ms.
	LongestFalse int64 `json:"longest_false_ms"`
}

// String returns the result as one line of JSON.
func (v viewsResult) String() string { return lineOf(v) }

// awaitWorking waits until all processes say that they work.
func (s *viewsSite) awaitWorking(t *testing.T) {
	t.Helper()
	last := ""
	require.True(t, s.await(t, 2*testenv.Patience, func() bool {
		works := 0
		for _, p := range []*viewsProcess{s.relays["relay 1"], s.relays["relay 2"], s.service} {
			ctx, cancel := context.WithTimeout(s.ctx, lookPatience)
			all, err := lookAtHealth(p.name, p.address).look(ctx)
			cancel()
			last = fmt.Sprint(p.name, ": ", all, err)
			if err == nil && !slices.ContainsFunc(all, func(c claim) bool { return c.says != saysWorks }) {
				works++
			}
		}
		return works == 3
	}), "%s", last)
}

// outages has the outages of a plan happen, and returns how many there were.
func (s *viewsSite) outages(t *testing.T, steps []viewsStep, lasts time.Duration) (n int, seconds float64) {
	t.Helper()
	began := time.Now()
	var begun []viewsStep
	end := func(due func(viewsStep) bool) {
		begun = slices.DeleteFunc(begun, func(p viewsStep) bool {
			if due(p) {
				s.end(p.fact, func() { p.end(s, t) })
				t.Logf("%5.1f s, %s: %s is over", time.Since(began).Seconds(), time.Now().UTC().Format(viewsClock), p.name)
				return true
			}
			return false
		})
	}
	for time.Since(began) < lasts || len(begun) > 0 {
		end(func(p viewsStep) bool { return time.Now().After(p.until) })
		for len(steps) > 0 && time.Since(began) >= steps[0].at {
			p := steps[0]
			steps = steps[1:]
			if slices.ContainsFunc(begun, func(other viewsStep) bool { return !p.mayOverlap(other.viewsKind) }) {
				continue
			}
			t.Logf("%5.1f s, %s: %s for %v (%d events)", time.Since(began).Seconds(), time.Now().UTC().Format(viewsClock), p.name, p.lasts.Round(time.Millisecond), s.recorded.Load())
			p.fact = s.begin(p.name, p.effects, func() { p.begin(s, t) })
			p.until = time.Now().Add(p.lasts)
			begun = append(begun, p)
			n++
		}
		s.sleep(t, 20*time.Millisecond)
	}
	return n, time.Since(began).Seconds()
}

// viewsWatch looks at all views each second.
type viewsWatch struct {
	site    *viewsSite
	viewers []viewer

	mu     sync.Mutex
	claims []claim
	looks  map[string]int // by view
	errs   map[string]int
	lastly map[string]string // the last error

	late map[string]map[string]lateness // by view and by what it says: the latest true claim
	seen map[string]map[string]bool     // by view: kinds of outages that it has shown
}

func newViewsWatch(s *viewsSite) *viewsWatch {
	return &viewsWatch{site: s, viewers: s.viewers(), looks: map[string]int{}, errs: map[string]int{}, lastly: map[string]string{},
		late: map[string]map[string]lateness{}, seen: map[string]map[string]bool{}}
}

// run looks until ctx ends. A view that has not answered is not asked again meanwhile.
func (w *viewsWatch) run(ctx context.Context) error {
	var views sync.WaitGroup
	for _, v := range w.viewers {
		views.Go(func() {
			each := time.NewTicker(time.Second)
			defer each.Stop()
			for ctx.Err() == nil {
				w.look(ctx, v)
				select {
				case <-each.C:
				case <-ctx.Done():
				}
			}
		})
	}
	views.Wait()
	return nil
}

func (w *viewsWatch) look(ctx context.Context, v viewer) {
	ctx, cancel := context.WithTimeout(ctx, lookPatience)
	defer cancel()
	asked := time.Now()
	all, err := v.look(ctx)
	got := time.Now()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.looks[v.view]++
	if err != nil { // it does not know
		w.errs[v.view]++
		w.lastly[v.view] = err.Error()
		return
	}
	for _, c := range all {
		c.view, c.asked, c.got = v.view, asked, got
		w.claims = append(w.claims, c)
	}
}

// episode is a false claim for as long as its view made it.
type episode struct {
	claim    claim
	lateness lateness
	times    int
	last     time.Time
}

// compare compares all claims with what has happened, and logs those that are false.
func (w *viewsWatch) compare(t *testing.T, v *viewsResult) {
	t.Helper()
	for _, n := range w.looks {
		v.Looks += n
	}
	var wrong []*episode
	current := map[string]*episode{}
	for _, c := range w.claims {
		late := w.site.compare(c)
		key := c.kind()
		if !late.wrong() {
			w.note(c, late)
			continue
		}
		e := current[key]
		if e == nil || c.asked.Sub(e.last) > 5*time.Second {
			e = &episode{claim: c, lateness: late}
			current[key], wrong = e, append(wrong, e)
		}
		e.times++
		e.last = c.got
		if late.excess() > e.lateness.excess() {
			e.lateness = late
		}
	}
	for _, e := range wrong {
		v.False++
		v.LongestFalse = max(v.LongestFalse, e.last.Sub(e.claim.asked).Milliseconds())
		t.Logf("FALSE: %s says %d times from %s to %s: %q; true: %s. Late %v, allowed %v (%s)", e.claim.view, e.times, e.claim.asked.UTC().Format(viewsClock),
			e.last.UTC().Format(viewsClock), e.claim, w.site.describe(e.claim.asked), e.lateness.late.Round(time.Millisecond), e.lateness.allowed, e.lateness.by)
	}
}

// note remembers a claim that is true.
func (w *viewsWatch) note(c claim, v lateness) {
	if w.late[c.view] == nil {
		w.late[c.view], w.seen[c.view] = map[string]lateness{}, map[string]bool{}
	}
	about := c.role + " " + c.says
	if best, has := w.late[c.view][about]; !has || v.late > best.late {
		w.late[c.view][about] = v
	}
	if c.says == saysOutage || c.says == saysBreaker {
		w.seen[c.view][v.by] = true
	}
}

// report logs what each view said, and how late that was at most.
func (w *viewsWatch) report(t *testing.T) {
	t.Helper()
	for _, view := range slices.Sorted(maps.Keys(w.looks)) {
		t.Logf("%s: %d looks, %d without an answer (%.200s)", view, w.looks[view], w.errs[view], w.lastly[view])
		for _, says := range slices.Sorted(maps.Keys(w.late[view])) {
			v := w.late[view][says]
			t.Logf("  %s: at most %.1f s late, of %.1f s allowed (%s)", says, v.late.Seconds(), v.allowed.Seconds(), v.by)
		}
		t.Logf("  shown: %s", strings.Join(slices.Sorted(maps.Keys(w.seen[view])), ", "))
	}
}

// shows are the kinds of outages that a view claims to show; those that make PostgreSQL fail are shown only by
// processes.
var shows = map[string][]string{
	viewHealth:  {kafkaCut, kafkaFrozen, kafkaLogin, oneTopic, onePart, postgresCut, postgresFrozen, postgresReadOnly, postgresFull},
	viewMetrics: {kafkaCut, kafkaFrozen, kafkaLogin},
	viewRows:    {kafkaCut, kafkaFrozen, kafkaLogin, oneTopic, onePart, dependencyGone},
	viewStatus:  {kafkaCut, kafkaFrozen, kafkaLogin, oneTopic, onePart, dependencyGone},
	viewAPI:     {kafkaCut, kafkaFrozen, kafkaLogin, oneTopic, onePart, dependencyGone},
	viewPage:    {kafkaCut, kafkaFrozen, kafkaLogin, oneTopic, onePart},
	viewAlerts:  {kafkaCut, kafkaFrozen, kafkaLogin},
}

// blind returns what views did not show: that something works, and kinds of outages of which one had lasted long
// enough.
func (w *viewsWatch) blind(kinds []viewsKind) (all []string) {
	for view, shown := range shows {
		if view != viewAlerts && view != viewPage && w.looks[view] > 0 && !slices.ContainsFunc(slices.Collect(maps.Keys(w.late[view])), func(says string) bool { return strings.HasSuffix(says, saysWorks) }) {
			all = append(all, view+" never says that something works")
		}
		for _, k := range kinds {
			if slices.Contains(shown, k.name) && w.lastedFor(k.name) > w.enough(k, view) && !w.seen[view][k.name] {
				all = append(all, view+" has not shown: "+k.name)
			}
		}
	}
	slices.Sort(all)
	return all
}

// lastedFor returns how long the longest outage of a kind lasted.
func (w *viewsWatch) lastedFor(kind string) (longest time.Duration) {
	for _, f := range w.site.facts {
		if f.kind == kind {
			longest = max(longest, f.ends.Sub(f.began))
		}
	}
	return longest
}

// enough returns how long an outage must last so that a view shows it.
func (w *viewsWatch) enough(k viewsKind, view string) time.Duration {
	soonest := time.Hour
	for _, e := range k.effects {
		if e.what != nil || e.breaker != "" {
			soonest = min(soonest, e.sees)
		}
	}
	soonest += viewsSlack + newsWritten + lookPatience/2
	if view == viewAlerts {
		soonest += alertsInterval
	}
	return soonest
}

// compareLogs compares what processes have logged of outages with what has happened. It returns how many lines are
// false.
func (w *viewsWatch) compareLogs(t *testing.T) (wrong int) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(w.site.dir, "*.log"))
	require.NoError(t, err)
	for _, file := range files {
		lines, err := outagesIn(file)
		require.NoError(t, err)
		failing := map[string]logLine{}
		before := map[string]logLine{}
		for _, l := range lines {
			text := w.compareLine(l, failing, before)
			if text != "" {
				wrong++
				t.Logf("FALSE: the log of %s: %s; true: %s\n  %s", filepath.Base(file), text, w.site.describe(l.at), l.text)
			}
		}
	}
	return wrong
}

// logSlack is how long after the beginning of an outage an answer may be logged that came before it.
const logSlack = time.Second

// compareLine compares a line: what fails works again only after it was restored, and fails once in an outage.
func (w *viewsWatch) compareLine(l logLine, failing, before map[string]logLine) string {
	key := l.what + l.of
	_, fails := failing[key]
	about := func(f *fact) bool {
		return slices.ContainsFunc(f.effects, func(e effect) bool { return e.what != nil && e.what.MatchString(l.what) })
	}
	if l.says != logFails {
		delete(failing, key)
		if !fails {
			return l.says + ", and has not failed"
		}
	}
	switch l.says {
	case logAbandoned:
		delete(before, key) // who tries it next has not said anything of it
		return ""
	case logWorks:
		for _, f := range w.site.facts {
			if about(f) && f.began.Add(logSlack).Before(l.at) && f.ends.After(l.at) && w.site.reached(f, l.what) {
				return "works again, while that fails: " + f.kind
			}
		}
		return ""
	}
	if fails {
		return "fails twice without having worked"
	}
	earlier, has := before[key]
	failing[key], before[key] = l, l
	last := (*fact)(nil)
	for _, f := range w.site.facts {
		if about(f) && f.from.Add(-time.Millisecond).Before(l.at) && // a log has milliseconds
			(last == nil || f.from.After(last.from)) {
			last = f
		}
	}
	switch {
	case last == nil:
		return "fails, and nothing has failed"
	case has && earlier.at.After(last.from) && l.at.After(last.began.Add(logSlack)):
		return "fails for the second time in one outage"
	}
	return ""
}

// reached reports whether a name in the log is what an outage makes fail in each case: not that a topic works of
// which another one fails, and not that something of PostgreSQL reads while it cannot write.
func (h *truth) reached(f *fact, what string) bool {
	switch f.kind {
	case kafkaCut, kafkaFrozen, kafkaLogin, postgresCut, postgresFrozen:
		return true
	case oneTopic:
		return ofTopic.MatchString(what)
	case onePart:
		return ofPartition.MatchString(what)
	}
	return false
}
