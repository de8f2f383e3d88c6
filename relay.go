package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/relay"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
)

// RelayConfig tunes a [Relay]. The zero value is ready for production.
type RelayConfig struct {
	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// Name is the name of the relay, at most 100 characters, not beginning with worker: or consumer:. Each name has its
	// own cursor and publishes every event. Empty means default.
	Name string

	// Mode is the CloudEvents mode of the records: [Binary] or [Structured]. Zero means [Binary].
	Mode Mode
	// IDHeader is the name of an extra header with the event's id, such as event-id. Empty means none.
	IDHeader string
	// TraceHeader is the name of an extra header with the event's trace id ([WithTraceID]), such as x-trace-id. Empty
	// means none.
	TraceHeader string

	// ExactlyOnce is the name of a cursor topic. Each batch is then a Kafka transaction: readers of committed records
	// see each event once. It needs Kafka 4.0 with transaction.version 2. Read docs/exactly-once.md first. Empty means
	// at least once.
	ExactlyOnce string

	// BatchSize is the most events in a batch, at most 10,000. A batch also ends at 16 MiB. After a crash the relay
	// sends up to one batch again. Zero means 5,000.
	BatchSize int

	// PollInterval is the time between polls: of an idle relay for events, of a standby for the lease. Zero means
	// 500 ms.
	PollInterval time.Duration

	// DeliveryTimeout is how long a record waits for Kafka's answer, at least 1 s. Then it is sent again, and may
	// arrive twice. [Relay.Run] may outlive its context by about one and a half DeliveryTimeout. Zero means 10 s.
	DeliveryTimeout time.Duration
	// Lease is how long a standby waits before it takes over from an unreachable host, or from any relay behind a
	// pooler that shares connections. It must be longer than one and a half DeliveryTimeout. From a dead process, a
	// standby takes over within PollInterval and a second. Zero means 30 s.
	Lease time.Duration

	// RetryInterval is how often a relay polls for failed events that are due, and probes topics and partitions that
	// accept nothing. Zero means 5 s.
	RetryInterval time.Duration
	// Retry says how an event that Kafka rejected is retried; then it is dead. Outages, missing topics and expired
	// credentials use up no retry. Negative values, RetriesFor and MaxOutage are errors. Zero means MaxRetries 10,
	// RetryWait 1 s and MaxRetryWait 300 s.
	Retry RetryPolicy
	// PassFailedKeys sends the later events of a key although an earlier one has failed. Danger: the order of the key
	// is lost.
	PassFailedKeys bool
	// HoldDead keeps the later events of a dead event's key until an operator decides. False means that they are sent.
	HoldDead bool
	// RetryDeadAfter maps classes of the last error, such as message_too_large, to delays. After the delay, a dead
	// event has all retries again. Without HoldDead, held events stay dead, even if HoldDead held them. Nil means that
	// operators decide.
	RetryDeadAfter map[string]time.Duration
	// KeepSent keeps the rows of outbox_failed, as resolved, after their events were sent.
	KeepSent bool

	// Breaker stops sending for a while when Kafka fails.
	Breaker BreakerConfig

	// Retention says how long rows stay in the tables.
	Retention RetentionConfig

	// Alerts says which alerts are sent, and to whom. docs/watch.md says by which process.
	Alerts AlertConfig

	// Hooks are called when something happens.
	Hooks RelayHooks

	// Logger receives ERROR for dead events and open breakers, and WARN for outages. Nil means slog.Default().
	Logger *slog.Logger
}

const (
	defaultRelayName    = "default"
	defaultBatchSize    = 5000
	maxBatchSize        = 10_000
	defaultPollInterval = 500 * time.Millisecond
	defaultDelivery     = 10 * time.Second
	minDelivery         = time.Second // franz-go takes no less
	defaultLease        = 30 * time.Second
	defaultRetry        = 5 * time.Second
	defaultMaxRetries   = 10
	minRetryWait        = time.Second
	maxRetryWait        = 300 * time.Second
	maxRelayName        = 100
)

