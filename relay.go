package outbox

import (
	"context"
	"errors"
	"fmt"
	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/relay"
	"github.com/outboxgo/outbox/internal/retention"
	"log/slog"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/places"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
)

// Relay hands committed events to Kafka: each at least once, those of one
// partition key in order. Any number of processes may run it; one of them works.
type Relay struct {
	cfg       RelayConfig
	opts      []kgo.Opt // for Kafka
	leases    *lease.Store
	cursors   *cursor.Store
	failed    *cursor.Failed
	retention *retention.Store
	monitor   *monitor
	log       *slog.Logger
	breaker   *breaker.Breaker
	health    *healthState

	// The logs of outages are the relay's, because an outage may last longer than a lease.
	postgresOutage, kafkaOutage *outage.Log  // only the goroutine of Run
	retryOutage                 *outage.Log  // only the retrier
	topicOutages                *outage.Logs // topics and partitions
	lockOutage                  *outage.Log  // only who takes the lock of the lease: a standby, and then keepLock

	// Each holds at most one wake request.
	wake     chan struct{} // for the session: this process has recorded events
	heard    chan struct{} // for the session: others have
	retryNow chan struct{} // for the retrier: the breaker has closed, or a place has recovered
	checkNow chan struct{} // for the monitor: the breaker has changed, or an event is dead

	waker  *Waker
	member *wakeup.Member // of the Run under way; only its goroutine

	clockReported bool // by reportClock; only the goroutine of Run

	running atomic.Bool
	stop    atomic.Pointer[context.Context] // of the last Run; hooks are not waited for when it has ended
}

// NewRelay returns a relay that reads from db and produces with clients that it
// makes from opts when it runs: brokers, TLS, SASL, hooks and compression are
// the caller's, acks=all and idempotence are the relay's. Options that name a
// group, topics to consume or a transactional id, or that give up idempotence or
// automatic flushing, are errors. So is a partitioner that does not send all records
// of a key to one partition, such as kgo.RoundRobinPartitioner. The error names every
// bad field and option.
//
// The topics must exist, or be creatable with kgo.AllowAutoTopicCreation: events
// of a missing topic wait until it is there, and hold up no others.
//
// NewRelay does no I/O, and makes and closes one client to look at the options.
// A running relay uses up to seven connections of db, and one beside them, which all relays and workers on db share: on it
// the process that leads hears when others have recorded events, see [Waker], and has a lock by which others
// find out that it is gone. Closing db stays with the caller.
func NewRelay(db *pgxpool.Pool, opts []kgo.Opt, cfg RelayConfig) (*Relay, error) {
	given := cfg
	cfg = cfg.withDefaults()
	producerOpts := func(opts []kgo.Opt) []kgo.Opt {
		return append(kafka.ProducerOpts(opts, cfg.DeliveryTimeout), kafka.FlushOpts(opts)...)
	}
	err := errors.Join(cfg.validate(given), kafka.CheckProducerOpts(opts))
	if err == nil {
		err = kafka.ValidateOpts(opts, producerOpts)
	}
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: relay config: %w", err)
	}
	log := cfg.Logger.With("relay", cfg.Name)
	r := &Relay{
		cfg:       cfg,
		opts:      producerOpts(opts),
		leases:    lease.NewStore(db, cfg.Schema, cfg.Name, cfg.Lease),
		cursors:   cursor.NewStore(db, cfg.Schema, cfg.Name),
		failed:    cursor.NewFailed(db, cfg.Schema, cfg.Name, cfg.HoldDead),
		retention: retention.NewStore(db, cfg.Schema, cfg.Retention.rules()),
		log:       log,

		postgresOutage: outage.NewLog(log, "PostgreSQL"),
		kafkaOutage:    outage.NewLog(log, "Kafka"),
		retryOutage:    outage.NewLog(log, "PostgreSQL, for retries,"),
		topicOutages:   outage.NewLogs(log),
		lockOutage:     outage.NewLog(log, "the lock of the lease, without which a standby waits until the lease expires,"),

		waker:    newWaker(db, cfg.Schema, log),
		wake:     make(chan struct{}, 1),
		heard:    make(chan struct{}, 1),
		retryNow: make(chan struct{}, 1),
		checkNow: make(chan struct{}, 1),
	}
	r.cfg.Hooks = cfg.Hooks.guarded(r.guardHook)
	r.retention.Callback = contain.NewCallback("Retention.Archive", log, contain.Limits{Grace: retention.ArchiveGrace}).Call
	r.breaker = breaker.New(breaker.Rules(cfg.Breaker), r.breakerChanged)
	r.health = newHealthState(cfg, r.breaker, r.postgresOutage, r.kafkaOutage)
	r.monitor = &monitor{watch: newWatch(db, cfg, r.breaker, r.health.setStale), outage: outage.NewLog(log, "PostgreSQL, for alerts,"), checkNow: r.checkNow}
	return r, nil
}

