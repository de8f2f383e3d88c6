package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// RelayConfig tunes a [Relay]. The zero value is ready for production.
type RelayConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// Name of the relay, at most 100 characters. Each name has a cursor of its
	// own and publishes every event; of the processes that run the same name one
	// relays and the others stand by. Empty means default.
	Name string

	// Mode is how events travel as CloudEvents. Zero means [Binary].
	Mode Mode

	// BatchSize is the most events that are sent before the cursor moves, at most
	// 10,000. A crash repeats up to this many. Batches come as large as there are
	// events: small where latency matters, of this size after an outage, smaller
	// again where several events make 32 MiB. Zero means 5,000.
	BatchSize int

	// PollInterval is how long an idle relay waits before it looks for events,
	// and a standby before it looks at the lease. Zero means 500 ms.
	PollInterval time.Duration

	// DeliveryTimeout, SendTimeout and Lease must grow in this order.
	//
	// DeliveryTimeout is when a record without an answer from Kafka counts as
	// failed; it is sent again and may then arrive twice. At least 1 s. Zero
	// means 10 s.
	DeliveryTimeout time.Duration
	// SendTimeout bounds one send, and so about how long [Relay.Run] outlives
	// its context. Zero means 15 s.
	SendTimeout time.Duration
	// Lease is how long a relay that has died keeps its standby waiting. It is
	// renewed at a third of this. Zero means 30 s.
	Lease time.Duration

	// RetryInterval is how long a relay waits before it looks for failed events
	// that are due. It looks at once when the breaker closes. Zero means 5 s.
	RetryInterval time.Duration
	// MaxRetries is how many retries of an event Kafka refuses, after 1, 2, 4 …
	// 300 s, before it is dead. An outage, a missing topic or a lapsed credential
	// uses up none. Zero means 10.
	MaxRetries int
	// HoldDead keeps the later events of a dead one's key until somebody decides.
	// Without it they go on.
	HoldDead bool
	// RetryDeadAfter lets dead events be tried again without an operator: so long after the
	// death of an event whose last error was of a class, message_too_large for
	// example, it has all its tries again. Nil means that operators decide.
	RetryDeadAfter map[string]time.Duration
	// KeepSent keeps the rows of failed events in outbox_failed, as resolved, after
	// they were sent. Without it they are removed.
	KeepSent bool

	// Breaker stops the sending for a while when Kafka fails.
	Breaker BreakerConfig

	// Retention says how long rows stay in the tables.
	Retention RetentionConfig

	// Alerts says when somebody is told that something is wrong with this relay, and
	// who. The process that leads does it; it also tells of relays of the schema that
	// nobody leads. See [Monitor] for processes without a relay.
	Alerts AlertConfig

	// Hooks are told what happens.
	Hooks RelayHooks

	// Logger receives what changes: ERROR for an event that is dead and for a
	// breaker that opens, WARN for trouble that begins or ends, and DEBUG for the
	// rest. Nil means slog.Default().
	Logger *slog.Logger
}

const (
	defaultRelayName    = "default"
	defaultBatchSize    = 5000
	maxBatchSize        = 10_000
	defaultPollInterval = 500 * time.Millisecond
	defaultDelivery     = 10 * time.Second
	minDelivery         = time.Second // franz-go takes no less
	defaultSend         = 15 * time.Second
	defaultLease        = 30 * time.Second
	defaultRetry        = 5 * time.Second
	defaultMaxRetries   = 10
	maxRelayName        = 100
)

func (c RelayConfig) withDefaults() RelayConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.Name = cmp.Or(c.Name, defaultRelayName)
	c.BatchSize = cmp.Or(c.BatchSize, defaultBatchSize)
	c.PollInterval = cmp.Or(c.PollInterval, defaultPollInterval)
	c.DeliveryTimeout = cmp.Or(c.DeliveryTimeout, defaultDelivery)
	c.SendTimeout = cmp.Or(c.SendTimeout, defaultSend)
	c.Lease = cmp.Or(c.Lease, defaultLease)
	c.RetryInterval = cmp.Or(c.RetryInterval, defaultRetry)
	c.MaxRetries = cmp.Or(c.MaxRetries, defaultMaxRetries)
	c.Breaker = c.Breaker.withDefaults()
	c.Retention = c.Retention.withDefaults()
	c.Alerts = c.Alerts.withDefaults()
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.Alerts.Alerter == nil {
		c.Alerts.Alerter = LogAlerter{Logger: c.Logger, quiet: true}
	}
	return c
}