func (c RelayConfig) withDefaults() RelayConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.Name = cmp.Or(c.Name, defaultRelayName)
	c.BatchSize = cmp.Or(c.BatchSize, defaultBatchSize)
	c.PollInterval = cmp.Or(c.PollInterval, defaultPollInterval)
	c.DeliveryTimeout = cmp.Or(c.DeliveryTimeout, defaultDelivery)
	c.Lease = cmp.Or(c.Lease, defaultLease)
	c.RetryInterval = cmp.Or(c.RetryInterval, defaultRetry)
	c.Retry.MaxRetries = cmp.Or(c.Retry.MaxRetries, defaultMaxRetries)
	c.Retry.RetryWait = cmp.Or(c.Retry.RetryWait, minRetryWait)
	c.Retry.MaxRetryWait = cmp.Or(c.Retry.MaxRetryWait, maxRetryWait)
	c.Breaker = c.Breaker.withDefaults()
	c.Retention = c.Retention.withDefaults()
	c.Logger = short.Logger(cmp.Or(c.Logger, slog.Default()))
	if c.Alerts.Alerter == nil {
		c.Alerts.Alerter = LogAlerter{Logger: c.Logger, without: []AlertKind{AlertDead, AlertDeadDeliveries, AlertBreaker}}
	}
	return c
}

// validate checks a configuration with its defaults. given is without them.
func (c RelayConfig) validate(given RelayConfig) error {
	errs := []error{
		check.Schema(c.Schema),
		check.NotNegative("BatchSize", c.BatchSize),
		check.NotAbove("BatchSize", c.BatchSize, maxBatchSize),
		check.NotNegative("PollInterval", c.PollInterval),
		check.NotNegative("Lease", c.Lease),
		check.NotNegative("RetryInterval", c.RetryInterval),
		check.NotNegative("Retry.MaxRetries", c.Retry.MaxRetries),
		check.NotNegative("Retry.RetryWait", c.Retry.RetryWait),
		check.NotNegative("Retry.MaxRetryWait", c.Retry.MaxRetryWait),
		c.Breaker.validate(),
		c.Retention.validate(),
		c.Alerts.settings().Validate(),
	}
	errs = append(errs, c.checkLease(given), check.InOrder(
		check.Field[time.Duration]{Name: "Retry.RetryWait", Value: c.Retry.RetryWait, Given: given.Retry.RetryWait},
		check.Field[time.Duration]{Name: "Retry.MaxRetryWait", Value: c.Retry.MaxRetryWait, Given: given.Retry.MaxRetryWait}))
	if c.Retry.MaxOutage != 0 {
		errs = append(errs, errors.New("field Retry.MaxOutage: it is for handlers; an outage of Kafka uses up no retry of a relay, however long it is"))
	}
	if c.Retry.RetriesFor != nil {
		errs = append(errs, errors.New("field Retry.RetriesFor: a relay retries every event that Kafka rejected as often; see RetryDeadAfter"))
	}
	if c.PassFailedKeys && c.HoldDead {
		errs = append(errs, errors.New("fields PassFailedKeys and HoldDead: later events either pass a failed one or wait for an operator"))
	}
	errs = append(errs, check.EachPositive("RetryDeadAfter", c.RetryDeadAfter))
	if err := check.Text(c.Name, maxRelayName); err != nil {
		errs = append(errs, fmt.Errorf("field Name %w", err))
	}
	if tables.IsGroup(c.Name) {
		errs = append(errs, fmt.Errorf("field Name is %.100q: names that begin with %s or %s are those of groups", c.Name, tables.WorkerPrefix, tables.ConsumerPrefix))
	}
	if c.Mode != Binary && c.Mode != Structured {
		errs = append(errs, fmt.Errorf("field Mode is %d: must be Binary or Structured", c.Mode))
	}
	errs = append(errs, c.further().Check())
	if !validTopic.MatchString(c.ExactlyOnce) {
		errs = append(errs, fmt.Errorf("field ExactlyOnce is %.300q: no name of a topic", c.ExactlyOnce))
	}
	if c.DeliveryTimeout < minDelivery {
		errs = append(errs, fmt.Errorf("field DeliveryTimeout is %v: at least %v", c.DeliveryTimeout, minDelivery))
	}
	return errors.Join(errs...)
}

// validTopic matches the names that a topic can have, and "".
var validTopic = regexp.MustCompile(`^[a-zA-Z0-9._-]{0,249}$`)

