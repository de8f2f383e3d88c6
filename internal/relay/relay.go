package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/breaker"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/cursor"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/mover"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/internal/wakeup"
	"github.com/outboxgo/outbox/internal/watch"
)

var (
	// ErrRunning is returned by [Relay.Run] while another call of it is running.
	ErrRunning = check.ErrRunning
	// ErrHangs is returned by [Relay.Run] when it was told to stop and its work does not end.
	ErrHangs = errors.New("Run does not stop")
)

// Config is what a relay is made from.
type Config struct {
	DB    *pgxpool.Pool
	Kafka []kgo.Opt // as the host gave them
	// Transactional are the options of clients with transactions. They are needed if Rules.ExactlyOnce is set.
	Transactional []kgo.Opt
	Rules         Rules
	Hooks         Hooks
	// Alerts configures the alerts. The relay fills in its name and its own state.
	Alerts watch.Config
	Hub    *wakeup.Hub
	Logger *slog.Logger // of the relay: its lines name the relay
}

// Relay stands by for the lease, and sends the events of an outbox while it has the lease.
type Relay struct {
	rules         Rules
	hooks         Hooks
	kafka         []kgo.Opt
	transactional []kgo.Opt
	leases        *lease.Store
	cursors       *cursor.Store
	failed        *cursor.Failed
	retention     *retention.Store
	monitor       *watch.Monitor
	hub           *wakeup.Hub
	log           *slog.Logger
	breaker       *breaker.Breaker
	health        *healthState
	contact       *kafka.Contact

	// An outage may last longer than a lease, so these logs are the relay's and not the session's. Those of the retrier
	// end with the lease: another process tries what it has tried.
	postgresOutage   *outage.Log
	kafkaOutage      *outage.Log // of the session, and of contact
	retryOutage      *outage.Log // only the retrier, of PostgreSQL
	retryKafkaOutage *outage.Log // only the retrier
	cleanerOutages   *outage.Logs
	moverOutages     mover.Outages
	topicOutages     *outage.Logs // topics and partitions
	lockOutage       *outage.Log  // only the goroutine that takes the lock of the lease: standBy, then the upkeep

	// Each holds at most one wake request.
	wake     chan struct{} // for the session: this process has recorded events
	heard    chan struct{} // for the session: other processes have recorded events
	retryNow chan struct{} // for the retrier: the breaker has closed, or a partition has recovered
	checkNow chan struct{} // for the monitor: the breaker has changed, or an event has died

	member        *wakeup.Member // of the Run under way; only its goroutine
	clockReported bool           // by reportClock; only the goroutine of Run
	checked       bool           // the sessions of the pool; only the goroutine of Run
	saidElsewhere time.Time      // the last answer of Kafka that this standby has told a leader; only the goroutine of Run
	askedWaits    time.Time      // when this standby asked last whether events wait; only the goroutine of Run
	waits         bool           // the answer

	running atomic.Bool
	stop    atomic.Pointer[context.Context] // of the last Run; hooks are not waited for once it has ended
}

// whatKafka is the name of Kafka in the log.
const whatKafka = "Kafka"

// ProducerOpts returns the options of the Kafka clients that a relay makes from those of the host. Its error
// names every option that a relay cannot have.
func ProducerOpts(opts []kgo.Opt, deliveryTimeout time.Duration) ([]kgo.Opt, error) {
	all := func(opts []kgo.Opt) []kgo.Opt {
		return append(kafka.ProducerOpts(opts, deliveryTimeout), kafka.FlushOpts(opts)...)
	}
	if err := kafka.CheckProducerOpts(opts); err != nil {
		return nil, err
	}
	if err := kafka.ValidateOpts(opts, all); err != nil {
		return nil, err
	}
	return all(opts), nil
}

// TransactionOpts returns the options of clients with transactions, which Kafka aborts after a time without an end.
func TransactionOpts(opts []kgo.Opt, deliveryTimeout time.Duration) []kgo.Opt {
	return append(kafka.TransactionOpts(opts, max(deliveryTimeout, minTransaction)), kafka.FlushOpts(opts)...)
}

// minTransaction is so long that a transaction lasts through short outages of PostgreSQL.
const minTransaction = 10 * time.Second

