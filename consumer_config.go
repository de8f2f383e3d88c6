package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
)

// HandlerConfig says how events are handled, whatever brings them.
type HandlerConfig struct {
	// Group is the consumer group, at most 255 characters. It is part of what marks
	// a repeat. Required.
	Group string

	// Schema holds the tables of outbox. Empty means public.
	Schema string

	// MaxRetries is how often an action on an event that failed is tried again, in
	// place, before the event is given up and becomes a dead letter. What PostgreSQL
	// rolls back for a deadlock or a serialization failure is repeated with short pauses, and
	// counts after ten times. An outage is waited out and does not count: PostgreSQL gives the
	// consumer no connection, or event_handled cannot be written. Negative means never. Zero
	// means 3.
	MaxRetries int
	// RetriesFor replaces MaxRetries for an error. If it panics or ends its goroutine,
	// that is logged, and MaxRetries counts. Its partition waits while it does not return.
	// Nil means MaxRetries for all.
	RetriesFor func(error) int
	// RetryWait is the wait before the first retry. Each further wait is twice as
	// long, up to 30 s; a random part of each, up to a fifth, is left out. Zero means
	// 1 s.
	RetryWait time.Duration

	// HandlerTimeout is when the context of a handler ends. An error that it returns then
	// counts as any other. A handler of [HandleBatch] has as long for all of its events,
	// and a codec for one. At most half of MaxPollInterval. Zero means 150 s (half of
	// MaxPollInterval, where that is set).
	HandlerTimeout time.Duration

	// SlowHandler is how long a handler may run before a WARN names it and its event, and
	// another one each time that it has run for twice as long. It holds also for hooks,
	// RetriesFor, decoders, codecs, upcasters and keys of [OncePer], and for how long a
	// transaction may take to begin. Zero means 30 s.
	SlowHandler time.Duration

	// Unknown says what happens to event types without a handler. Zero means
	// [SkipUnknown].
	Unknown UnknownTypes

	// Codecs decode payloads of content types other than the one that their event
	// type was registered with. JSON is always understood.
	Codecs []Codec

	// Upcasters let handlers of newer versions get the events of older ones.
	Upcasters []Upcaster

	// Middleware runs around each call of a handler, the first outermost. Without any, a
	// call costs nothing more.
	Middleware []Middleware

	// Hooks are called when events are handled, repeated or given up.
	Hooks ConsumerHooks

	// Logger receives what changes: WARN for outages that begin or end, retries and
	// dead letters, and DEBUG for the rest. Nil means slog.Default().
	Logger *slog.Logger
}

// ConsumerConfig tunes a [Consumer]. All but Group may be zero.
type ConsumerConfig struct {
	// HandlerConfig is what has nothing to do with Kafka.
	HandlerConfig

	// FromStart lets a new group begin with what is in the topics. Without it, it
	// begins with what comes after its first start.
	//
	// It says so for each topic that the group reads for the first time. A partition or
	// a topic that is added later is read from its beginning in any case.
	FromStart bool
	// FromEnd says that a new group does not begin with what is in the topics. With a
	// database that is so anyway. Without one nobody remembers where a group began, so
	// one of FromStart and FromEnd must be set, and holds for every partition in which
	// Kafka has no offset of the group: also for one that is added later, and after the
	// offsets have expired. What FromEnd then skips is logged.
	FromEnd bool

	// MaxPoll is the most records of a partition that are handled together, at most
	// 10,000; fewer where handlers are slow, so that a transaction takes about a second. Zero
	// means 100.
	MaxPoll int

	// MaxQueueBytes bounds the memory of the records that wait or are handled, over all
	// partitions, in bytes. While there is half of it, a partition is fetched from only if
	// it has less than its share of the other half; while there is all of it, only if it
	// has nothing, so that those whose handlers wait do not hold it up. What a partition
	// gets then is 64 KiB, or as much as the largest batch of records if that is more. So at
	// most there is MaxQueueBytes, as much as that for each partition, and what fetches bring:
	// of each broker twice FetchMaxBytes, and 64 MiB and a batch for what is compressed, see
	// [NewConsumer]. Batches count as they are when decompressed. Zero means
	// 67,108,864 (64 MiB).
	MaxQueueBytes int

	// Concurrency is how many handlers may run at the same time, over all partitions. Those
	// with a transaction have three quarters of the connections of the pool in any case, all
	// consumers that use it together; the rest is for what handlers do with the pool beside
	// their transactions. Zero means 0 (no other bound).
	Concurrency int

	// HeartbeatInterval, SessionTimeout and MaxPollInterval must grow in this order.
	//
	// HeartbeatInterval is how often this member sends Kafka a heartbeat. Zero means
	// 10 s.
	HeartbeatInterval time.Duration
	// SessionTimeout is how long Kafka waits for a heartbeat before it gives the
	// partitions to others; and how long a handler may go on when its partition is
	// taken away. Zero means 30 s.
	SessionTimeout time.Duration
	// MaxPollInterval bounds a transaction. It is also how long Kafka waits for a member that has to give up a partition. Zero means
	// 5 min.
	MaxPollInterval time.Duration

	// StopTimeout is how long [Consumer.Run] may outlive its context. Handlers have three
	// fifths of it to finish the events that they are at. Zero means 5 s.
	StopTimeout time.Duration

	// DeadLetterTopic names the topic for the dead letters of another, which must not be
	// one that the consumer reads. It is called for each topic when the consumer is made.
	// Nil means {topic}.dlq. The topic must exist, see the package outboxtopics: while it
	// takes nothing, the partition waits.
	DeadLetterTopic func(topic string) string

	// Decode reads records. A nil message without an error passes over the record,
	// for example because of its source. For other producers' records there are
	// [PlainRecords], [DecodeDebezium] and [DecodeByTopic]. Nil means
	// [DecodeCloudEvent].
	Decode func(*kgo.Record) (*Message, error)
}

