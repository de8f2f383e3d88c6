package relay

import (
	"context"
	"errors"
	"log/slog"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/exactly"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/mover"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/trace"
	"github.com/outboxgo/outbox/internal/wait"
)

// errTooLate ends a batch that is not finished SendTimeout after Run was told to stop.
var errTooLate = errors.New("not finished in time")

// lead relays until ctx is cancelled or the lease is lost. Whatever ends it, also a panic, it ends all goroutines
// first and then releases the lease.
func (r *Relay) lead(ctx context.Context, l *lease.Lease) (err error) {
	// Cancelling ctx must not tear a batch apart: Kafka may already hold its records, and a cursor that does not move
	// sends them again. Only the loss of the lease ends a batch, or a batch that takes too long to finish.
	held, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	stopped := context.AfterFunc(ctx, func() {
		wait.Sleep(held, r.rules.SendTimeout)
		lose(errTooLate)
	})
	defer stopped()

	defer r.member.Lead(false)
	defer r.notifyLeading(false)
	defer func() { r.release(ctx, l, err) }()
	leads := lease.Leadership{Lease: l, Held: held, Lose: lose, StatementTimeout: r.rules.Lease}
	upkeep := lease.NewUpkeep(r.leases, leads, r.lockOutage)
	renewing := leads.NewGroup()
	defer renewing.Wait()
	defer lose(nil)
	renewing.Go(func() {
		if upkeep.Renew(r.health.hangs) {
			r.giveUpHanging(leads)
		}
	})
	renewing.Go(upkeep.HoldLock)
	r.member.Lead(true)
	r.notifyLeading(true) // while the lease is renewed, because a hook may take long
	err = r.runParts(ctx, leads)
	if errors.Is(err, errTooLate) {
		r.log.Warn("outbox: stopped before the batch in flight was finished; it will be sent again")
		err = nil
	}
	return err
}

// release lets a standby take over at once, unless the lease is lost already.
func (r *Relay) release(ctx context.Context, l *lease.Lease, err error) {
	defer func() {
		if c := l.Claim.Load(); c != nil {
			r.leases.Unlock(ctx, c.Lock)
		}
	}()
	if errors.Is(err, lease.ErrLeaseLost) || errors.Is(err, pg.ErrNotMigrated) { // without tables there is no lease either
		if trace.On {
			trace.Begin("stop", "epoch", l.Epoch).End()
		}
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lease.ReleaseTimeout)
	defer cancel()
	if err := r.leases.GiveUp(ctx, l); err != nil {
		r.log.Warn("outbox: lease not released, a standby waits until it expires", "error", err)
	}
}

// giveUpHanging lets another process relay, because the goroutine of Run makes no progress. If that goroutine goes on
// later, it finds that its lease has expired, and sends nothing.
func (r *Relay) giveUpHanging(leads lease.Leadership) {
	r.log.Error("outbox: Run does not go on, the lease is given up so that another process can relay", "for", r.health.hangsAfter())
	leads.Lease.Expire()
	leads.Lose(lease.ErrLeaseLost)
	r.health.gaveUp()
	r.release(leads.Held, leads.Lease, nil)
}

func (r *Relay) notifyLeading(leading bool) {
	r.health.setLeading(leading)
	if leading {
		r.contact.AskAgain()
	} else {
		r.contact.StopSending()
	}
	if r.hooks.Leading != nil {
		r.hooks.Leading(leading)
	}
}

// runParts makes the parts of a leading relay and runs them until ctx is cancelled or the lease is lost. When it
// returns, no record is on its way any more.
func (r *Relay) runParts(ctx context.Context, leads lease.Leadership) error {
	r.monitor.Lead(leads.Lease.Epoch)
	parked, bad := NewParking(r.rules.PassFailedKeys), NewBadPartitions(r.topicOutages)
	r.health.setBad(bad)
	unanswered := NewUnanswered(bad, func() { wait.Signal(r.retryNow) })
	probeNow, suspectsNow := make(chan struct{}, 1), make(chan struct{}, 1)
	shared := RetrierParts{
		Leadership: leads, Rules: r.rules, Hooks: r.hooks, Store: r.failed, Parked: parked, Bad: bad, Unanswered: unanswered,
		Probed: new(ProbedKeys), Breaker: r.breaker, Log: r.log, RetryNow: r.retryNow, Outage: r.retryOutage,
		Waits: func() { wait.Signal(probeNow); wait.Signal(suspectsNow) },
	}
	producer := r.newProducer(leads, r.breaker, unanswered)
	defer producer.Close()
	eventDied := func() { wait.Signal(r.checkNow) }
	shared.EventDied = eventDied
	deliverer := r.newDeliverer(producer, shared, r.kafkaOutage, r.health.Progressed, r.contact.Heard, r.contact.StopSending)
	cursors := cursorStore(r.cursors)
	if r.rules.ExactlyOnce != "" {
		shared.Exactly = r.newExactly(leads, producer.cfg, deliverer.Parts)
		defer shared.Exactly.Close()
		cursors = exactlyCursors{r.cursors, shared.Exactly}
	}
	session := NewSession(SessionParts{
		Leadership: leads, Rules: r.rules, Hooks: r.hooks, Cursors: cursors, Leases: r.leases, Failed: r.failed, Bad: bad, Unanswered: unanswered,
		Deliverer: deliverer, Exactly: shared.Exactly,
		Parked: parked, Health: r.health, Log: r.log, Outage: r.postgresOutage, Wake: r.wake, Heard: r.heard,
		Ticks: &r.cursors.Probes.Ticks, EventDied: eventDied, Waits: shared.Waits,
	})
	defer r.cursors.Probes.Join()()
	defer func() {
		r.retryOutage.Abandon("this process does not lead")
		r.retryKafkaOutage.Abandon("this process does not lead")
	}()
	cleaner := retention.NewCleaner(leads, retention.CleanerConfig{
		Name: r.rules.Name, Rules: r.rules.Retention, Poll: r.rules.PollInterval, Removed: r.hooks.RowsRemoved,
	}, r.retention, session.Backlog.Load, r.log, r.cleanerOutages)
	retry := func(ctx context.Context) { r.retry(ctx, shared) }
	probe := func(ctx context.Context) { r.probe(ctx, shared, probeNow, (*retrier).RunProbes) }
	suspects := func(ctx context.Context) { r.probe(ctx, shared, suspectsNow, (*retrier).RunSuspects) }
	err := session.Run(ctx, retry, probe, suspects, cleaner.Run, r.monitor.Run, func(ctx context.Context) { r.moveDelayed(ctx, leads) })
	producer.Close()
	NewRetrier(shared).Finish()
	return err
}

