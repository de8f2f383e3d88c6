package consumer

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/tables"
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
		if run := c.parked.Load(); run != nil {
			for _, l := range run.Lanes {
				h.Live = l.ReportHealth(notReady) && h.Live
			}
		}
	}
	return h
}

// reportHealth says why a worker does not get on. It returns false if only a restart helps.
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

// watchHandlers reports handlers that run for long, until ctx is cancelled.
func (m *membership) watchHandlers(ctx context.Context) {
	const often = time.Second
	for ctx.Err() == nil {
		wait.Sleep(ctx, min(often, m.cfg.SlowHandler/2))
		for _, w := range m.all() {
			w.slow.Report(&w.activity, w.cfg.SlowHandler, w.log, "partition", w.partition.Name())
		}
	}
}

// waitingPatience is how long a member may be without partitions until it is logged. Kafka lets
// the first members of a group wait for others for three seconds, and a member that joins others
// gets partitions with the rebalance after.
const waitingPatience = 5 * time.Second

// watchWaiting logs once what a member without partitions waits for, and again if that changes,
// until ctx is cancelled.
func (m *membership) watchWaiting(ctx context.Context) {
	const often = waitingPatience / 10
	for waits, before := 0, ""; ctx.Err() == nil; waits++ {
		wait.Sleep(ctx, often)
		what, atMost := m.waitsFor()
		if what != before {
			waits, before = 0, what
		}
		if what != "" && waits == int(waitingPatience/often) && ctx.Err() == nil {
			m.log.Info("outbox: "+what, "at_most", atMost)
		}
	}
}

// waitsFor returns what a member without partitions waits for, and how long at most; of one that has
// partitions, nothing.
func (m *membership) waitsFor() (what string, atMost time.Duration) {
	switch {
	case len(m.all()) > 0:
		return "", 0
	case !m.starts.SawTopics():
		return "waiting for Kafka to answer and to have one of the topics; a new one is found within at_most", starts.WatchInterval
	case !m.isMember():
		return "waiting for the group to assign partitions; a member that is gone has to be expelled, and others have to give up theirs", m.cfg.MaxPollInterval
	}
	return "standing by, the group has no partition for this member; if another member is gone, its partitions are assigned within at_most",
		m.cfg.SessionTimeout + m.cfg.HeartbeatInterval
}

// watchLag notes how the lag develops, until ctx is cancelled.
func (m *membership) watchLag(ctx context.Context) {
	for ctx.Err() == nil {
		wait.Sleep(ctx, handling.SampleInterval)
		lags, err := m.lags(ctx)
		if err != nil {
			continue // fetching fails too
		}
		total := int64(0)
		for _, l := range lags {
			total += l.records()
		}
		m.lag.Add(total)
	}
}

// stillTried reports whether an outage is one of this Run, which began at running,
// and something still waits for its end. Every try ends within MaxPollInterval, or, of a
// dead letter, within deadLetterDelivery, and the next one follows within maxOutagePause.
func (c *Consumer) stillTried(o outage.Outage, running time.Time) bool {
	return !o.Last.Before(running) && time.Since(o.Last) <= max(c.Rules.MaxPollInterval, deadLetterDelivery)+maxOutagePause
}

// maxOutagePause is longer than any pause between two tries, see [wait.Backoff].
const maxOutagePause = 2 * wait.MaxBackoff

// Pause has this process handle nothing of some topics, or nothing at all.
func (c *Consumer) Pause(topics []string) error {
	if err := c.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: pause: %w", err)
	}
	c.pauses.Pause(handling.PausedTopics(topics)...)
	return nil
}

// Resume ends the pause that pause has begun with the same topics.
func (c *Consumer) Resume(topics []string) error {
	if err := c.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: resume: %w", err)
	}
	c.pauses.Resume(handling.PausedTopics(topics)...)
	return nil
}

func (c *Consumer) checkPause(topics []string) error {
	for _, t := range topics {
		if !slices.Contains(c.Processor.Routes.Topics, t) {
			return fmt.Errorf("the consumer does not read topic %q", t)
		}
	}
	return nil
}

// isTopicPaused reports whether the topic of the partition is paused.
func (w *partitionWorker) isTopicPaused() bool { return w.limits.pauses.IsPaused(w.partition.Topic) }

// awaitResume waits while the topic is paused, and reports whether that ended before the
// worker is to end.
func (w *partitionWorker) awaitResume() bool {
	return w.limits.pauses.AwaitResume(w.stopping, w.partition.Topic) && w.stopping.Err() == nil
}

// mayCall waits until a handler may be called: until the topic is not paused, and there is a
// slot. It reports whether that was before the worker is to end. A worker whose topic is
// paused keeps no slot from others.
func (w *partitionWorker) mayCall(tx bool) bool {
	for w.awaitResume() && w.takeSlots(tx) {
		if !w.isTopicPaused() {
			return true
		}
		w.releaseSlots() // paused while it waited for the slot
	}
	return false
}

// pauseTopics has the client fetch nothing of some topics. What it has fetched waits in the
// queues of the workers.
func (m *membership) pauseTopics(paused, others []string) {
	if len(paused) > 0 {
		m.client.PauseFetchTopics(paused...)
	}
	if len(others) > 0 {
		m.client.ResumeFetchTopics(others...)
	}
}

// watchPauses reads what operators have paused, until stop is called, which waits for it.
// While PostgreSQL does not answer, what it said last counts.
func (c *Consumer) watchPauses(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		for c.operators != nil && ctx.Err() == nil {
			wait.Sleep(ctx, handling.PausesInterval)
			began := time.Now()
			err := c.readPauses(ctx)
			if err != nil {
				err = fmt.Errorf("what was read before still counts: %w", err)
			}
			if ctx.Err() == nil {
				c.outages.Report(handling.OutagePauses, began, err)
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

func (c *Consumer) readPauses(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, handling.PausesTimeout)
	defer cancel()
	now, err := c.operators.Read(ctx)
	if err != nil {
		return err
	}
	handling.LogPauses(c.Processor.Log, "consumer", c.pauses.SetStored(now), now)
	return nil
}

// leaseForAlerts is what the lease is named in the log.
const leaseForAlerts = "the lease for alerts"

// startAlerts sends the alerts of the group while this process has the lease for them, which is one for all members
// of the group, until stop is called, which waits for it, or ctx is cancelled. It is not the lease of the group's
// workers: while a group moves to Kafka it has both, and workers remove rows under theirs.
//
// Nothing here makes a consumer unready: it handles events all the same.
func (c *Consumer) startAlerts(ctx context.Context) (stop func()) {
	if c.Alert == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	role := &lease.Role{
		Lease: lease.NewGroupLease(c.db, c.Rules.Schema, tables.ConsumerPrefix+c.Rules.Group, c.Rules.SessionTimeout), Name: leaseForAlerts,
		Cut: context.WithoutCancel(ctx), Work: awaitEnd, Alert: c.Alert, StopTimeout: c.Rules.StopTimeout, Log: c.Rules.Log,
		Report: func(_ time.Time, err error) { c.alerting.Report(err) },
	}
	var alerting sync.WaitGroup
	alerting.Go(func() { role.Run(ctx) })
	return func() {
		cancel()
		alerting.Wait()
	}
}

// awaitEnd is the work of a process that only alerts.
func awaitEnd(ctx context.Context, leads lease.Leadership) {
	select {
	case <-ctx.Done():
	case <-leads.Held.Done():
	}
}