// guardHook returns what calls a hook.
func (r *Relay) guardHook(name string) func(call func()) {
	hook := contain.NewCallback("Hooks."+name, r.log, contain.HookLimits)
	return func(call func()) {
		ctx := context.Background() // a change of the breaker may come before Run
		if stop := r.stop.Load(); stop != nil {
			ctx = *stop
		}
		hook.Notify(ctx, call)
	}
}

// breakerChanged logs a change of the breaker, calls the hooks, wakes the retrier when
// the breaker closes, and the monitor unless it becomes half-open.
func (r *Relay) breakerChanged(from, to breaker.State, failureRate float64) {
	if to == breaker.Open && from == breaker.Closed {
		r.log.Error("outbox: too many sends fail, breaker opens", "failure_rate", percent(failureRate),
			"threshold", percent(r.cfg.Breaker.FailureRate), "open_for", r.cfg.Breaker.OpenFor)
		if r.cfg.Hooks.BreakerOpened != nil {
			r.cfg.Hooks.BreakerOpened(failureRate)
		}
	}
	r.log.Warn("outbox: breaker changed", "from", from.String(), "to", to.String())
	if r.cfg.Hooks.Breaker != nil {
		r.cfg.Hooks.Breaker(BreakerState(from), BreakerState(to))
	}
	if to == breaker.Closed {
		wait.Signal(r.retryNow)
	}
	if to != breaker.HalfOpen {
		wait.Signal(r.checkNow)
	}
}

// percent prints a share as "62.5%".
func percent(share float64) string {
	return strconv.FormatFloat(100*share, 'f', -1, 32) + "%"
}

// Waker returns the waker of this process, for transactions that record events. It works while Run does.
func (r *Relay) Waker() *Waker { return r.waker }

// Health reports the state of the relay without any I/O. The relay is live, but not
// ready, before Run is called and after a clean stop; and while PostgreSQL or Kafka is
// unavailable, because a restart does not bring them back. A standby is ready while it
// sees that a relay holds the lease.
//
// A leader whose cursor has not moved for longer than the lease lasts, although it has
// events to send, is not ready, whatever the cause. The package outboxhttp serves
// this to probes.
func (r *Relay) Health() RelayHealth { return r.health.report() }

// Run relays events until ctx is cancelled, then finishes the batch in flight,
// releases the lease so that a standby takes over at once, and returns nil. It
// may be called again afterwards; a second call at the same time returns
// [ErrRunning]. While Kafka and PostgreSQL answer, Run returns within 2 s and nothing
// that was sent is sent again. While Kafka does not answer, stopping takes until the send
// in flight has failed, at most about SendTimeout; the next Run sends it again.
//
// Outages of Kafka and PostgreSQL are waited out, not returned. The errors that
// Run returns need an operator: [ErrNotMigrated] and [ErrSequenceBehind], and
// [ErrHangs] after ctx is cancelled.
//
// Run panics if one of its goroutines does, after it has released the lease. The
// value is an error whose text has the stack of that goroutine.
func (r *Relay) Run(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	r.stop.Store(&ctx)
	r.health.runBegan()
	// A goroutine that hangs cannot be ended, only left alone.
	ended := make(chan runEnd, 1)
	go r.serveApart(ctx, ended)
	select {
	case end := <-ended:
		return end.result()
	case <-ctx.Done():
	}
	timer := time.NewTimer(r.stopLimit())
	defer timer.Stop()
	select {
	case end := <-ended:
		return end.result()
	case <-timer.C:
		err := fmt.Errorf("%w: relay %s", ErrHangs, r.cfg.Name)
		r.health.runEnded(err)
		return err
	}
}