// checkLease checks that a lease outlasts a send. The error is about a field that was given: the caller who has set
// Lease alone does not know DeliveryTimeout.
func (c RelayConfig) checkLease(given RelayConfig) error {
	const rule = "one and a half DeliveryTimeout"
	switch {
	case c.Lease-c.DeliveryTimeout > c.DeliveryTimeout/2: // so the sum does not overflow
		return nil
	case given.DeliveryTimeout == 0:
		return fmt.Errorf("field Lease is %v: must be longer than %s, %v by default", c.Lease, rule, c.sendTimeout())
	case given.Lease == 0:
		return fmt.Errorf("field DeliveryTimeout is %v: %s must be shorter than Lease, %v by default", c.DeliveryTimeout, rule, c.Lease)
	}
	return fmt.Errorf("field DeliveryTimeout is %v: %s must be shorter than Lease, %v", c.DeliveryTimeout, rule, c.Lease)
}

// sendTimeout bounds one send: a record that Kafka does not answer fails before it.
func (c RelayConfig) sendTimeout() time.Duration { return c.DeliveryTimeout + c.DeliveryTimeout/2 }

func (c RelayConfig) further() eventheader.Further {
	return eventheader.Further{ID: c.IDHeader, Trace: c.TraceHeader}
}

// rules returns the configuration as the engine takes it.
func (c RelayConfig) rules() relay.Rules {
	return relay.Rules{
		Schema: c.Schema, Name: c.Name, Form: envelope.RecordForm{InJSON: c.Mode == Structured, Further: c.further()},
		BatchSize: c.BatchSize, PollInterval: c.PollInterval, SendTimeout: c.sendTimeout(), Lease: c.Lease,
		RetryInterval: c.RetryInterval, MaxRetries: c.Retry.MaxRetries, RetryWait: c.Retry.RetryWait, MaxRetryWait: c.Retry.MaxRetryWait,
		PassFailedKeys: c.PassFailedKeys, HoldDead: c.HoldDead, RetryDeadAfter: c.RetryDeadAfter, KeepSent: c.KeepSent,
		Breaker: c.Breaker.rules(), Retention: c.Retention.rules(), ExactlyOnce: c.ExactlyOnce,
	}
}

// Relay sends committed events to Kafka: each at least once, those of one partition key in order.
// Any number of processes may run it; one of them works.
type Relay struct {
	engine *relay.Relay
	name   string
	waker  *Waker
}

// NewRelay returns a relay that reads from db and produces with clients that it makes from opts
// when it runs: brokers, TLS, SASL, hooks and compression are the caller's, acks=all and
// idempotence are the relay's. Options that name a group, topics to consume or a transactional id
// are errors, and so are options that disable idempotence or automatic flushing. So is a
// partitioner that does not send all records of a key to one partition, such as
// kgo.RoundRobinPartitioner. The error names every bad field and option.
//
// The topics must exist, or be creatable with kgo.AllowAutoTopicCreation: events of a missing topic
// wait until it is there, and delay no others.
//
// NewRelay does no I/O, and makes and closes one client to look at the options. A running relay
// uses up to eight connections of db, and one extra connection that all relays and workers on db
// share. On that connection the leading process hears when others have recorded events, see
// [Waker]. It also has a lock there, by which others find out that it is gone. Closing db stays
// with the caller.
func NewRelay(db *pgxpool.Pool, opts []kgo.Opt, cfg RelayConfig) (*Relay, error) {
	given := cfg
	cfg = cfg.withDefaults()
	producer, err := relay.ProducerOpts(opts, cfg.DeliveryTimeout)
	err = errors.Join(cfg.validate(given), err)
	if db == nil {
		err = errors.Join(fmt.Errorf("db %w", ErrNilArgument), err)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: relay config: %w", err)
	}
	log := cfg.Logger.With("relay", cfg.Name)
	waker := newWaker(db, cfg.Schema, log)
	engine := relay.New(relay.Config{
		DB: db, Kafka: producer, Transactional: relay.TransactionOpts(opts, cfg.DeliveryTimeout), Rules: cfg.rules(), Hooks: cfg.Hooks.engine(), Alerts: cfg.Alerts.rules(cfg.Logger), Hub: waker.hub, Logger: log,
	})
	return &Relay{engine: engine, name: cfg.Name, waker: waker}, nil
}