// moveDelayed moves delayed events that are due.
func (r *Relay) moveDelayed(ctx context.Context, leads lease.Leadership) {
	mover.New(mover.Config{
		DB: r.leases.DB, Schema: r.rules.Schema, Poll: r.rules.PollInterval, Timeout: leads.StatementTimeout, Moved: r.hub.Wake,
		Log: r.log, Outages: r.moverOutages,
	}).Run(ctx, leads.Held)
}

// newExactly makes what sends exactly once.
func (r *Relay) newExactly(leads lease.Leadership, producer ProducerConfig, delivery DeliveryParts) *Exactly {
	return NewExactly(ExactlyParts{
		Leadership: leads, Rules: r.rules, Config: exactly.Config{Opts: r.transactional}, Cursors: r.cursors, Failed: r.failed,
		Producer: producer, Delivery: delivery, Health: r.health, Log: r.log, KafkaOutage: r.kafkaOutage,
	})
}

// retry runs a retrier with a producer of its own.
func (r *Relay) retry(ctx context.Context, parts RetrierParts) {
	parts.Lease.AwaitExclusive(ctx)
	producer := r.newProducer(parts.Leadership, r.breaker, parts.Unanswered)
	defer producer.Close()
	parts.Deliverer = r.newDeliverer(producer, parts, r.retryKafkaOutage, func() {}, nil, nil)
	NewRetrier(parts).Run(ctx)
}

// probe runs a retrier that probes, with a producer of its own. The breaker does not get its results,
// which say nothing about Kafka as a whole. Outages that it sees are not logged, because the session and the other
// retrier log them.
func (r *Relay) probe(ctx context.Context, parts RetrierParts, now <-chan struct{}, run func(*retrier, context.Context)) {
	parts.Lease.AwaitExclusive(ctx)
	producer := r.newProducer(parts.Leadership, nil, parts.Unanswered)
	defer producer.Close()
	quiet := slog.New(slog.DiscardHandler)
	parts.Outage, parts.ProbeNow = outage.NewLog(quiet, "PostgreSQL"), now
	parts.Deliverer = r.newDeliverer(producer, parts, outage.NewLog(quiet, whatKafka), func() {}, nil, nil)
	run(NewRetrier(parts), ctx)
}

// newProducer makes a producer that a breaker stops. A nil breaker lets everything through.
func (r *Relay) newProducer(leads lease.Leadership, b *breaker.Breaker, unanswered *Unanswered) *Producer {
	return NewProducer(ProducerConfig{
		Opts: r.kafka, Form: r.rules.Form, SendTimeout: r.rules.SendTimeout, PassFailedKeys: r.rules.PassFailedKeys,
		Unanswered: unanswered, OnSent: r.hooks.Sent,
	}, leads, b)
}

func (r *Relay) newDeliverer(to Sender, shared RetrierParts, kafkaOutage *outage.Log, onSend func(), heard func(error), local func()) *Deliverer {
	return &Deliverer{DeliveryParts{
		Sender: to, Breaker: r.breaker, Bad: shared.Bad, Unanswered: shared.Unanswered, Log: r.log, KafkaOutage: kafkaOutage, PassFailedKeys: r.rules.PassFailedKeys,
		Exclusive: shared.Lease.Exclusive, OnSend: onSend, Heard: heard, Local: local, OnSent: r.hooks.Sent, OnRecovered: func() { wait.Signal(r.retryNow) },
	}}
}