// runEnd is how the work of Run ended: by a panic, or with an error or nil.
type runEnd struct {
	err   error
	crash *contain.Crash
}

func (e runEnd) result() error {
	if e.crash != nil {
		panic(*e.crash)
	}
	return e.err
}

// serveApart is the goroutine of Run. When it ends, Run may be called again.
func (r *Relay) serveApart(ctx context.Context, ended chan<- runEnd) {
	end := runEnd{err: errGoexit} // unless serve returns or panics
	defer func() {
		if v := recover(); v != nil {
			crash := contain.CrashOf(v)
			end = runEnd{crash.Panic, &crash}
		}
		r.health.runEnded(end.err)
		r.running.Store(false)
		ended <- end
	}()
	end.err = r.serve(ctx)
}

// errGoexit means that a function of the host, a hook of franz-go for example, has called
// runtime.Goexit in the goroutine of Run.
var errGoexit = errors.New("outbox: relay was ended by runtime.Goexit")

// hangGrace is how long Run waits for work that hangs, when it is told to stop.
const hangGrace = time.Second

// stopLimit is how long Run may take from now on, when it is told to stop: the batch in
// flight, and the lease. Work that already hangs is not waited for as long.
func (r *Relay) stopLimit() time.Duration {
	if r.health.hangs() {
		return hangGrace
	}
	return r.cfg.SendTimeout + lease.ReleaseTimeout + hangGrace
}

// serve stands by until it has the lease, leads until it loses the lease, and stands by
// again.
func (r *Relay) serve(ctx context.Context) error {
	defer pgsession.Of(r.leases.DB).Use(r.log)()
	r.member = r.waker.hub.Join(r.wake, r.heard, r.log)
	defer r.member.Close()
	for {
		l, err := r.standBy(ctx)
		if err != nil || l == nil {
			return err
		}
		err = r.lead(ctx, l)
		if !errors.Is(err, lease.ErrLeaseLost) {
			return err
		}
		r.log.Warn("outbox: lease lost, standing by", "holder", l.Holder, "epoch", l.Epoch)
	}
}

// standBy waits for the lease. It returns nil when ctx is cancelled first.
func (r *Relay) standBy(ctx context.Context) (*lease.Lease, error) {
	answered := outage.Announce(r.log, "PostgreSQL, or for a connection of its pool", r.cfg.Lease)
	defer answered()
	waited := false
	for ctx.Err() == nil {
		r.health.Progressed()
		bounded, cancel := context.WithTimeout(ctx, r.cfg.Lease)
		l, err := r.leases.Acquire(bounded)
		answered()
		if errors.Is(err, lease.ErrHeld) && waited {
			l, err = r.acquireFromGone(bounded)
		}
		cancel()
		pause := r.cfg.PollInterval
		switch {
		case err == nil:
			r.postgresOutage.Report(nil)
			r.logTaken(ctx, l, waited)
			return l, nil
		case pg.IsUndefined(err):
			return nil, pg.NotMigrated(r.cfg.Schema, err)
		case errors.Is(err, lease.ErrHeld):
			r.health.sawLease()
			r.postgresOutage.Report(nil)
			if !waited {
				waited = true
				r.logStandby()
			}
			r.reportClock()
			if r.leases.Other.Holder == "" { // it was released meanwhile
				continue
			}
		case ctx.Err() == nil:
			r.postgresOutage.Report(err)
			pause = r.postgresOutage.Backoff()
		}
		wait.Sleep(ctx, pause)
	}
	return nil, nil
}

