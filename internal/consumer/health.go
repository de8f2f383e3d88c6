package consumer

import (
	"fmt"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Health is the state of a consumer in this process.
type Health struct {
	Group       string
	Live, Ready bool
	Partitions  int
	Reasons     []string
}

// Health reports the state of the consumer, without I/O.
func (c *Consumer) Health() Health {
	h := Health{Group: c.Rules.Group, Live: true, Ready: true}
	m := c.current.Load()
	if m != nil {
		h.Partitions = len(m.all())
	}
	notReady := func(reason string, args ...any) {
		h.Ready, h.Reasons = false, append(h.Reasons, fmt.Sprintf(reason, args...))
	}
	switch running, since, err := c.state.Get(); {
	case err != nil:
		h.Live = false
		notReady("Run has ended: %v", err)
	case !running:
		notReady("it does not run")
	case c.state.IsStopping():
		notReady("it stops")
	default:
		for _, o := range c.outages.Current() {
			if c.stillTried(o.Outage, since) {
				notReady("%s has been failing for %v: %v", o.Name, time.Since(o.Since).Round(time.Second), o.Err)
			}
		}
		if m == nil || !m.isMember() {
			notReady("the group has assigned no partitions yet")
			break
		}
		for _, w := range m.all() {
			h.Live = w.reportHealth(notReady) && h.Live
		}
		if before, now, growing := m.lag.Growing(); growing {
			h.Reasons = append(h.Reasons, fmt.Sprintf("the lag grows: %d records, %d five minutes ago", now, before))
		}
		h.Reasons = append(append(h.Reasons, handling.PauseReasons(c.pauses, "consumer")...), c.breakers.Reasons()...)
		if c.handled != nil {
			h.Reasons = append(h.Reasons, c.handled.ReportWaits(c.Rules.SlowHandler, notReady)...)
		}
		if run := c.parked.Load(); run != nil {
			for _, l := range run.Lanes {
				h.Live = l.ReportHealth(notReady) && h.Live
			}
		}
	}
	return h
}

// reportHealth passes the reasons why a worker makes no progress to notReady. It returns false if
// only a restart of the process helps.
func (w *partitionWorker) reportHealth(notReady func(reason string, args ...any)) (live bool) {
	if b := w.blockedBy(); b != nil {
		notReady("%s waits at offset %d: %v", w.partition.Name(), b.Offset, kgo.ErrMaxDecompress)
	}
	if !w.hasBegun() {
		notReady("it is not known yet where to begin in %s", w.partition.Name())
	}
	if since, ok := w.activity.AwaitsTx(); ok && time.Since(since) > w.cfg.SlowHandler {
		notReady("a transaction of %s has not begun for %v: the pool has no connection left, or event_handled is locked",
			w.partition.Name(), time.Since(since).Round(time.Second))
	}
	return handling.ReportCall(&w.activity, w.cfg.Rules, notReady)
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
func (c *Consumer) stillTried(o outage.Outage, running time.Time) bool {
	return !o.Last.Before(running) && time.Since(o.Last) <= max(c.Rules.MaxPollInterval, deadLetterDelivery)+maxOutagePause
}

// maxOutagePause exceeds every pause between two tries, see [wait.Backoff].
const maxOutagePause = 2 * wait.MaxBackoff
