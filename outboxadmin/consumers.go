package outboxadmin

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxops"
)

// groupsView is the same data about consumer groups that the command outbox consumers shows.
type groupsView struct {
	groups     []outboxops.ConsumerGroup
	more       bool // not all groups were read
	deliveries []outboxops.DeliveryCount
	workers    []outboxops.DeliveryGroup
	kafka      kafkaView
	membersView
}

// groupsView reads it. Only where withKafka is set it asks Kafka.
func (a *admin) groupsView(ctx context.Context, withKafka bool) (v groupsView, err error) {
	if v.groups, v.more, err = a.consumers.List(ctx, outboxops.ConsumerFilter{}); err != nil {
		return v, err
	}
	if v.deliveries, err = a.deliveries.Count(ctx, outboxops.DeliveryFilter{}); err != nil {
		return v, err
	}
	if v.workers, err = a.deliveries.Groups(ctx); err != nil {
		return v, err
	}
	if v.membersView, err = a.membersView(ctx); err != nil {
		return v, err
	}
	if v.kafka = a.kafka.last(); withKafka {
		v.kafka = a.kafka.look(ctx, v.groups)
	}
	v.kafka.At = a.at(v.kafka.At)
	a.sampleGroups(a.now(), v)
	return v, nil
}

// groupRow is a line of the table of consumer groups: a topic, or all of them.
type groupRow struct {
	Group string
	All   bool // of the group's topics
	Lag   *int64
	outboxops.ConsumerTopic
}

// groupRows returns a line for each topic of each group. If all topics are paused, a line for all topics
// comes first.
func groupRows(groups []outboxops.ConsumerGroup) (rows []groupRow) {
	for _, g := range groups {
		if g.Pause != nil {
			rows = append(rows, groupRow{Group: g.Group, All: true, ConsumerTopic: outboxops.ConsumerTopic{Pause: g.Pause}})
		}
		for _, t := range g.Topics {
			rows = append(rows, groupRow{Group: g.Group, ConsumerTopic: t})
		}
	}
	return rows
}

// What returns the subject of the line.
func (r groupRow) What() string {
	if r.All {
		return "all topics"
	}
	return r.Topic
}

// groupState is a consumer group in a line.
type groupState struct {
	Group      string
	Topics     int
	Paused     int  // topics
	AllPaused  bool // the whole group
	Lost       int64
	Lag        *int64 // nil if not known
	Dead, Held tally  // deliveries
	Owed       tally  // deliveries that wait or are with workers
	OldestOwed time.Time
	Workers    *outboxops.DeliveryGroup // nil for a group that has none
	By         map[string]tally         // events that are not handled, by status
	Oldest     time.Time                // when the first of them was recorded that is not dead
	Processes  int                      // that run
	Word       string                   // what they say of themselves; empty if there are none
}

// Waiting returns how many events wait that are not dead, by what the tables say.
func (g groupState) Waiting() tally {
	return g.By[statePending].Plus(g.By[outbox.StatusWaiting]).Plus(g.By[outbox.StatusFailed]).Plus(g.By[outbox.StatusParked])
}

// Missed returns how many offsets actions have missed.
func (g groupState) Missed() tally { return g.By[tables.StatusMissed] }

// needs is how urgently a group needs an operator, from 0 on.
func (g groupState) needs() int {
	switch {
	case g.Dead.N > 0:
		return 3
	case g.AllPaused || g.Paused > 0:
		return 2
	case g.Lost > 0:
		return 1
	}
	return 0
}

