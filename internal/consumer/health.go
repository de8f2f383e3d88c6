package consumer

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// Health is the state of a consumer in this process.
type Health struct {
	Group                        string
	Live, Ready, Works, Answered bool
	Partitions                   int
	Waiting                      []tables.EventCount
	Outages                      []outage.Outage
	Reasons                      []string
}

// Health reports the state of the consumer, without I/O.
func (c *Consumer) Health() Health {
	h := c.ownHealth()
	if run := c.parked.Load(); run != nil {
		counts, reasons := run.Waiting()
		h.Waiting, h.Reasons = counts, append(h.Reasons, reasons...)
	}
	return h
}

// othersWaiting counts the events that actions of the group have missed, and reports whether a cut has left the group
// behind.
func (c *Consumer) othersWaiting(ctx context.Context) (missed []tables.EventCount, reasons []string, err error) {
	if missed, err = c.groups.Missed(ctx, c.Rules.Group); err != nil {
		return nil, nil, err
	}
	left, err := c.groups.LeftBehind(ctx, c.Rules.Group)
	for _, l := range left {
		reasons = append(reasons, "no relay sends to Kafka: relay "+l.Relay+" has ended by a cut")
	}
	return missed, reasons, err
}

// report returns what this process says of itself in event_member.
func (c *Consumer) report() delivery.Report {
	h := c.ownHealth()
	return delivery.Report{
		State:   outage.State{Works: h.Live && h.Works, Reasons: h.Reasons, Breakers: c.breakers.NotClosed(), Outages: h.Outages},
		Skipped: c.Processor.Skipped(delivery.MaxSkippedTypes), Kafka: c.contact.LastAnswer(),
	}
}

// ownHealth is Health without what the group has to handle.
func (c *Consumer) ownHealth() Health {
	h := Health{Group: c.Rules.Group, Live: true}
	m := c.current.Load()
	if m != nil {
		h.Partitions = len(m.all())
	}
	reason := func(text string, args ...any) { h.Reasons = append(h.Reasons, fmt.Sprintf(text, args...)) }
	switch running, since, err := c.state.Get(); {
	case err != nil:
		h.Live = false
		reason("Run has ended: %v", err)
	case !running:
		reason("it does not run")
	case c.state.IsStopping():
		reason("it stops")
	default:
		h.Ready, h.Works, h.Answered = true, true, c.hasAnswered() && c.contact.Answered()
		c.reportOutages(&h, since, reason)
		notWorks := func(text string, args ...any) { h.Works = false; reason(text, args...) }
		if m == nil || !m.isMember() {
			notWorks("the group has assigned no partitions yet")
		} else {
			c.reportWork(&h, m, notWorks)
		}
		h.Ready = h.Ready && h.Live
	}
	return h
}

// hasAnswered reports whether PostgreSQL has answered since Run began, if the consumer has one.
func (c *Consumer) hasAnswered() bool { return c.handled == nil || c.answered.Load() }

// reportOutages adds the outages of this Run, which began at running, and whether they make the process not ready.
func (c *Consumer) reportOutages(h *Health, running time.Time, reason func(text string, args ...any)) {
	rejected, outOfReach := c.contact.Rejected(), (*outage.Failure)(nil)
	for _, o := range c.outages.Current() {
		if !c.stillTried(o.Failure, running) {
			continue
		}
		h.Works = false
		h.Outages = append(h.Outages, o.Outage(classOf(o)))
		reason("%s has been failing for %v: %v", o.Name, time.Since(o.Since).Round(time.Second), o.Err)
		if !isPostgres(o) && kafka.IsRefused(o.Err) {
			rejected = o.Err
		}
		if o.Name == outageKafka {
			outOfReach = &o.Failure
		}
	}
	notReady := func(text string, args ...any) { h.Ready, h.Works = false, false; reason(text, args...) }
	if !c.hasAnswered() {
		notReady("PostgreSQL has not answered yet")
	}
	if rejected != nil {
		notReady("Kafka does not serve this process: %v", rejected)
	} else if outOfReach != nil && c.answersElsewhere(outOfReach) {
		notReady("Kafka does not answer this process, and has answered another one of the group")
	}
}

// answersElsewhere reports whether Kafka has answered another process of the group during an outage of this one, not
// long ago.
func (c *Consumer) answersElsewhere(outOfReach *outage.Failure) bool {
	run := c.parked.Load()
	if run == nil {
		return false
	}
	at := run.KafkaElsewhere()
	return at.After(outOfReach.Since) && at.Before(outOfReach.Last) && time.Since(at) < kafka.ElsewhereFor
}

