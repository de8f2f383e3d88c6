package faults

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Roles of processes in [TestViews].
const (
	roleLeader   = "leader"
	roleStandby  = "standby"
	roleConsumer = "consumer"
	roleWorker   = "worker"
	rolePage     = "page" // all that the operators' page calls well
)

// What a claim says.
const (
	saysWorks   = "works"
	saysFails   = "does not work"
	saysOutage  = "outage"
	saysBreaker = "breaker is not closed"
	saysReady   = "ready"
	saysUnready = "not ready"
	saysWell    = "all is well"
)

// Allowances: how late a view may say something, beside viewsSlack. Each is what the documents, or a constant that
// they rest on, say.
const (
	// viewsSlack is the 2 s of the issue.
	viewsSlack = 2 * time.Second
	// sendFails is when the leader takes a send for failed: one and a half DeliveryTimeout (docs/configuration.md),
	// which `outbox relay` makes a third of a short --lease (cmd/outbox/relay.go).
	sendFails = viewsLease / 3 * 3 / 2
	// contactEvery, contactAnswer and contactRetry are when a process without other answers asks whether Kafka
	// answers, how long it waits, and when it asks again (internal/kafka/contact.go, topics.go).
	contactEvery  = 10 * time.Second
	contactAnswer = 2 * time.Second
	contactRetry  = 5 * time.Second
	// breakerCloses: the breaker of a relay asks Kafka every second and believes two answers (OpenFor in
	// docs/configuration.md). The client dials again after at most 2.5 s (kgo.RetryBackoffFn). Then three trials pass.
	breakerCloses = 2*time.Second + contactAnswer + 2500*time.Millisecond + 3*viewsPoll
	// topicTried is how often a topic that accepts nothing is tried, see RetryInterval in docs/configuration.md.
	topicTried = 1500 * time.Millisecond
	// outageTried is the longest pause between two tries of PostgreSQL (wait.MaxBackoff).
	outageTried = 5 * time.Second
	// takenOver is how long a relay whose process was killed has no leader (docs/deploy.md, "within PollInterval
	// and a second").
	takenOver = viewsPoll + time.Second
	// actionOpens and actionCloses: the breaker of an action opens after ten failures of different events
	// (handling.breakerEvents), and tries again after RetryPolicy.MaxRetryWait of the service.
	actionOpens  = 10 * viewsTrickle
	actionCloses = time.Second + viewsTrickle
	// rejoined is how long a consumer that the group has expelled waits for partitions: kgo.SessionTimeout.
	rejoined = viewsSession
	// newsWritten is when a process has written down a change of its state (docs/watch.md, "within a second").
	newsWritten = time.Second
	// memberRenewed is how often the consumer renews its row in event_member (docs/watch.md), so that it tries
	// PostgreSQL although there are no events.
	memberRenewed = 10 * time.Second
	// consumerTrusted and workerTrusted are how long a row of event_member counts after it was written: three
	// intervals, of 10 s for a consumer and of a third of Lease for a worker (docs/watch.md).
	consumerTrusted = 30 * time.Second
	workerTrusted   = viewsLease
	// metricsRead is how old a value of /metrics from the database may be (docs/deploy.md).
	metricsRead = 5 * time.Second
	// Time limits of statements that PostgreSQL does not answer: those of a relay have its Lease, in the worker
	// that of delivery.DispatchTimeout is the longest, and in the consumer HandlerTimeout.
	relayStatement    = viewsLease
	workerStatement   = 30 * time.Second
	consumerStatement = viewsHandling
)

// viewsTrickle is the time between two records of events.
const viewsTrickle = 100 * time.Millisecond

// effect is what an outage does to the processes of a role.
type effect struct {
	role    string
	process string // of this one alone; "" for all of the role
	what    *regexp.Regexp
	classes []string
	// stops says that the process does not do its part meanwhile. Perhaps says that it may say so, or not.
	stops, perhaps bool
	rejected       bool   // Kafka rejects the login, so that the process is not ready
	breaker        string // which one opens: roleLeader or an action
	// sees and heals are how long after the beginning and the end a process may not know.
	sees, heals time.Duration
}

// fact is an outage that happened. It has surely begun at began and surely lasts until ends; it may have begun at
// from, and may last until over. The last two are zero while it lasts.
type fact struct {
	kind        string
	effects     []effect
	from, began time.Time
	ends, over  time.Time
}