func (c RelayConfig) validate() error {
	errs := []error{
		check.Schema(c.Schema),
		check.NotNegative("BatchSize", c.BatchSize),
		check.NotAbove("BatchSize", c.BatchSize, maxBatchSize),
		check.NotNegative("PollInterval", c.PollInterval),
		check.NotNegative("SendTimeout", c.SendTimeout),
		check.NotNegative("Lease", c.Lease),
		check.NotNegative("RetryInterval", c.RetryInterval),
		check.NotNegative("MaxRetries", c.MaxRetries),
		c.Breaker.validate(),
		c.Retention.validate(),
		c.Alerts.validate(),
	}
	for _, class := range slices.Sorted(maps.Keys(c.RetryDeadAfter)) {
		if c.RetryDeadAfter[class] <= 0 {
			errs = append(errs, fmt.Errorf("field RetryDeadAfter of %q is %v: must be above 0", class, c.RetryDeadAfter[class]))
		}
	}
	if err := check.Text(c.Name, maxRelayName); err != nil {
		errs = append(errs, fmt.Errorf("field Name %w", err))
	}
	if c.Mode != Binary && c.Mode != Structured {
		errs = append(errs, fmt.Errorf("field Mode is %d: must be Binary or Structured", c.Mode))
	}
	if c.DeliveryTimeout < minDelivery {
		errs = append(errs, fmt.Errorf("field DeliveryTimeout is %v: at least %v", c.DeliveryTimeout, minDelivery))
	}
	if c.DeliveryTimeout >= c.SendTimeout {
		errs = append(errs, fmt.Errorf("field DeliveryTimeout is %v: must be shorter than SendTimeout, %v", c.DeliveryTimeout, c.SendTimeout))
	}
	if c.SendTimeout >= c.Lease {
		errs = append(errs, fmt.Errorf("field SendTimeout is %v: must be shorter than Lease, %v", c.SendTimeout, c.Lease))
	}
	return errors.Join(errs...)
}

// Relay hands committed events to Kafka: each at least once, those of one
// partition key in order. Any number of processes may run it; one of them works.
type Relay struct {
	cfg     RelayConfig
	opts    []kgo.Opt // for Kafka
	leases  *leases
	cursors *cursors
	failed  *failedStore
	log     *slog.Logger
	breaker *breaker
	outages *outage.Logs

	// An outage may outlast the lease, and is still the same one.
	postgresOutage, kafkaOutage *outage.Log // belong to the goroutine of Run
	retryOutage                 *outage.Log // belongs to the retrier
	alertOutage                 *outage.Log // belongs to keepWatch, as watch does
	retention                   *retention
	watch                       *watch

	breakerClosed chan struct{} // holds at most one wish to retry at once
	alarm         chan struct{} // holds at most one wish to check at once

	running atomic.Bool
	vitals  vitals
	wake    chan struct{} // holds at most one wish to look at once
}

