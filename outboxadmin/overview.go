package outboxadmin

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// span is a length of time that the plots can show.
type span struct {
	Name         string
	length, step time.Duration
}

var spans = []span{
	{"15m", 15 * time.Minute, 15 * time.Second},
	{"1h", time.Hour, time.Minute},
	{"6h", 6 * time.Hour, 5 * time.Minute},
	{"24h", 24 * time.Hour, 20 * time.Minute},
}

func (q *query) span() span {
	name := q.text("span")
	i := slices.IndexFunc(spans, func(s span) bool { return s.Name == name })
	if i < 0 && name != "" {
		q.fail("span", "is none of 15m, 1h, 6h and 24h")
	}
	return spans[max(i, 0)]
}

// overview is the first page.
type overview struct {
	Notices      []notice
	Relays       []relayView
	Counts       []outboxops.FailureCount
	OtherKinds   int // that are not among Counts
	Transactions []outboxops.OpenTransaction
	Partitions   []outboxops.TablePartition
	Groups       []groupRow
	OtherGroups  int  // lines that are not among Groups
	MoreGroups   bool // than were looked at
	Spans        []span
	Span         string
}

// notice is something that an operator should know.
type notice struct {
	Level  string // bad or warn
	Text   string
	Link   string // to what is to be done about it, from the root; or empty
	Action string // the words of the link
}

// relayView is a relay on the overview.
type relayView struct {
	outbox.RelayStatus
	Health *outbox.RelayHealth
	Plots  []plot
}

// maxKinds bounds the kinds of failures that are shown: events can be of any type.
const maxKinds = 200

// maxGroupRows bounds the topics of consumer groups that are shown: consumers can note any. What
// is paused is among the notices in any case.
const maxGroupRows = 200

// openFor is how long a transaction is open before it is shown.
const openFor = 10 * time.Second

func (a *admin) overview(r *request) (answer, error) {
	q := &r.query
	s := q.span()
	if err := q.done(); err != nil {
		return answer{}, err
	}
	ctx, now := r.Context(), time.Now()
	relays, err := a.relays(ctx, now)
	if err != nil {
		return answer{}, err
	}
	page := overview{Spans: spans, Span: s.Name}
	health := a.health()
	for _, status := range relays {
		view, err := a.relayView(ctx, status, health[status.Name], now, s)
		if err != nil {
			return answer{}, err
		}
		page.Relays = append(page.Relays, view)
	}
	if page.Counts, err = a.failed.Count(ctx, outboxops.FailureFilter{Kind: outboxops.KindEvent}); err != nil {
		return answer{}, err
	}
	page.OtherKinds = max(0, len(page.Counts)-maxKinds)
	page.Counts = page.Counts[:len(page.Counts)-page.OtherKinds]
	if page.Transactions, err = a.inspect.Transactions(ctx, openFor); err != nil {
		return answer{}, err
	}
	if page.Partitions, err = a.inspect.Partitions(ctx); err != nil {
		return answer{}, err
	}
	groups, more, err := a.consumers.List(ctx, outboxops.ConsumerFilter{})
	if err != nil {
		return answer{}, err
	}
	page.Groups, page.MoreGroups = groupRows(groups), more
	a.maskTransactions(page.Transactions)
	page.Notices = notices(now, page.Relays, page.Groups)
	page.OtherGroups = max(0, len(page.Groups)-maxGroupRows)
	page.Groups = page.Groups[:len(page.Groups)-page.OtherGroups]
	return a.page(r.Request, http.StatusOK, "overview", "Overview", page), nil
}

// relays reads the state of all relays, and adds a sample of it.
func (a *admin) relays(ctx context.Context, now time.Time) ([]outbox.RelayStatus, error) {
	relays, err := a.inspect.Relays(ctx)
	if err == nil {
		a.samples.add(now, relays)
	}
	return relays, err
}