// UnknownTypes says what happens to events of a type without a handler.
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
	defaultSlowHandler     = 30 * time.Second
	defaultMaxQueueBytes   = 64 << 20
	minMaxQueueBytes       = 1 << 20
	defaultStopTimeout     = 5 * time.Second
	defaultHandlerRetries  = 3
	defaultRetryWait       = time.Second
	maxHandlerWait         = 30 * time.Second
	maxGroup               = 255
	deadLetterDelivery     = 10 * time.Second // after which a dead letter without an answer is sent again
)

func (c HandlerConfig) withDefaults() HandlerConfig {
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
	c.MaxRetries = cmp.Or(c.MaxRetries, defaultHandlerRetries)
	c.RetryWait = cmp.Or(c.RetryWait, defaultRetryWait)
	c.Logger = short.Logger(cmp.Or(c.Logger, slog.Default()))
	if c.RetriesFor == nil {
		retries := c.MaxRetries
		c.RetriesFor = func(error) int { return retries }
	}
	return c
}

// guarded returns the configuration with functions of the host whose panics are logged.
func (c HandlerConfig) guarded(log *slog.Logger) HandlerConfig {
	c.Hooks = c.Hooks.guarded(func(name string) func(func()) {
		hook := contain.NewCallback("Hooks."+name, log, contain.HookLimits)
		switch name {
		case "Handled", "Repeated": // called for every event, below [contain.Do]
			return hook.Inline
		case "Lost": // called by what fetches for all partitions, and by the Kafka client
			return func(call func()) { hook.Notify(context.Background(), call) }
		}
		return hook.Alone
	})
	retriesFor, call := c.RetriesFor, contain.NewCallback("RetriesFor", log, contain.HookLimits)
	c.RetriesFor = func(err error) int {
		retries := c.MaxRetries
		call.Alone(func() { retries = retriesFor(err) })
		return retries
	}
	return c
}

func (c HandlerConfig) validate() error {
	errs := []error{check.Schema(c.Schema), check.NotNegative("RetryWait", c.RetryWait)}
	for _, codec := range c.Codecs {
		if err := codec.check(); err != nil {
			errs = append(errs, fmt.Errorf("field Codecs: content type %w", err))
		}
	}
	for i, m := range c.Middleware {
		if m == nil {
			errs = append(errs, fmt.Errorf("field Middleware: number %d %w", i, ErrNilArgument))
		}
	}
	if err := check.Text(c.Group, maxGroup); err != nil {
		errs = append(errs, fmt.Errorf("field Group %w", err))
	}
	if c.Unknown != SkipUnknown && c.Unknown != DeadLetterUnknown {
		errs = append(errs, fmt.Errorf("field Unknown is %d: must be SkipUnknown or DeadLetterUnknown", c.Unknown))
	}
	return errors.Join(errs...)
}

func (c ConsumerConfig) withDefaults() ConsumerConfig {
	c.HandlerConfig = c.HandlerConfig.withDefaults()
	c.MaxPoll = cmp.Or(c.MaxPoll, defaultMaxPoll)
	c.HeartbeatInterval = cmp.Or(c.HeartbeatInterval, defaultHeartbeat)
	c.SessionTimeout = cmp.Or(c.SessionTimeout, defaultSession)
	c.MaxPollInterval = cmp.Or(c.MaxPollInterval, defaultMaxPollInterval)
	c.MaxQueueBytes = cmp.Or(c.MaxQueueBytes, defaultMaxQueueBytes)
	c.SlowHandler = cmp.Or(c.SlowHandler, defaultSlowHandler)
	c.StopTimeout = cmp.Or(c.StopTimeout, defaultStopTimeout)
	c.HandlerTimeout = cmp.Or(c.HandlerTimeout, c.MaxPollInterval/2)
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
		c.HandlerConfig.validate(),
		check.NotNegative("MaxPoll", c.MaxPoll),
		check.NotAbove("MaxPoll", c.MaxPoll, maxMaxPoll),
		check.NotNegative("HeartbeatInterval", c.HeartbeatInterval),
		check.NotNegative("HandlerTimeout", c.HandlerTimeout),
		check.NotNegative("StopTimeout", c.StopTimeout),
		check.NotNegative("SlowHandler", c.SlowHandler),
		check.NotNegative("MaxQueueBytes", c.MaxQueueBytes),
		check.NotNegative("Concurrency", c.Concurrency),
	}
	if c.MaxQueueBytes < minMaxQueueBytes {
		errs = append(errs, fmt.Errorf("field MaxQueueBytes is %d: must be at least %d", c.MaxQueueBytes, minMaxQueueBytes))
	}
	if c.HandlerTimeout > c.MaxPollInterval/2 {
		errs = append(errs, fmt.Errorf("field HandlerTimeout is %v: must be at most half of MaxPollInterval, %v", c.HandlerTimeout, c.MaxPollInterval/2))
	}
	if c.FromStart && c.FromEnd {
		errs = append(errs, errors.New("fields FromStart and FromEnd: only one of them can be set"))
	}
	if c.HeartbeatInterval >= c.SessionTimeout {
		errs = append(errs, fmt.Errorf("field HeartbeatInterval is %v: must be shorter than SessionTimeout, %v", c.HeartbeatInterval, c.SessionTimeout))
	}
	if c.SessionTimeout >= c.MaxPollInterval {
		errs = append(errs, fmt.Errorf("field SessionTimeout is %v: must be shorter than MaxPollInterval, %v", c.SessionTimeout, c.MaxPollInterval))
	}
	return errors.Join(errs...)
}