// New returns a relay. It does no I/O.
func New(c Config) *Relay {
	rules, log := c.Rules, c.Logger
	r := &Relay{
		rules:         rules,
		kafka:         c.Kafka,
		transactional: c.Transactional,
		leases:        lease.NewStore(c.DB, rules.Schema, rules.Name, rules.Lease),
		cursors:       cursor.NewStore(c.DB, rules.Schema, rules.Name),
		failed:        cursor.NewFailed(c.DB, rules.Schema, rules.Name, rules.HoldDead),
		retention:     retention.NewStore(c.DB, rules.Schema, rules.Retention),
		hub:           c.Hub,
		log:           log,

		postgresOutage:   outage.NewLog(log, "PostgreSQL"),
		kafkaOutage:      outage.NewLog(log, whatKafka),
		retryOutage:      outage.NewLog(log, "PostgreSQL, for retries,"),
		retryKafkaOutage: outage.NewLog(log, "Kafka, for retries,"),
		topicOutages:     outage.NewLogs(log),
		cleanerOutages:   outage.NewLogs(log),
		moverOutages:     mover.NewOutages(log),
		lockOutage:       outage.NewLog(log, "the lock of the lease, without which a standby waits until the lease expires,"),

		wake:     make(chan struct{}, 1),
		heard:    make(chan struct{}, 1),
		retryNow: make(chan struct{}, 1),
		checkNow: make(chan struct{}, 1),
	}
	if rules.ExactlyOnce != "" {
		r.cursors.UseTopic(rules.ExactlyOnce)
	}
	r.leases.Blocked = r.logBlocked
	r.leases.Says = r.says
	r.leases.HeardElsewhere = func(at time.Time) { r.health.heardElsewhere(at) }
	batch, _ := kafka.LargestBatch(c.Kafka) // NewRelay has validated these options
	most := cursor.LargestEvent(int(batch))
	r.cursors.Most, r.failed.Most, r.retention.Most = most, most, most
	r.hooks = c.Hooks.guarded(r.guardHook)
	r.retention.Callback = contain.NewCallback("Retention.Archive", log, contain.Limits{Grace: retention.ArchiveGrace}).Call
	r.breaker = breaker.New(rules.Breaker, r.breakerChanged)
	r.contact = kafka.NewContact(c.Kafka, true, func(_ time.Time, err error, attrs ...any) { r.kafkaOutage.Report(err, attrs...) })
	r.health = newHealthState(rules, r.breaker, r.postgresOutage, r.kafkaOutage)
	r.health.contact, r.health.moves = r.contact, r.moverOutages.Move
	alerts := c.Alerts
	alerts.Relay, alerts.StaleEvents = rules.Name, r.health.setStale
	alerts.BreakerClosed = func() bool { return r.breaker.State() == breaker.Closed }
	r.monitor = watch.NewMonitor(watch.NewStore(c.DB, rules.Schema), alerts, log, r.checkNow)
	return r
}

// says returns what this process writes into outbox_lease while it leads: its state, and when Kafka answered last.
func (r *Relay) says() (outage.State, time.Time) {
	h := r.health.report()
	says := outage.State{Works: h.Works && h.Live, Reasons: h.Reasons, Outages: h.Outages}
	if h.Breaker != breaker.Closed {
		says.Breakers = []outage.Breaker{{State: h.Breaker.String(), Since: r.health.openedAt()}}
	}
	return says, r.contact.LastAnswer()
}

// Cursors returns the store of the relay's positions, for tests.
func (r *Relay) Cursors() *cursor.Store { return r.cursors }

// guardHook returns a function that calls a hook, contains its panics and does not wait for it without a bound.
func (r *Relay) guardHook(name string) func(call func()) {
	hook := contain.NewCallback("Hooks."+name, r.log, contain.HookLimits)
	return func(call func()) {
		ctx := context.Background() // the breaker may change before Run
		if stop := r.stop.Load(); stop != nil {
			ctx = *stop
		}
		hook.Notify(ctx, call)
	}
}

// breakerChanged logs a change of the breaker and calls the hooks. It wakes the retrier when the breaker closes, and
// the monitor unless the breaker becomes half-open.
func (r *Relay) breakerChanged(from, to breaker.State, failureRate float64) {
	if to == breaker.Open && from == breaker.Closed {
		r.log.Error("outbox: too many sends fail, breaker opens", "failure_rate", percent(failureRate),
			"threshold", percent(r.rules.Breaker.FailureRate), "open_for", r.rules.Breaker.OpenFor)
	} else {
		failureRate = 0
	}
	r.health.breakerChanged(from, to)
	r.log.Warn("outbox: breaker changed", "from", from.String(), "to", to.String())
	if r.hooks.Breaker != nil {
		r.hooks.Breaker(from, to, failureRate)
	}
	if to == breaker.Closed {
		wait.Signal(r.retryNow)
	}
	if to != breaker.HalfOpen {
		wait.Signal(r.checkNow)
	}
}

// Run relays events until ctx is cancelled, then finishes the batch in flight and releases the lease. It waits out
// outages of Kafka and PostgreSQL. A second call at the same time returns [ErrRunning]. If the work does not end after
// ctx was cancelled, Run returns [ErrHangs], and [ErrRunning] until the work has ended. If a goroutine of the
// relay panics, Run releases the lease and panics.
func (r *Relay) Run(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	r.stop.Store(&ctx)
	r.health.runBegan()
	// A goroutine that hangs cannot be ended, so the work has a goroutine that Run can leave.
	ended := make(chan runEnd, 1)
	go r.work(ctx, ended)
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
		err := fmt.Errorf("%w: relay %s", ErrHangs, r.rules.Name)
		r.health.runEnded(err)
		return err
	}
}

// runEnd says how the work of Run ended: with a panic, with an error, or with nil.
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

// work serves in a goroutine of its own. Once it has ended, Run may be called again.
func (r *Relay) work(ctx context.Context, ended chan<- runEnd) {
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

// errGoexit means that a function of the host, such as a hook of franz-go, has called runtime.Goexit in the
// goroutine of Run.
var errGoexit = errors.New("Run was ended by runtime.Goexit")

// hangGrace is how long Run waits for work that hangs, when it is told to stop.
const hangGrace = time.Second

// stopLimit returns how long Run may take after it was told to stop: the time of the batch in flight and of the
// statement that releases the lease, or hangGrace if the work hangs already.
func (r *Relay) stopLimit() time.Duration {
	if r.health.hangs() {
		return hangGrace
	}
	return r.rules.SendTimeout + lease.ReleaseTimeout + hangGrace
}

// serve stands by until it has the lease, leads until it loses the lease, and stands by again.
func (r *Relay) serve(ctx context.Context) error {
	ctx, end := context.WithCancel(ctx)
	asking := contain.NewGroup(func(*contain.Panic) { end() })
	asking.Go(func() { r.contact.Run(ctx) })
	defer asking.Wait()
	defer end()
	defer pgsession.Of(r.leases.DB).Use(r.log)()
	r.member = r.hub.Join(r.wake, r.heard, r.log)
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