// Run relays events until ctx is cancelled, then finishes the batch in flight,
// releases the lease so that a standby takes over at once, and returns nil. It
// may be called again afterwards; a second call at the same time returns
// [ErrRunning]. While Kafka and PostgreSQL answer, Run returns within 2 s and nothing
// that was sent is sent again. While Kafka does not answer, stopping takes until the send
// in flight has failed, at most about one and a half DeliveryTimeout; the next Run sends it again.
//
// Outages of Kafka and PostgreSQL are waited out, not returned. The errors that
// Run returns need an operator: [ErrNotMigrated], [ErrSequenceBehind], [ErrOtherMode] and [ErrCursorTopic], and
// [ErrHangs] after ctx is cancelled.
//
// Run panics if one of its goroutines does, after it has released the lease. The
// value is an error whose text has the stack of that goroutine.
func (r *Relay) Run(ctx context.Context) error { return runError("relay", r.engine.Run(ctx)) }

// EndExactlyOnce turns off the mode of RelayConfig.ExactlyOnce, while no process leads. The relay can then run
// without it, or with another topic. If readKafka is set, the newest record of the topic says how far the relay has
// come, and nothing is lost or sent again. Without it, which is for a topic that is lost, what was sent since the
// position in PostgreSQL is sent again.
func (r *Relay) EndExactlyOnce(ctx context.Context, readKafka bool) error {
	return runError("relay", r.engine.EndExactlyOnce(ctx, readKafka))
}

// Waker returns the waker of this process, for transactions that record events. It works while Run does.
func (r *Relay) Waker() *Waker { return r.waker }

// Health reports the state of the relay without any I/O.
//
// Ready is for readiness probes. A relay is not ready before Run is called and after it has
// returned; before PostgreSQL has answered; while Kafka answers that it does not serve this
// client (login, TLS, rights); and while Kafka does not answer this process, but has answered
// another process of the relay within 30 s. An outage of Kafka for all processes, or a later
// one of PostgreSQL, leaves it ready: events wait for the end of it, and the service that
// records them works.
//
// Works is for people and alerts. It is false in all these cases, and during each outage of
// Kafka or PostgreSQL; while the circuit breaker is open; on a leader whose cursor has not
// moved for longer than the lease lasts, although it has events to send; on a standby that
// sees no process lead, or whose relay has ended by a cut. The package outboxhttp serves both.
func (r *Relay) Health() RelayHealth {
	h := r.engine.Health()
	return RelayHealth{Relay: r.name, Live: h.Live, Ready: h.Ready, Works: h.Works, Answered: h.Answered, Leading: h.Leading,
		Breaker: BreakerState(h.Breaker), Outages: outagesOf(h.Outages), Reasons: h.Reasons}
}

// Outage is an outage that has not ended, of something that this process needs.
type Outage struct {
	// What fails, as the log names it: PostgreSQL, Kafka, fetching, or "topic orders" for example.
	What string
	// Class is that of the last error: no_database, read_only, disk_full, no_connections, locked or failing of
	// PostgreSQL, and refused of PgBouncer, for any reason; refused_rights, no_leader, unknown_topic, unavailable or
	// closed of Kafka, where closed means that connections are accepted and closed at once; and refused_login,
	// refused_tls, unreachable or no_answer of both.
	Class string
	// Since is when the first try failed, by the clock of this process.
	Since time.Time
	// Err is the text of the last error, at most 300 bytes of it.
	Err string
}

func outagesOf(all []outage.Outage) (outages []Outage) {
	for _, o := range all {
		outages = append(outages, Outage(o))
	}
	return outages
}

// RelayHealth reports the state of a relay in this process.
type RelayHealth struct {
	// Relay is its name.
	Relay string
	// Live is false if only a restart of the process can help: Run has returned an
	// error, or hangs.
	Live bool
	// Ready is false if this process should get no traffic, see [Relay.Health].
	Ready bool
	// Works is false if this process does not do its part: see Reasons.
	Works bool
	// Answered is set once PostgreSQL and Kafka have answered since Run began.
	Answered bool
	// Leading is set while this process holds the lease.
	Leading bool
	// Breaker is the state of the circuit breaker.
	Breaker BreakerState
	// Outages are those that have not ended.
	Outages []Outage
	// Reasons say why the relay is not live, not ready or does not work.
	Reasons []string
}