// all returns every group that has begun to read, is paused, has workers or is owed something. The
// groups that need an operator come first.
func (v groupsView) all() []groupState {
	var all []groupState
	of := func(name string) *groupState {
		i := slices.IndexFunc(all, func(g groupState) bool { return g.Group == name })
		if i < 0 {
			i, all = len(all), append(all, groupState{Group: name})
		}
		return &all[i]
	}
	for _, g := range v.groups {
		of(g.Group).addTopics(g, v.kafka)
	}
	for _, c := range v.deliveries {
		of(c.Group).addDeliveries(c)
	}
	for _, c := range v.Counts {
		s := of(c.Group)
		if s.By == nil {
			s.By = map[string]tally{}
		}
		s.By[c.Status] = s.By[c.Status].Plus(tallyOf(c.Events, c.More))
		if c.Status != outbox.StatusDead && (s.Oldest.IsZero() || c.Oldest.Before(s.Oldest)) {
			s.Oldest = c.Oldest
		}
	}
	for _, m := range v.Members {
		if s := of(m.Group); m.Live {
			s.Processes++
		}
	}
	for _, g := range v.Said() {
		s := of(g.Group)
		if s.Word = plain(g.Word); g.Live > 1 && g.Affected < g.Live {
			s.Word += fmt.Sprintf(" at %d of %d", g.Affected, g.Live)
		}
	}
	for i := range v.workers {
		of(v.workers[i].Group).Workers = &v.workers[i]
	}
	slices.SortStableFunc(all, func(a, b groupState) int {
		return cmp.Or(cmp.Compare(b.needs(), a.needs()), strings.Compare(a.Group, b.Group))
	})
	return all
}

func (g *groupState) addTopics(of outboxops.ConsumerGroup, kafka kafkaView) {
	g.Topics, g.AllPaused = len(of.Topics), of.Pause != nil
	for _, t := range of.Topics {
		g.Lost = max(g.Lost, g.Lost+t.Lost)
		if t.Pause != nil {
			g.Paused++
		}
		if n := kafka.of(of.Group, t.Topic); n != nil {
			sum := *n
			if g.Lag != nil {
				sum += *g.Lag
			}
			g.Lag = &sum
		}
	}
}

func (g *groupState) addDeliveries(c outboxops.DeliveryCount) {
	n := tallyOf(c.Deliveries, c.More)
	if c.Status == outboxops.DeliveryDead {
		g.Dead, g.Held = g.Dead.Plus(n), g.Held.Plus(heldOf(c))
		return
	}
	g.Owed = g.Owed.Plus(n)
	if g.OldestOwed.IsZero() || c.Oldest.Before(g.OldestOwed) {
		g.OldestOwed = c.Oldest
	}
}

// heldOf returns how many of the deliveries hold their keys, which only dead ones do.
func heldOf(c outboxops.DeliveryCount) tally {
	return tallyOf(c.Held, c.More && c.Status == outboxops.DeliveryDead)
}

// consumersPage is the page of consumer groups and their workers.
type consumersPage struct {
	Rows        []groupRow
	OtherRows   int  // lines that are not among Rows
	More        bool // not all groups were read
	Deliveries  []outboxops.DeliveryCount
	OtherCounts int
	Kafka       kafkaView
	Cards       []groupView
	States      []groupState // those without a card
	OtherStates int
	Spans       []span
	Span        string
	Done        string // the action that was done before
	Members     []memberRow
	Processes   []processRow
}

// processRow is a consumer or a worker of this process.
type processRow struct {
	Group, What string
	Live, Works bool
	Holds       string
	Reasons     []string
}

func (a *admin) consumersPage(r *request) (answer, error) {
	q := &r.query
	s, done := q.span(), q.doneText("done", "")
	if err := q.done(); err != nil {
		return answer{}, err
	}
	v, err := a.groupsView(r.Context(), true)
	if err != nil {
		return answer{}, err
	}
	page := consumersPage{Rows: groupRows(v.groups), More: v.more, Deliveries: v.deliveries, Kafka: v.kafka, Processes: a.processes(), Spans: spans, Span: s.Name, Done: done}
	all := v.all()
	cards := all[:min(len(all), maxGroupCards)]
	if page.Cards, err = a.groupViews(r.Context(), cards, v, a.now(), s); err != nil {
		return answer{}, err
	}
	page.States, page.OtherStates = first(all[len(cards):], maxGroupRows)
	page.Members, _ = first(memberRows(v.Members), maxGroupRows)
	slices.SortStableFunc(page.Rows, func(x, y groupRow) int { return cmp.Compare(isPaused(y), isPaused(x)) })
	page.OtherRows = max(0, len(page.Rows)-maxGroupRows)
	page.Rows = page.Rows[:len(page.Rows)-page.OtherRows]
	for i := range page.Rows {
		page.Rows[i].Lag = v.kafka.of(page.Rows[i].Group, page.Rows[i].Topic)
	}
	slices.SortStableFunc(page.Deliveries, func(x, y outboxops.DeliveryCount) int { return cmp.Compare(isDead(y), isDead(x)) })
	page.OtherCounts = max(0, len(page.Deliveries)-maxGroupRows)
	page.Deliveries = page.Deliveries[:len(page.Deliveries)-page.OtherCounts]
	return a.page(r.Request, http.StatusOK, "consumers", "Consumers", page), nil
}

