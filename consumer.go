package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// ConsumerConfig tunes a [Consumer]. All but Group may be zero.
type ConsumerConfig struct {
	// Group is the consumer group, at most 255 characters. It is part of what marks
	// a repeat. Required.
	Group string

	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// FromStart lets a new group begin with what is in the topics. Without it, it
	// begins with what comes after its first start, and so does a group whose
	// offsets are lost.
	FromStart bool

	// MaxPoll is the most records of a partition that are handled together, at most
	// 10,000. Zero means 100.
	MaxPoll int

	// HeartbeatInterval, SessionTimeout and MaxPollInterval must grow in this order.
	//
	// HeartbeatInterval is how often Kafka is told that this member lives. Zero
	// means 10 s.
	HeartbeatInterval time.Duration
	// SessionTimeout is how long Kafka waits for a heartbeat before it gives the
	// partitions to others; and how long a handler may go on when its partition is
	// taken away, or when the consumer stops. Zero means 30 s.
	SessionTimeout time.Duration
	// MaxPollInterval bounds one handling of records that arrived together: the
	// context of a handler ends after it, and Kafka waits so long for a member
	// that has to let go of a partition. Zero means 5 min.
	MaxPollInterval time.Duration

	// MaxRetries is how often an action on an event that failed is tried again, in
	// place, before the event goes to the dead-letter topic. What PostgreSQL rolls
	// back for a deadlock or a serialization failure is repeated at once, and an
	// outage of PostgreSQL waited out; neither counts. Negative means never. Zero
	// means 3.
	MaxRetries int
	// RetriesFor replaces MaxRetries for an error. Nil means MaxRetries for all.
	RetriesFor func(error) int
	// RetryWait is the wait before the first retry. It doubles up to 30 s, less up to
	// a fifth. Zero means 1 s.
	RetryWait time.Duration

	// DeadLetterTopic names the topic for the dead letters of another. Nil means
	// {topic}.dlq. It must exist, see the package outboxtopics: while it takes nothing, the
	// partition waits.
	DeadLetterTopic func(topic string) string

	// Unknown says what becomes of event types without a handler. Zero means
	// [SkipUnknown].
	Unknown UnknownTypes

	// Decode reads records. A nil message without an error passes over the record,
	// for example because of its source. For other producers' records there are
	// [PlainRecords], [DecodeDebezium] and [DecodeByTopic]. Nil means
	// [DecodeCloudEvent].
	Decode func(*kgo.Record) (*Message, error)

	// Codecs decode payloads of content types other than the one that their event
	// type was registered with. JSON is always understood.
	Codecs []Codec

	// Upcasters let handlers of newer versions get the events of older ones.
	Upcasters []Upcaster

	// Hooks are told what happens.
	Hooks ConsumerHooks

	// Logger receives what changes: WARN for trouble that begins or ends, retries
	// and dead letters, and DEBUG for the rest. Nil means slog.Default().
	Logger *slog.Logger
}

// UnknownTypes says what becomes of events of a type without a handler.
type UnknownTypes int

const (
	// SkipUnknown passes over them. It is the default, because topics are shared.
	SkipUnknown UnknownTypes = iota
	// DeadLetterUnknown sends them to the dead-letter topic.
	DeadLetterUnknown
)

const (
	defaultMaxPoll         = 100
	maxMaxPoll             = 10_000
	defaultHeartbeat       = 10 * time.Second
	defaultSession         = 30 * time.Second
	defaultMaxPollInterval = 5 * time.Minute
	defaultHandlerRetries  = 3
	defaultRetryWait       = time.Second
	maxHandlerWait         = 30 * time.Second
	maxGroup               = 255
	maxAction              = 100
	deadLetterDelivery     = 10 * time.Second // after which a dead letter without an answer is sent again
)

func (c ConsumerConfig) withDefaults() ConsumerConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.MaxPoll = cmp.Or(c.MaxPoll, defaultMaxPoll)
	c.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, defaultHeartbeat)
	c.SessionTimeout = cmp.Or(c.SessionTimeout, defaultSession)
	c.MaxPollInterval = cmp.Or(c.MaxPollInterval, defaultMaxPollInterval)
	c.MaxRetries = cmp.Or(c.MaxRetries, defaultHandlerRetries)
	c.RetryWait = cmp.Or(c.RetryWait, defaultRetryWait)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if c.RetriesFor == nil {
		retries := c.MaxRetries
		c.RetriesFor = func(error) int { return retries }
	}
	if c.DeadLetterTopic == nil {
		c.DeadLetterTopic = DeadLetterTopic
	}
	if c.Decode == nil {
		c.Decode = DecodeCloudEvent
	}
	return c
}