// claim is one thing that a view says.
type claim struct {
	view    string
	of      string // the relay, group or process
	role    string
	process string
	says    string
	what    string // of an outage, or which breaker
	class   string
	since   time.Time
	why     string
	lag     time.Duration // how much older than the look it may be
	trusted time.Duration // how long the view believes a row that cannot be renewed; 0 if it believes none
	asked   time.Time
	got     time.Time
}

func (c claim) String() string {
	text := c.of + ": " + c.says
	if c.role == roleStandby {
		text = c.of + ", a standby: " + c.says
	}
	if c.what != "" {
		text += " " + c.what
	}
	if c.class != "" {
		text += " (" + c.class + ")"
	}
	if !c.since.IsZero() {
		text += " since " + c.since.UTC().Format(viewsClock)
	}
	if c.why != "" {
		text += ": " + c.why
	}
	return text
}

// kind is what the claim is about, without times.
func (c claim) kind() string {
	c.since, c.why = time.Time{}, ""
	return c.view + ", " + c.String()
}

const viewsClock = "15:04:05.000"

// truth is what has happened.
type truth struct {
	mu    sync.Mutex
	facts []*fact
}

// begin notes an outage that do begins.
func (h *truth) begin(kind string, effects []effect, do func()) *fact {
	f := &fact{kind: kind, effects: effects, from: time.Now()}
	do()
	f.began = time.Now()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.facts = append(h.facts, f)
	return f
}

// end notes the end of an outage that do ends.
func (h *truth) end(f *fact, do func()) {
	ends := time.Now()
	do()
	h.mu.Lock()
	defer h.mu.Unlock()
	f.ends, f.over = ends, time.Now()
}

// describe says what was true around a time.
func (h *truth) describe(at time.Time) string {
	var texts []string
	for _, f := range h.facts {
		switch {
		case at.Before(f.from):
		case f.over.IsZero() || at.Before(f.over):
			texts = append(texts, fmt.Sprintf("%s for %.1f s", f.kind, at.Sub(f.from).Seconds()))
		case at.Sub(f.over) < time.Minute:
			texts = append(texts, fmt.Sprintf("%s ended %.1f s ago, after %.1f s", f.kind, at.Sub(f.over).Seconds(), f.over.Sub(f.from).Seconds()))
		}
	}
	if texts == nil {
		return "nothing fails"
	}
	return strings.Join(texts, "; ")
}

// lateness is how late a claim is, and how late it may be.
type lateness struct {
	late, allowed time.Duration
	by            string // the fact that makes it late
}

func (v lateness) wrong() bool { return v.late > v.allowed }

// betterThan reports whether a fact explains a claim better than another one.
func (v lateness) betterThan(other lateness) bool {
	if v.wrong() || other.wrong() {
		return v.late-v.allowed < other.late-other.allowed
	}
	return v.late < other.late
}

// excess is for how long the claim has been false, beyond what is documented.
func (v lateness) excess() time.Duration { return v.late - v.allowed + viewsSlack }

// compare compares a claim with what has happened.
func (h *truth) compare(c claim) lateness {
	switch c.says {
	case saysWorks:
		return h.compareGood(c, func(e effect) bool { return e.stops })
	case saysReady:
		return h.compareGood(c, func(e effect) bool { return e.rejected })
	case saysWell:
		return h.compareGood(c, func(e effect) bool { return !e.perhaps })
	case saysOutage:
		v := h.compareBad(c, func(e effect) bool {
			return e.perhaps && e.what == nil || e.what != nil && e.what.MatchString(c.what) && slices.Contains(e.classes, c.class)
		})
		if !v.wrong() && !h.since(c) {
			v.by, v.late = "no such outage began then", c.asked.Sub(c.since)
			v.allowed = 0
		}
		return v
	case saysBreaker:
		return h.compareBad(c, func(e effect) bool { return e.breaker == c.what })
	case saysUnready:
		v := h.compareBad(c, func(e effect) bool { return e.rejected || e.perhaps })
		// When an outage of Kafka ends, Kafka answers one process sooner than another.
		heals := h.compareBad(c, func(e effect) bool { return e.what == ofKafka })
		if v.wrong() && !heals.wrong() && heals.late > 0 {
			return heals
		}
		return v
	default:
		return h.compareBad(c, func(e effect) bool { return e.stops || e.perhaps })
	}
}