// NewRelay returns a relay that reads from db and produces with clients that it
// makes from opts when it runs: brokers, TLS, SASL, hooks and compression are
// the caller's, acks=all and idempotence are the relay's. Options that name a
// group, topics to consume or a transactional id, or that give up idempotence or
// automatic flushing, are refused. The error names every bad field and option.
//
// The topics must exist, or be creatable with kgo.AllowAutoTopicCreation: events
// of a missing topic wait until it is there, and hold up no others.
//
// NewRelay does no I/O, and makes and closes one client to look at the options.
// A running relay uses up to six connections of db; closing db stays with the
// caller.
func NewRelay(db *pgxpool.Pool, opts []kgo.Opt, cfg RelayConfig) (*Relay, error) {
	cfg = cfg.withDefaults()
	err := errors.Join(cfg.validate(), kafka.CheckProducerOpts(opts))
	if err == nil {
		err = kafka.ValidateOpts(kafka.ProducerOpts(opts, cfg.DeliveryTimeout))
	}
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: relay config: %w", err)
	}
	r := &Relay{
		cfg:     cfg,
		opts:    kafka.ProducerOpts(opts, cfg.DeliveryTimeout),
		leases:  newLeases(db, cfg.Schema, cfg.Name, cfg.Lease),
		cursors: newCursors(db, cfg.Schema, cfg.Name),
		failed:  newFailedStore(db, cfg.Schema, cfg.Name, cfg.HoldDead),
		log:     cfg.Logger.With("relay", cfg.Name),
		wake:    make(chan struct{}, 1),

		retention: newRetention(db, cfg.Schema, cfg.Retention),
		watch:     newWatch(db, cfg.Schema, cfg.Alerts, cfg.Logger),

		breakerClosed: make(chan struct{}, 1),
		alarm:         make(chan struct{}, 1),
	}
	r.breaker = newBreaker(cfg.Breaker, r.breakerChanged)
	r.watch.own, r.watch.breaker = cfg.Name, r.breaker.state
	r.outages = outage.NewLogs(r.log)
	r.postgresOutage = outage.NewLog(r.log, "PostgreSQL")
	r.kafkaOutage = outage.NewLog(r.log, "Kafka")
	r.retryOutage = outage.NewLog(r.log, "PostgreSQL, for retries,")
	r.alertOutage = outage.NewLog(r.log, "PostgreSQL, for alerts,")
	return r, nil
}

// breakerChanged says that the breaker has, and lets the retry loop look at once
// when it closes.
func (r *Relay) breakerChanged(from, to BreakerState) {
	if to == BreakerOpen && from == BreakerClosed {
		r.log.Error("outbox: too many sends fail, breaker opens", "failure_rate", r.cfg.Breaker.FailureRate, "open_for", r.cfg.Breaker.OpenFor)
	}
	r.log.Warn("outbox: breaker changed", "from", from.String(), "to", to.String())
	if r.cfg.Hooks.Breaker != nil {
		r.cfg.Hooks.Breaker(from, to)
	}
	if to == BreakerClosed {
		wait.Signal(r.breakerClosed)
	}
	if to != BreakerHalfOpen {
		wait.Signal(r.alarm)
	}
}

// Wake makes the relay look for events now instead of at its next poll. Call it
// after a commit; it never blocks. Only a relay of this process is woken: when
// another one holds the lease, that one sees the event at its poll.
func (r *Relay) Wake() { wait.Signal(r.wake) }

// Run relays events until ctx is cancelled, then finishes the batch in flight,
// releases the lease so that a standby takes over at once, and returns nil. It
// may be called again afterwards; a second call at the same time returns
// [ErrRunning]. While Kafka does not answer, stopping takes until the send in
// flight has failed, at most about SendTimeout; the next Run sends it again.
//
// Outages of Kafka and PostgreSQL are waited out, not returned. What is returned
// needs a person: [ErrNotMigrated] and [ErrSequenceBehind].
func (r *Relay) Run(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer r.running.Store(false)
	r.vitals.begin()
	err := r.serve(ctx)
	r.vitals.end(err)
	return err
}

// serve stands by and leads in turns.
func (r *Relay) serve(ctx context.Context) error {
	for {
		l, err := r.standBy(ctx)
		if err != nil || l == nil {
			return err
		}
		err = r.lead(ctx, l)
		if !errors.Is(err, errLeaseLost) {
			return err
		}
		r.log.Warn("outbox: lease lost, standing by", "holder", l.holder, "epoch", l.epoch)
	}
}