// acquireFromGone takes the lease of a process that is gone, or returns ErrHeld.
func (r *Relay) acquireFromGone(ctx context.Context) (*lease.Lease, error) {
	l, err := r.leases.AcquireFromGone(ctx)
	if errors.Is(err, lease.ErrHeld) {
		return nil, err
	}
	r.lockOutage.Report(err)
	if err != nil {
		return nil, lease.ErrHeld
	}
	return l, nil
}

// logStandby says once what a standby waits for. If the relay that leads is gone, for example
// because it was killed and this process is its restart, its lease has to expire.
func (r *Relay) logStandby() {
	other := r.leases.Other
	if other.Lasts == 0 {
		r.log.Info("outbox: standing by, another process holds a lease that does not expire", "holder", other.Holder)
		return
	}
	r.log.Info("outbox: standing by, another process holds the lease; if that one is gone, this one takes over within at_most",
		"holder", other.Holder, "at_most", (other.Lasts + r.cfg.PollInterval).Round(time.Millisecond))
}

// logTaken logs that this process relays now, at INFO if it was said before that it waits.
func (r *Relay) logTaken(ctx context.Context, l *lease.Lease, waited bool) {
	level := slog.LevelDebug
	if waited {
		level = slog.LevelInfo
	}
	r.log.Log(ctx, level, "outbox: lease taken, this process relays", "holder", l.Holder, "epoch", l.Epoch)
	if shared := time.Until(l.ExclusiveAt); shared > 0 {
		r.log.Info("outbox: a process that relayed before was taken for gone, and its lease has not expired: until then nothing that failed is tried again, and nothing dies",
			"for", shared.Round(time.Millisecond))
	}
}

// reportClock logs once that the clock of the database was set back while another process
// holds the lease: by that clock, the lease lasts so much longer if its holder is gone.
func (r *Relay) reportClock() {
	late := r.leases.Other.SetBack > time.Second
	if late && !r.clockReported {
		r.log.Warn("outbox: the clock of PostgreSQL was set back; if the relay that leads is gone with its host, taking over takes so much longer",
			"set_back", r.leases.Other.SetBack.Round(time.Millisecond))
	}
	r.clockReported = late
}

// lead relays until ctx is cancelled or the lease is lost. Whatever ends it, also a panic,
// it ends all goroutines, and then releases the lease.
func (r *Relay) lead(ctx context.Context, l *lease.Lease) (err error) {
	// Cancelling ctx must not tear a batch apart: Kafka may already hold its
	// records, and if the cursor does not move they are sent again. Only the loss of
	// the lease ends a batch, or a batch that takes too long to finish.
	held, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	stopped := context.AfterFunc(ctx, func() {
		wait.Sleep(held, r.cfg.SendTimeout)
		lose(errTooLate)
	})
	defer stopped()

	defer r.member.Lead(false)
	defer r.notifyLeading(false)
	defer func() { r.release(ctx, l, err) }()
	leads := lease.Leadership{Lease: l, Held: held, Lose: lose, StatementTimeout: r.cfg.Lease}
	renewing := leads.NewGroup()
	defer renewing.Wait()
	defer lose(nil)
	renewing.Go(func() { r.keepLease(leads) })
	renewing.Go(func() { r.keepLock(leads) })
	r.member.Lead(true)
	r.notifyLeading(true) // when the lease is renewed, because a hook may take long
	err = r.work(ctx, leads)
	if errors.Is(err, errTooLate) {
		r.log.Warn("outbox: stopped before the batch in flight was finished; it will be sent again")
		err = nil
	}
	return err
}

// release lets a standby take over at once, unless the lease has gone already.
func (r *Relay) release(ctx context.Context, l *lease.Lease, err error) {
	defer func() {
		if c := l.Claim.Load(); c != nil {
			r.leases.Unlock(ctx, c.Lock)
		}
	}()
	if errors.Is(err, lease.ErrLeaseLost) || errors.Is(err, ErrNotMigrated) { // without tables there is no lease either
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), lease.ReleaseTimeout)
	defer cancel()
	if err := r.leases.GiveUp(ctx, l); err != nil {
		r.log.Warn("outbox: lease not released, a standby waits until it expires", "error", err)
	}
}