func (c ConsumerConfig) validate() error {
	errs := []error{
		check.Schema(c.Schema),
		check.NotNegative("MaxPoll", c.MaxPoll),
		check.NotAbove("MaxPoll", c.MaxPoll, maxMaxPoll),
		check.NotNegative("HeartbeatInterval", c.HeartbeatInterval),
		check.NotNegative("RetryWait", c.RetryWait),
	}
	for _, codec := range c.Codecs {
		if err := codec.check(); err != nil {
			errs = append(errs, fmt.Errorf("field Codecs: content type %w", err))
		}
	}
	if err := check.Text(c.Group, maxGroup); err != nil {
		errs = append(errs, fmt.Errorf("field Group %w", err))
	}
	if c.HeartbeatInterval >= c.SessionTimeout {
		errs = append(errs, fmt.Errorf("field HeartbeatInterval is %v: must be shorter than SessionTimeout, %v", c.HeartbeatInterval, c.SessionTimeout))
	}
	if c.SessionTimeout >= c.MaxPollInterval {
		errs = append(errs, fmt.Errorf("field SessionTimeout is %v: must be shorter than MaxPollInterval, %v", c.SessionTimeout, c.MaxPollInterval))
	}
	if c.Unknown != SkipUnknown && c.Unknown != DeadLetterUnknown {
		errs = append(errs, fmt.Errorf("field Unknown is %d: must be SkipUnknown or DeadLetterUnknown", c.Unknown))
	}
	return errors.Join(errs...)
}

// Consumer hands the events of topics to handlers: those of a partition in order,
// partitions side by side. Any number of processes may run the same group; each
// partition is with one of them.
type Consumer struct {
	cfg     ConsumerConfig
	opts    []kgo.Opt
	routes  routes
	done    *handledStore
	log     *slog.Logger
	outages *outage.Logs // what fails: PostgreSQL, dead-letter topics, Kafka

	running atomic.Bool
	current atomic.Pointer[membership] // nil while it does not run
}

// NewConsumer returns a consumer of the topics in which the registry has the events
// of the handlers. It makes its own Kafka client from opts when it runs: brokers,
// TLS, SASL and hooks are the caller's, group, topics and commits the consumer's.
// Options that name these are refused. The error names every bad field, option and
// handler.
//
// A new group skips what was in the topics before its first start, unless FromStart
// says otherwise.
//
// NewConsumer does no I/O. A running consumer uses a connection of db for each
// partition that it handles at the moment; closing db stays with the caller. It
// may be nil if every handler is one of [HandleNoTx].
//
// Of each partition up to 20,000 records or 16 MiB wait in memory, and what a fetch
// brings beyond that. A fetch waits up to 250 ms for something to arrive, unless
// opts says otherwise: the longer it may, the longer a partition that was full waits
// for more where others have nothing.
func NewConsumer(db *pgxpool.Pool, opts []kgo.Opt, events *Registry, cfg ConsumerConfig, handlers ...Handler) (*Consumer, error) {
	cfg = cfg.withDefaults()
	errs := []error{cfg.validate(), checkConsumerOpts(opts)}
	if events == nil {
		errs = append(errs, fmt.Errorf("registry %w", ErrNilArgument))
	}
	var routes routes
	if events != nil {
		var err error
		routes, err = newRoutes(events, cfg.Upcasters, handlers)
		errs = append(errs, err)
	}
	if db == nil && slices.ContainsFunc(handlers, needsTx) {
		errs = append(errs, fmt.Errorf("db %w", ErrNilArgument))
	}
	err := errors.Join(errs...)
	if err == nil {
		opts, err = consumerOpts(opts, cfg, routes.topics)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: consumer config: %w", err)
	}
	log := cfg.Logger.With("group", cfg.Group)
	return &Consumer{
		cfg: cfg, opts: opts, routes: routes,
		done: newHandledStore(db, cfg.Schema, cfg.Group),
		log:  log, outages: outage.NewLogs(log),
	}, nil
}

// Group returns the consumer group.
func (c *Consumer) Group() string { return c.cfg.Group }

// Topics returns the topics that the consumer reads, sorted.
func (c *Consumer) Topics() []string { return slices.Clone(c.routes.topics) }

// Run handles events until ctx is cancelled; then it finishes the transactions in
// flight, within SessionTimeout, commits the offsets, leaves the group and returns
// nil. It may be called again afterwards; a second call at the same time returns
// [ErrRunning].
//
// Outages of Kafka and PostgreSQL are waited out, not returned. What is returned
// needs a person: [ErrNotMigrated].
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer c.running.Store(false)
	if err := c.checkTables(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	m, err := c.join()
	if err != nil {
		return err
	}
	c.current.Store(m)
	m.poll(ctx)
	c.current.Store(nil)
	m.leave()
	return nil
}

// checkTables waits for PostgreSQL and looks whether event_handled is there.
func (c *Consumer) checkTables(ctx context.Context) error {
	if c.done.db == nil {
		return nil
	}
	for ctx.Err() == nil {
		began := time.Now()
		err := c.done.check(ctx)
		if pg.IsUndefined(err) {
			return fmt.Errorf("%w in schema %s: %w", ErrNotMigrated, c.cfg.Schema, err)
		}
		if err == nil {
			c.outages.Report(postgresName, began, nil)
			return nil
		}
		if ctx.Err() == nil {
			c.outages.Report(postgresName, began, err)
			wait.Sleep(ctx, c.outages.Backoff(postgresName))
		}
	}
	return nil
}

func needsTx(h Handler) bool { return !check.IsNil(h) && h.handler().kind != noTx }