// standBy waits for the lease. It returns nil when ctx is cancelled first.
func (r *Relay) standBy(ctx context.Context) (*lease, error) {
	for ctx.Err() == nil {
		r.vitals.note(nil)
		look, cancel := r.soon(ctx)
		l, err := r.leases.acquire(look)
		cancel()
		pause := r.cfg.PollInterval
		switch {
		case err == nil:
			r.postgresOutage.Report(nil)
			r.log.Debug("outbox: lease taken", "holder", l.holder, "epoch", l.epoch)
			return l, nil
		case pg.IsUndefined(err):
			return nil, r.notMigrated(err)
		case errors.Is(err, errHeld):
			r.vitals.note(sawLease)
			r.postgresOutage.Report(nil)
		case ctx.Err() == nil:
			r.postgresOutage.Report(err)
			pause = r.postgresOutage.Backoff()
		}
		wait.Sleep(ctx, pause)
	}
	return nil, nil
}

// soon bounds a statement, unless it is one that may take as long as it takes. A
// connection can go dead without a word, and TCP needs a quarter of an hour to
// find out: meanwhile a standby would not take over, and a leader do nothing with
// the lease that keepLease, on another connection, renews for it.
func (r *Relay) soon(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, r.cfg.Lease)
}

// notMigrated says where a table was looked for that is not there.
func (r *Relay) notMigrated(err error) error {
	return fmt.Errorf("%w in schema %s: %w", ErrNotMigrated, r.cfg.Schema, err)
}

// releaseTimeout is what Run spends at most to let a standby take over at once.
const releaseTimeout = 2 * time.Second

// lead relays until ctx is cancelled or the lease is lost.
func (r *Relay) lead(ctx context.Context, l *lease) error {
	// Cancelling ctx must not tear a batch apart: Kafka may already hold its
	// records, and a cursor that did not move sends them again. What does tear it
	// apart is the loss of the lease, and a batch that takes too long to finish.
	held, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	stopped := context.AfterFunc(ctx, func() {
		wait.Sleep(held, r.cfg.SendTimeout)
		lose(errTooLate)
	})
	defer stopped()

	r.tellLeading(true)
	defer r.tellLeading(false)
	var renewing sync.WaitGroup
	renewing.Go(func() { r.keepLease(held, l, lose) })
	s := newSession(r, l, held)
	err := s.run(ctx)
	s.close() // after this no record is on its way any more
	lose(nil)
	renewing.Wait()
	if errors.Is(err, errLeaseLost) {
		return err
	}
	if errors.Is(err, errTooLate) {
		r.log.Warn("outbox: stopped before the batch in flight was finished; it will be sent again")
		err = nil
	}
	if errors.Is(err, ErrNotMigrated) {
		return err // and there is no lease either
	}
	released, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	if rerr := r.leases.giveUp(released, l); rerr != nil {
		r.log.Warn("outbox: lease not released, a standby waits until it expires", "error", rerr)
	}
	return err
}

func (r *Relay) tellLeading(leading bool) {
	r.vitals.lead(leading)
	if r.cfg.Hooks.Leading != nil {
		r.cfg.Hooks.Leading(leading)
	}
}

// errTooLate ends a batch that is not finished SendTimeout after Run was told
// to stop.
var errTooLate = errors.New("not finished in time")

// keepLease renews the lease until held ends, and ends held with errLeaseLost
// when the lease is gone or could not be renewed before it expired.
func (r *Relay) keepLease(held context.Context, l *lease, lose context.CancelCauseFunc) {
	pause := r.cfg.Lease / 3
	for {
		wait.Sleep(held, min(pause, time.Until(*l.until.Load())))
		if held.Err() != nil {
			return
		}
		// Half of the time that is left, so that another connection may do it.
		ctx, cancel := context.WithTimeout(held, time.Until(*l.until.Load())/2)
		err := r.leases.renew(ctx, l)
		cancel()
		if errors.Is(err, errLeaseLost) || !l.held() {
			lose(errLeaseLost)
			return
		}
		pause = r.cfg.Lease / 3
		if err != nil { // the session reports what ails PostgreSQL
			pause = r.cfg.Lease / 30
		}
	}
}