// reportWork passes the reasons why a member does not handle all its events to notWorks, and adds other reasons.
func (c *Consumer) reportWork(h *Health, m *membership, notWorks func(text string, args ...any)) {
	for _, w := range m.all() {
		h.Live = w.reportHealth(notWorks) && h.Live
		if waited := w.drainWait.lasts(); waited > 0 {
			h.Reasons = append(h.Reasons, fmt.Sprintf("%v has waited for %v for the parked events of a key, which are many", w.partition, waited.Round(time.Second)))
		}
	}
	if before, now, growing := m.lag.Growing(); growing {
		h.Reasons = append(h.Reasons, fmt.Sprintf("the lag grows: %d records, %d five minutes ago", now, before))
	}
	h.Reasons = append(append(h.Reasons, handling.PauseReasons(c.pauses, "consumer")...), c.breakers.Reasons()...)
	if c.handled != nil {
		h.Reasons = append(h.Reasons, c.handled.ReportWaits(c.Rules.SlowHandler, notWorks)...)
	}
	if run := c.parked.Load(); run != nil {
		for _, l := range run.Lanes {
			h.Live = l.ReportHealth(notWorks) && h.Live
		}
		for _, o := range run.Outages() {
			h.Outages = append(h.Outages, o.Outage(classOf(o)))
			says := func(text string, args ...any) { h.Reasons = append(h.Reasons, fmt.Sprintf(text, args...)) }
			if concernsFresh(o) {
				says = notWorks
			}
			says("parked events: %s has been failing for %v: %v", o.Name, time.Since(o.Since).Round(time.Second), o.Err)
		}
	}
}

// concernsFresh reports whether an outage of PostgreSQL that was met beside fresh events keeps these from being
// handled, too. A table that is locked does not.
func concernsFresh(o outage.Named) bool {
	return pg.FailsForAll(o.Err) || pg.ClassOf(o.Err) == pg.ClassNoAnswer && o.Name == delivery.OutageMember
}

// reportHealth passes the reasons why a worker makes no progress to notReady. It returns false if
// only a restart of the process helps.
func (w *partitionWorker) reportHealth(notReady func(reason string, args ...any)) (live bool) {
	if b := w.blockedBy(); b != nil {
		notReady("%s waits at offset %d: %v", w.partition.Name(), b.offset, b)
	}
	if waited := w.streamWait.lasts(); waited > w.cfg.SlowHandler {
		notReady("%s has waited for %v to read a large batch: one of another partition is being read", w.partition.Name(), waited.Round(time.Second))
	}
	if waited := w.place.wait.lasts(); waited > w.cfg.SlowHandler {
		notReady("%s has waited for %v to handle a record alone, which may have ended processes: one of another partition is being handled alone",
			w.partition.Name(), waited.Round(time.Second))
	}
	if !w.hasBegun() {
		notReady("it is not known yet where to begin in %s", w.partition.Name())
	}
	if since, ok := w.activity.AwaitsTx(); ok && time.Since(since) > w.cfg.SlowHandler {
		notReady("a transaction of %s has not begun for %v: the pool has no connection left, or event_handled is locked",
			w.partition.Name(), time.Since(since).Round(time.Second))
	}
	handling.ReportCommit(&w.activity, w.cfg.SlowHandler, " of "+w.partition.Name(), notReady)
	if w.hasDied() {
		notReady("the goroutine of %s has ended, although the partition is assigned", w.partition.Name())
		return false
	}
	return handling.ReportCall(&w.activity, w.cfg.Rules, notReady)
}

// classOf returns the class of the error of an outage.
func classOf(o outage.Named) string {
	if isPostgres(o) {
		return pg.ClassOf(o.Err)
	}
	return kafka.ClassOf(o.Err)
}

// isPostgres reports whether an outage is one of PostgreSQL.
func isPostgres(o outage.Named) bool {
	return pg.IsOwn(o.Err) || !kafka.IsAnswer(o.Err) && slices.Contains([]string{handling.OutagePostgres, handling.OutagePauses, leaseForAlerts}, o.Name)
}

// isMember reports whether the group has assigned partitions, or none, to this member.
func (m *membership) isMember() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.member != ""
}

// stillTried reports whether an outage belongs to this Run, which began at running, and is still
// retried. A try ends within MaxPollInterval, and the try of a dead letter within
// deadLetterDelivery. The next try follows within maxOutagePause.
func (c *Consumer) stillTried(o outage.Failure, running time.Time) bool {
	return !o.Last.Before(running) && time.Since(o.Last) <= max(c.Rules.MaxPollInterval, deadLetterDelivery)+maxOutagePause
}

// maxOutagePause exceeds every pause between two tries, see [wait.Backoff].
const maxOutagePause = 2 * wait.MaxBackoff