func (r *Relay) notifyLeading(leading bool) {
	r.health.setLeading(leading)
	if r.cfg.Hooks.Leading != nil {
		r.cfg.Hooks.Leading(leading)
	}
}

// errTooLate ends a batch that is not finished SendTimeout after Run was told
// to stop.
var errTooLate = errors.New("not finished in time")

// work makes the parts of a leading relay and runs them until ctx is cancelled or the
// lease is lost. When it returns, no record is on its way any more.
func (r *Relay) work(ctx context.Context, leads lease.Leadership) error {
	parked, bad := relay.NewParking(r.cfg.PassFailedKeys), places.NewRegistry(r.topicOutages)
	producer := r.newProducer(leads, r.breaker)
	defer producer.Close()
	session := relay.NewSession(relay.SessionParts{
		Leadership: leads, Cfg: r.cfg.rules(), Cursors: r.cursors, Leases: r.leases, Failed: r.failed, Places: bad,
		Deliverer: r.newDeliverer(producer, bad, r.kafkaOutage, r.health.Progressed),
		Parked:    parked, Health: r.health, Log: r.log, Outage: r.postgresOutage, Wake: r.wake, Heard: r.heard,
		Ticks: &r.cursors.Glances.Ticks, EventDied: func() { wait.Signal(r.checkNow) },
	})
	defer r.cursors.Glances.Join()()
	cleaner := retention.NewCleaner(leads, r.cleanerConfig(), r.retention, session.Backlog.Load, r.log)
	shared := relay.RetrierParts{
		Leadership: leads, Cfg: r.cfg.rules(), Store: r.failed, Parked: parked, Places: bad, Probed: new(relay.ProbedKeys),
		Breaker: r.breaker, Log: r.log, RetryNow: r.retryNow, EventDied: func() { wait.Signal(r.checkNow) },
	}
	retry := func(ctx context.Context) { r.retry(ctx, shared) }
	probe := func(ctx context.Context) { r.probe(ctx, shared) }
	return session.Run(ctx, retry, probe, cleaner.Run, r.monitor.run)
}

func (r *Relay) cleanerConfig() retention.CleanerConfig {
	return retention.CleanerConfig{Name: r.cfg.Name, Rules: r.cfg.Retention.rules(), Poll: r.cfg.PollInterval, Removed: removedHook(r.cfg.Hooks.RowsRemoved)}
}

// retry runs a retrier with a producer of its own.
func (r *Relay) retry(ctx context.Context, parts relay.RetrierParts) {
	parts.Lease.AwaitExclusive(ctx)
	producer := r.newProducer(parts.Leadership, r.breaker)
	defer producer.Close()
	parts.Outage = r.retryOutage
	parts.Deliverer = r.newDeliverer(producer, parts.Places, outage.NewLog(r.log, "Kafka, for retries,"), func() {})
	relay.NewRetrier(parts).Run(ctx)
}

// probe runs a retrier that probes bad places, with a producer of its own. The breaker
// does not learn its results, which say nothing about Kafka. Neither are outages logged
// that the session and the other retrier log.
func (r *Relay) probe(ctx context.Context, parts relay.RetrierParts) {
	parts.Lease.AwaitExclusive(ctx)
	producer := r.newProducer(parts.Leadership, nil)
	defer producer.Close()
	quiet := slog.New(slog.DiscardHandler)
	parts.Outage = outage.NewLog(quiet, "PostgreSQL")
	parts.Deliverer = r.newDeliverer(producer, parts.Places, outage.NewLog(quiet, "Kafka"), func() {})
	relay.NewRetrier(parts).RunProbes(ctx)
}

// NewProducer makes a producer that a breaker stops, if it is not nil.
func (r *Relay) newProducer(leads lease.Leadership, b *breaker.Breaker) *relay.Producer {
	return relay.NewProducer(relay.ProducerConfig{
		Opts: r.opts, Form: envelope.RecordForm{InJSON: r.cfg.Mode == Structured, Further: r.cfg.further()}, SendTimeout: r.cfg.SendTimeout, Linger: r.cfg.Linger, PassFailedKeys: r.cfg.PassFailedKeys,
	}, leads.Lease, b)
}