// concerns reports whether an effect is one on what a claim is about.
func (e effect) concerns(c claim) bool {
	return (c.role == rolePage || e.role == c.role) && (e.process == "" || e.process == c.process)
}

// compareGood compares that nothing is wrong: no outage with such an effect may have lasted for longer than it takes
// to say so.
func (h *truth) compareGood(c claim, counts func(effect) bool) (worst lateness) {
	for _, f := range h.facts {
		if !f.began.Before(c.asked) || !f.ends.IsZero() && f.ends.Before(c.got) {
			continue
		}
		for _, e := range f.effects {
			if !e.concerns(c) || !counts(e) {
				continue
			}
			began := h.askedAfter(f.began, e, c)
			v := lateness{late: c.asked.Sub(began), allowed: viewsSlack + e.sees + h.lag(c, began), by: f.kind}
			if worst.by == "" || v.late-v.allowed > worst.late-worst.allowed {
				worst = v
			}
		}
	}
	return worst
}

// askedAfter returns from when on a process could see an outage that has begun: not while another one kept it from
// trying, for example because it did not lead.
func (h *truth) askedAfter(began time.Time, e effect, c claim) time.Time {
	for _, f := range h.facts {
		if !f.over.IsZero() && f.over.After(began) && f.from.Before(began.Add(e.sees)) && f.over.Before(c.asked) {
			for _, other := range f.effects {
				if other.concerns(c) && (other.stops || other.perhaps) {
					began = laterOf(began, f.over.Add(min(other.heals, c.asked.Sub(f.over))))
				}
			}
		}
	}
	return began
}

func laterOf(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// compareBad compares that something is wrong: an outage with such an effect must last, or have ended not long ago.
func (h *truth) compareBad(c claim, counts func(effect) bool) (best lateness) {
	best = lateness{late: c.asked.Sub(h.start()), by: "no such outage"}
	for _, f := range h.facts {
		for _, e := range f.effects {
			if !e.concerns(c) || !counts(e) || f.from.After(c.got) {
				continue
			}
			v := lateness{by: f.kind}
			if !f.over.IsZero() && f.over.Before(c.asked) {
				over := h.triedAfter(f.over, e, c)
				v.late, v.allowed = max(0, c.asked.Sub(over)), viewsSlack+e.heals+h.lag(c, over)
			}
			if v.betterThan(best) {
				best = v
			}
		}
	}
	return best
}

// triedAfter returns from when on a process could see that an outage was over: not while another one kept it from
// trying.
func (h *truth) triedAfter(over time.Time, e effect, c claim) time.Time {
	for _, f := range h.facts { // in the order of their beginnings
		if !f.from.Before(over.Add(e.heals)) || !f.over.IsZero() && !f.over.After(over) {
			continue
		}
		for _, other := range f.effects {
			if !other.concerns(c) || !other.stops && !other.perhaps {
				continue
			}
			if f.over.IsZero() || f.over.After(c.asked) {
				return c.asked
			}
			over = laterOf(over, f.over.Add(other.heals))
		}
	}
	return over
}

// lag is how old a claim may be that was true at a time: a view of rows believes one for longer while PostgreSQL does
// not take another.
func (h *truth) lag(c claim, since time.Time) time.Duration {
	if c.trusted == 0 {
		return c.lag
	}
	for _, f := range h.facts {
		if strings.HasPrefix(f.kind, "PostgreSQL") && f.from.Before(c.got) && (f.over.IsZero() || f.over.After(since.Add(-c.trusted))) {
			return c.lag + c.trusted
		}
	}
	return c.lag
}

// since reports whether an outage that a claim can be about had begun when the claim says.
func (h *truth) since(c claim) bool {
	if c.since.IsZero() {
		return true
	}
	return slices.ContainsFunc(h.facts, func(f *fact) bool {
		return slices.ContainsFunc(f.effects, func(e effect) bool {
			about := e.perhaps && e.what == nil || e.what != nil && e.what.MatchString(c.what)
			return about && e.concerns(c) && c.since.After(f.from.Add(-time.Second)) &&
				(f.over.IsZero() || c.since.Before(f.over.Add(e.sees+viewsSlack)))
		})
	})
}

func (h *truth) start() time.Time {
	if len(h.facts) == 0 {
		return time.Time{}
	}
	return h.facts[0].from
}
