package outboxadmin

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/tables"
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
	OtherNotices int    // that are not among Notices
	Unknown      string // parts that could not be read, if no problem is known
	StaleAfter   time.Duration
	Unresolved   unresolved
	Counts       []outboxops.FailureCount // the first ones; failures that need an operator come first
	MoreCounts   []outboxops.FailureCount
	OtherKinds   int // that are not among both
	Groups       []groupState
	OtherGroups  int  // groups that are not among Groups
	MoreGroups   bool // not all groups were read
	Relays       []relayView
	Transactions []outboxops.OpenTransaction
	Partitions   []outboxops.TablePartition
	Current      string // name of the newest partition; or empty
	Bytes        int64  // of all partitions
	Spans        []span
	Span         string
}

// unresolved is the number of failed events and dead deliveries that are still unresolved.
type unresolved struct {
	Events, Deliveries int64
	More               bool
	Oldest             time.Time
}

// unresolvedOf adds up the unresolved failures, by the rule of the command outbox failures count.
func unresolvedOf(counts []outboxops.FailureCount) (sum unresolved) {
	for _, c := range counts {
		if !c.IsUnresolved() {
			continue
		}
		if c.Kind == outboxops.KindEvent {
			sum.Events += int64(c.Events)
		} else {
			sum.Deliveries += int64(c.Events)
		}
		sum.More = sum.More || c.More
		if sum.Oldest.IsZero() || c.Oldest.Before(sum.Oldest) {
			sum.Oldest = c.Oldest
		}
	}
	return sum
}

// relayView is a relay on the overview.
type relayView struct {
	outbox.RelayStatus
	State  relayState
	Health *outbox.RelayHealth
	Plots  []plot
}

// EndedTo is to what a cutover has handed over the events of the relay. It is empty if none has.
func (v relayView) EndedTo() string {
	to, _ := tables.HandedOver(v.Holder)
	return to
}

// HasEnded reports whether a cutover has ended one of the relays.
func (o overview) HasEnded() bool {
	return slices.ContainsFunc(o.Relays, func(v relayView) bool { return ended(v.RelayStatus) })
}

// maxKinds bounds the kinds of failures that are shown, because events can have any types. The first kinds
// are shown at once.
const (
	maxKinds   = 200
	firstKinds = 10
)

// maxGroupRows bounds the topics of consumer groups that are shown, because consumers can write any topics.
// Paused topics are always among the notices.
const maxGroupRows = 200

// maxGroupStates bounds the consumer groups on the overview, and maxNotices the notices.
const (
	maxGroupStates = 20
	maxNotices     = 200
)

// openFor is how long a transaction is open before it is shown.
const openFor = 10 * time.Second

func (a *admin) overview(r *request) (answer, error) {
	q := &r.query
	s := q.span()
	if err := q.done(); err != nil {
		return answer{}, err
	}
	ctx, now := r.Context(), a.now()
	state, err := a.situation(ctx, now)
	if err != nil {
		return answer{}, err
	}
	page := overview{Spans: spans, Span: s.Name, StaleAfter: a.cfg.StaleAfter, Unresolved: unresolvedOf(state.counts), MoreGroups: state.groups.more,
		Transactions: state.open, Unknown: unknown}
	page.Notices, page.OtherNotices = first(state.notices(), maxNotices)
	page.Counts, page.OtherKinds = first(byUrgency(state.counts), maxKinds)
	page.MoreCounts = page.Counts[min(firstKinds, len(page.Counts)):]
	page.Counts = page.Counts[:len(page.Counts)-len(page.MoreCounts)]
	page.Groups, page.OtherGroups = first(state.groups.all(), maxGroupStates)
	for _, status := range state.relays {
		view, err := a.relayView(ctx, status, state.health[status.Name], now, s)
		if err != nil {
			return answer{}, err
		}
		page.Relays = append(page.Relays, view)
	}
	if page.Partitions, err = a.inspect.Partitions(ctx); err != nil {
		return answer{}, err
	}
	for _, p := range page.Partitions {
		page.Bytes += p.Bytes
		if p.Current {
			page.Current = p.Name
		}
	}
	return a.page(r.Request, http.StatusOK, "overview", "Overview", page), nil
}