// health returns what this process says of its relays, by name.
func (a *admin) health() map[string]*outbox.RelayHealth {
	reported := map[string]*outbox.RelayHealth{}
	if a.cfg.Health != nil {
		for _, h := range a.cfg.Health() {
			reported[h.Relay] = &h
		}
	}
	return reported
}

func (a *admin) relayView(ctx context.Context, status outbox.RelayStatus, health *outbox.RelayHealth, now time.Time, s span) (relayView, error) {
	progress, err := a.inspect.Progress(ctx, status.Name, now.Add(-s.length), s.step)
	if err != nil {
		return relayView{}, err
	}
	var rate, latency, backlog []point
	for _, p := range progress {
		rate = append(rate, point{p.At, float64(p.Events) / s.step.Seconds()})
		if p.Latency > 0 {
			latency = append(latency, point{p.At, float64(p.Latency.Microseconds()) / 1000})
		}
	}
	for _, waited := range a.samples.since(status.Name, now.Add(-s.length)) {
		backlog = append(backlog, point{waited.at, float64(waited.pending + waited.failed)})
	}
	scale := func(gap time.Duration, least float64, format func(float64) string) scale {
		return scale{from: now.Add(-s.length), to: now, gap: gap, least: least, format: format}
	}
	plots := []plot{
		newPlot("Throughput", rate, scale(s.step+s.step/2, 1, rateText)),
		newPlot("Latency", latency, scale(3*s.step, 10, millisText)),
		newPlot("Backlog", backlog, scale(sampleBreath, 10, countText)),
	}
	plots[2].From += ", known while a page is open"
	return relayView{RelayStatus: status, Health: health, Plots: plots}, nil
}

// An event that is pending for so long is worth a look: a relay takes less than a
// second.
const oldPending = 5 * time.Minute

// notices says what is wrong, the worst first.
func notices(now time.Time, relays []relayView, groups []groupRow) []notice {
	var bad, warn []notice
	add := func(list *[]notice, level, link, action, format string, args ...any) {
		*list = append(*list, notice{level, fmt.Sprintf(format, args...), link, action})
	}
	for _, r := range relays {
		failed := func(status string) string {
			return "failed?" + url.Values{"relay": {r.Name}, "status": {status}}.Encode()
		}
		if r.Holder == "" {
			add(&bad, "bad", "", "", "Relay %s: no process leads. Nothing of it is sent until a process takes the lease.", r.Name)
		}
		if r.Dead > 0 {
			add(&bad, "bad", failed(outbox.StatusDead), "Show", "Relay %s: %s, refused by Kafka too often.", r.Name, pluralUpTo(r.Dead, "event is dead", "events are dead"))
		}
		if !r.Oldest.IsZero() && now.Sub(r.Oldest) > oldPending {
			add(&bad, "bad", "", "", "Relay %s: it is behind. Its oldest pending event is %s old.", r.Name, short(now.Sub(r.Oldest)))
		}
		if r.HeldKeys > 0 {
			add(&warn, "warn", failed(statusAny), "Show", "Relay %s: %s for an operator.", r.Name, pluralUpTo(r.HeldKeys, "key waits", "keys wait"))
		}
		if n := min(r.Failed+r.Waiting, outbox.MaxCounted); n > 0 {
			add(&warn, "warn", failed(outbox.StatusFailed+","+outbox.StatusWaiting), "Show", "Relay %s: %s.", r.Name, pluralUpTo(n, "event is tried again by itself", "events are tried again by themselves"))
		}
		if r.Health != nil {
			for _, reason := range r.Health.Reasons {
				add(&bad, "bad", "", "", "Relay %s, in this process: %s.", r.Name, reason)
			}
		}
	}
	for _, g := range groups {
		if g.Pause != nil {
			add(&warn, "warn", "", "", "Consumer group %s: %s paused by %s %s: %s", g.Group, g.What(), g.Pause.Operator, relative(now, g.Pause.At), g.Pause.Reason)
		}
	}
	return append(bad, warn...)
}