func isPaused(r groupRow) int {
	if r.Pause != nil {
		return 1
	}
	return 0
}

func isDead(c outboxops.DeliveryCount) int {
	if c.Status == outboxops.DeliveryDead {
		return 1
	}
	return 0
}

// processes are the consumers and workers of this process.
func (a *admin) processes() (rows []processRow) {
	consumers, workers := a.consumerHealth(), a.workerHealth()
	for _, h := range consumers {
		rows = append(rows, processRow{h.Group, "consumer", h.Live, h.Works, plural(int64(h.Partitions), "partition", "partitions"), h.Reasons})
	}
	for _, h := range workers {
		rows = append(rows, processRow{h.Group, "worker", h.Live, h.Works, plural(int64(h.Deliveries), "delivery", "deliveries"), h.Reasons})
	}
	return rows
}

func (a *admin) consumerHealth() []outbox.ConsumerHealth {
	if a.cfg.Consumers == nil {
		return nil
	}
	all := slices.Clone(a.cfg.Consumers())
	for i := range all {
		all[i].Outages = a.outagesAt(all[i].Outages)
	}
	return all
}

func (a *admin) workerHealth() []outbox.WorkerHealth {
	if a.cfg.Workers == nil {
		return nil
	}
	all := slices.Clone(a.cfg.Workers())
	for i := range all {
		all[i].Outages = a.outagesAt(all[i].Outages)
	}
	return all
}

func (a *admin) apiConsumers(r *request) (answer, error) {
	q := &r.query
	if err := q.done(); err != nil {
		return answer{}, err
	}
	v, err := a.groupsView(r.Context(), true)
	if err != nil {
		return answer{}, err
	}
	return okJSON(apiGroupList{
		Groups: each(v.groups, func(g outboxops.ConsumerGroup) apiGroup { return groupOf(g, v.kafka) }), More: v.more,
		Deliveries: each(v.deliveries, deliveryCountOf), Workers: each(v.workers, workersOf),
		Waiting: each(v.Counts, waitingOf), Members: each(v.Members, memberOf),
		LagAt: orNull(v.kafka.At), LagError: v.kafka.Err,
		DeadLetters: each(v.kafka.DeadLetters, func(d outboxops.DeadLetterTopic) apiDeadLetters { return apiDeadLetters{d.Topic, d.Of, d.Records} }), Processes: each(a.processes(), processOf),
	})
}

// apiPause is pause or resume.
func apiPause(action string) func(*admin, *request) (answer, error) {
	return func(a *admin, r *request) (answer, error) {
		var body apiPauseRequest
		if err := r.decode(&body); err != nil {
			return answer{}, err
		}
		return done, a.changePause(action)(r.Context(), string(body.Group), string(body.Topic), auditInfo(r, string(body.Reason)))
	}
}

// failureStatuses are, by status of event_delivery, the statuses of the deliveries as failures.
var failureStatuses = map[string][]string{
	outboxops.DeliveryDead: {outbox.StatusDead}, outboxops.DeliveryParked: {outbox.StatusParked},
	outboxops.DeliveryPending: {outbox.StatusFailed, outbox.StatusWaiting}, outboxops.DeliveryProcessing: {outbox.StatusFailed, outbox.StatusWaiting},
}

// owedBadge is the badge of a status of event_delivery.
func owedBadge(status string) string {
	return map[string]string{outboxops.DeliveryDead: outbox.StatusDead, outboxops.DeliveryParked: outbox.StatusParked}[status]
}

// owedLink leads to the deliveries of a line.
func owedLink(c outboxops.DeliveryCount) string {
	return failedLink(outboxops.FailureFilter{Kind: outboxops.KindDelivery, Group: c.Group, Action: c.Action, Topic: c.Stream, Statuses: failureStatuses[c.Status]})
}

// deadLink leads to the dead deliveries of a group.
func deadLink(group string) string {
	return failedLink(outboxops.FailureFilter{Kind: outboxops.KindDelivery, Group: group, Statuses: []string{outbox.StatusDead}})
}