// first returns the first items of a list, and the number of the other items.
func first[A any](all []A, most int) (some []A, others int) {
	n := min(len(all), most)
	return all[:n], len(all) - n
}

// byUrgency sorts kinds of failures: first dead ones, then those that are tried again. Within each, the
// largest number comes first.
func byUrgency(counts []outboxops.FailureCount) []outboxops.FailureCount {
	order := []string{outbox.StatusDead, outbox.StatusFailed, outbox.StatusWaiting, outbox.StatusParked}
	slices.SortStableFunc(counts, func(a, b outboxops.FailureCount) int {
		return cmp.Compare(slices.Index(order, a.Status), slices.Index(order, b.Status))
	})
	return counts
}

// situation reads all problems, with the calls of the command line.
func (a *admin) situation(ctx context.Context, now time.Time) (s *situation, err error) {
	s = &situation{now: now, staleAfter: a.cfg.StaleAfter, health: a.health(), consumers: a.consumerHealth(), workers: a.workerHealth()}
	if s.relays, err = a.relays(ctx, now); err != nil {
		return s, err
	}
	if s.counts, err = a.failed.Count(ctx, outboxops.FailureFilter{}); err != nil {
		return s, err
	}
	if s.stale, err = a.inspect.Stale(ctx, a.cfg.StaleAfter); err != nil {
		return s, err
	}
	if s.groups, err = a.groupsView(ctx, false); err != nil {
		return s, err
	}
	if s.delayed, err = a.delayed.Status(ctx); err != nil {
		return s, err
	}
	if s.open, err = a.inspect.Transactions(ctx, openFor); err != nil {
		return s, err
	}
	a.maskTransactions(s.open)
	return s, nil
}

// unknown names the facts that no row has, so that silence about them is not taken for good news.
const unknown = "What leaders and members say of themselves is as old as their rows, and nothing is known of consumers without a database."

// relays reads the state of all relays, and adds it to the samples.
func (a *admin) relays(ctx context.Context, now time.Time) ([]outbox.RelayStatus, error) {
	relays, err := a.inspect.Relays(ctx)
	if err == nil {
		a.samples.addRelays(now, relays)
	}
	return relays, err
}

// health returns the health of this process's relays by name.
func (a *admin) health() map[string]*outbox.RelayHealth {
	reported := map[string]*outbox.RelayHealth{}
	if a.cfg.Health != nil {
		for _, h := range a.cfg.Health() {
			h.Outages = a.outagesAt(h.Outages)
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
	var backlog []point
	for _, waited := range a.samples.since(status.Name, now.Add(-s.length)) {
		backlog = append(backlog, point{waited.at, float64(waited.pending + waited.failed)})
	}
	plots := append(progressPlots("Throughput", "Latency", progress, now, s), sampledPlot("Backlog", backlog, now, s))
	return relayView{RelayStatus: status, State: relayStateOf(status, now), Health: health, Plots: plots}, nil
}

func (a *admin) apiOverview(r *request) (answer, error) {
	q := &r.query
	if err := q.done(); err != nil {
		return answer{}, err
	}
	now := a.now()
	s, err := a.situation(r.Context(), now)
	if err != nil {
		return answer{}, err
	}
	u := unresolvedOf(s.counts)
	return okJSON(apiOverview{
		At: now.UTC(), Notices: each(s.notices(), func(n notice) apiNotice { return apiNotice{n.Level, n.Text} }),
		Unresolved: apiUnresolved{u.Events, u.Deliveries, u.More, orNull(u.Oldest)}, StaleSeconds: a.cfg.StaleAfter.Seconds(), Stale: each(s.stale, staleOf),
	})
}