func (r *Relay) newDeliverer(to relay.Sender, bad *places.Registry, kafkaOutage *outage.Log, onSend func()) *relay.Deliverer {
	return &relay.Deliverer{relay.DeliveryParts{
		Sender: to, Breaker: r.breaker, Places: bad, Log: r.log, KafkaOutage: kafkaOutage, PassFailedKeys: r.cfg.PassFailedKeys,
		OnSend: onSend, OnSent: sentHook(r.cfg.Hooks.Sent), OnRecovered: func() { wait.Signal(r.retryNow) },
	}}
}

// keepLease renews the lease until held ends, and ends held with ErrLeaseLost when the
// lease is gone, could not be renewed before it expired, or is given up because the
// goroutine of Run hangs: a lease is for those who work.
func (r *Relay) keepLease(leads lease.Leadership) {
	l, pause := leads.Lease, r.cfg.Lease/3
	for {
		wait.Sleep(leads.Held, min(pause, time.Until(*l.Until.Load())))
		if leads.Held.Err() != nil {
			return
		}
		if r.health.hangs() {
			r.giveUpHanging(leads)
			return
		}
		// Half of the time that is left, so that another connection may do it.
		ctx, cancel := context.WithTimeout(leads.Held, time.Until(*l.Until.Load())/2)
		err := r.leases.Renew(ctx, l)
		cancel()
		if errors.Is(err, lease.ErrLeaseLost) || !l.Held() {
			leads.Lose(lease.ErrLeaseLost)
			return
		}
		pause = r.cfg.Lease / 3
		if err != nil { // the session reports outages of PostgreSQL
			pause = r.cfg.Lease / 30
		}
	}
}

// lockRetry is how long a leader waits that has not got the lock of its lease.
const lockRetry = 250 * time.Millisecond

// keepLock keeps the lock of the lease until held ends, so that a standby finds out quickly if this process is gone. When the
// lock is lost, the relay sends nothing until outbox_lease says so.
func (r *Relay) keepLock(leads lease.Leadership) {
	for leads.Held.Err() == nil {
		claim := leads.Lease.Claim.Load()
		if claim == nil {
			ctx, cancel := context.WithTimeout(leads.Held, r.cfg.Lease)
			var err error
			claim, err = r.leases.LockFor(ctx, leads.Lease)
			cancel()
			if !errors.Is(err, lease.ErrHeld) { // the session says what is wrong with it
				r.lockOutage.Report(err)
			}
		}
		if claim == nil {
			wait.Sleep(leads.Held, lockRetry)
			continue
		}
		select {
		case <-claim.Lost:
			r.withdraw(leads, claim)
			wait.Sleep(leads.Held, lockRetry)
		case <-leads.Held.Done():
		}
	}
}

// withdraw has outbox_lease say that a lock is lost.
func (r *Relay) withdraw(leads lease.Leadership, claim *lease.LockClaim) {
	pause := 50 * time.Millisecond
	for leads.Held.Err() == nil && leads.Lease.Claim.Load() == claim {
		ctx, cancel := context.WithTimeout(leads.Held, r.cfg.Lease/3)
		err := r.leases.Renew(ctx, leads.Lease)
		cancel()
		if errors.Is(err, lease.ErrLeaseLost) {
			leads.Lose(lease.ErrLeaseLost)
			return
		}
		if err != nil { // the session reports outages of PostgreSQL
			wait.Sleep(leads.Held, pause)
			pause = min(2*pause, lockRetry)
		}
	}
}

// giveUpHanging lets another process relay, because the goroutine of Run does not go on.
// If it ever does, it finds that its lease has expired, and sends nothing.
func (r *Relay) giveUpHanging(leads lease.Leadership) {
	r.log.Error("outbox: Run does not go on, the lease is given up so that another process can relay", "for", r.health.hangsAfter())
	leads.Lease.Expire()
	leads.Lose(lease.ErrLeaseLost)
	r.health.gaveUp()
	r.release(leads.Held, leads.Lease, nil)
}
