package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/consumer"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/watch"
)

// Consumer passes the events of topics to handlers: those of a partition in order,
// partitions in parallel. Any number of processes may run the same group; each
// partition is assigned to one of them.
type Consumer struct{ engine *consumer.Consumer }

// NewConsumer returns a consumer of the topics in which the registry has the events
// of the handlers. It makes its own Kafka client from opts when it runs: brokers,
// TLS, SASL and hooks are the caller's, group, topics and commits the consumer's.
// Options that name these are refused. The error names every bad field, option and
// handler.
//
// Kafka waits 30 s for a heartbeat before it gives the partitions of a member to others, unless opts has
// kgo.SessionTimeout, which must be shorter than MaxPollInterval. A handler has as long to go on when its partition is
// taken away. The member sends a heartbeat each 10 s, or each third of the session timeout if that is shorter, unless
// opts has kgo.HeartbeatInterval.
//
// A new group skips what was in the topics before its first start, unless From
// says otherwise. Its first member writes down in db where it begins, so that nothing is
// skipped later: partitions that are added, topics that are created later or created
// again, and, where Kafka has lost the offsets of the group, what came after the position
// that was saved last.
//
// With a database, an event whose handler fails is parked: see Retry of [HandlerConfig]. It
// is handled again by any member of the group, in the order of its key, and what has become of
// it is a row of event_delivery.
//
// NewConsumer does no I/O. A running consumer uses a connection of db for each partition that it handles at the
// moment, see HandlerConfig.Concurrency, four for parked events, more of them while their handlers take long, and up to
// six others; closing db stays with the caller. A nil db will do if every handler is one of [HandleNoTx], and From is
// FromStart or FromEnd.
//
// Of each partition up to 20,000 records or 16 MiB wait in memory, of all of them
// MaxQueueBytes and a batch of each, and what fetches bring beyond that: of each broker
// 8 MiB that were polled and 8 MiB that wait to be, decompressed 64 MiB and a batch,
// unless opts says otherwise. A batch of more than 64 MiB, again unless opts says
// otherwise, is decompressed as a stream. A record of more than that is a dead letter
// without its value.
//
// Functions in opts, such as hooks and dialers, are called by the Kafka client in its own
// goroutines: one that panics ends the process, as anywhere else, and one that hangs
// holds the client up. Only a decompressor is guarded.
//
// A fetch waits up to 250 ms for something to arrive, unless opts
// says otherwise. While it waits for partitions that have nothing, it brings nothing
// for a partition whose queue was full when it began: the longer it may wait, the
// longer that one does.
func NewConsumer(db *pgxpool.Pool, opts []kgo.Opt, events *Registry, group string, cfg ConsumerConfig, handlers ...Handler) (*Consumer, error) {
	given := cfg
	cfg = cfg.withDefaults()
	session, heartbeat, err := consumer.CheckOpts(opts, cfg.MaxPollInterval)
	errs := []error{checkGroup(group), cfg.validate(), err}
	if events == nil {
		errs = append(errs, fmt.Errorf("registry %w", ErrNilArgument))
	}
	var routes handling.Routes
	if events != nil {
		var err error
		routes, err = cfg.routes(events, handlers)
		errs = append(errs, err)
	}
	if db == nil {
		errs = append(errs, given.checkWithoutDatabase(handlers))
	}
	var engine *consumer.Consumer
	err = errors.Join(errs...)
	if err == nil {
		rules := cfg.rules(group)
		rules.SessionTimeout, rules.HeartbeatInterval = session, heartbeat
		engine, err = consumer.New(db, opts, rules, routes)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: consumer config: %w", err)
	}
	if db != nil {
		engine.Alert = cfg.Alerts.groupAlerts(watch.NewConsumerStore(db, cfg.Schema), group, true, session, engine.Rules.Log)
	}
	return &Consumer{engine}, nil
}

// Group returns the consumer group.
func (c *Consumer) Group() string { return c.engine.Rules.Group }

// Topics returns the topics that the consumer reads, sorted.
func (c *Consumer) Topics() []string { return slices.Clone(c.engine.Processor.Routes.Topics) }

// Actions returns the actions of the handlers that get events of a type, sorted. There is none for a type without a
// handler, whose events are skipped. With [DeadLetterUnknown] such a type has one action, which is empty.
func (c *Consumer) Actions(eventType string) (actions []string) {
	return c.engine.Processor.Actions(eventType)
}

// Run handles events until ctx is cancelled; then it returns nil, within StopTimeout. In
// this time handlers finish the events that they are at, which has three fifths of it,
// what is done is committed, and the group is left. What is not done by then is rolled
// back, and comes again. Run may be called again afterwards; a second call at the same
// time returns [ErrRunning].
//
// A handler that ignores the end of its context cannot be ended. Run does not wait for
// it, and logs it with its event as an error. The connection of its transaction is
// closed, so that PostgreSQL rolls it back and nothing that it does later in it has an
// effect; what it does outside of it, and a handler of [HandleNoTx], has. Its goroutine
// goes on until it returns. The same holds when a partition is assigned to another
// member, which takes it over after the session timeout, see [NewConsumer].
//
// Outages of Kafka and PostgreSQL are waited out, not returned. Run returns an error
// only if an operator has to act: [ErrNotMigrated].
func (c *Consumer) Run(ctx context.Context) error { return runError("consumer", c.engine.Run(ctx)) }

// Deliver passes a record to the handlers as [Consumer.Run] does, without Kafka: it
// is for tests. Each action runs once, in a transaction of its own; errors are
// returned, not tried again, and there are no dead letters. Actions that are done
// already are skipped, and event types without a handler as Unknown says. Headers of a
// replay count, see [ReplayGroup].
func (c *Consumer) Deliver(ctx context.Context, record *kgo.Record) error {
	return public(c.engine.Deliver(ctx, record))
}

// PartitionLag is how far a consumer is behind in a partition.
type PartitionLag struct {
	// Topic of the partition.
	Topic string
	// Partition is its number.
	Partition int32
	// Next is the offset that is committed: of the next record to handle.
	Next int64
	// End is the offset behind the last record, also of a transaction that is open: its
	// records, and those behind them, cannot be read before it ends.
	End int64
}

// Records returns how many offsets are left to handle: not fewer than there are
// records, because markers of transactions and gaps of compaction have some too.
func (l PartitionLag) Records() int64 { return max(0, l.End-l.Next) }

// Lag returns how far the partitions that this process holds at the moment are behind,
// sorted. It asks Kafka for their ends. A consumer that does not run holds none.
func (c *Consumer) Lag(ctx context.Context) ([]PartitionLag, error) {
	lags, err := c.engine.Lag(ctx)
	if err != nil {
		return nil, fmt.Errorf("outbox: lag of group %s: %w", c.Group(), err)
	}
	var all []PartitionLag
	for _, l := range lags {
		all = append(all, PartitionLag(l))
	}
	return all, nil
}

// ConsumerHealth reports the state of a consumer in this process.
type ConsumerHealth struct {
	// Group is the consumer group.
	Group string
	// Live is false if only a restart of the process can help: Run has returned an
	// error, or a handler does not return.
	Live bool
	// Ready is false if this process should get no traffic, see Health.
	Ready bool
	// Works is false if this process does not handle events: see Reasons.
	Works bool
	// Answered is set once PostgreSQL and Kafka have answered since Run began.
	Answered bool
	// Partitions is how many partitions the group has assigned to it. A member of a
	// group that has more members than partitions holds none, and is ready.
	Partitions int
	// Waiting counts what the group still has to handle of the events that its members have read, in all its processes,
	// as this process has last seen it: by action, topic and status. Of each kind 1,000 rows are read. [Consumer.Lag]
	// has what the members have not read.
	Waiting []EventCount
	// Outages are those that have not ended.
	Outages []Outage
	// Reasons say why the consumer is not live, not ready or does not work. A lag that has grown for five minutes, what
	// is paused, breakers of actions that are not closed, and what of Waiting has failed, is dead, missed or has waited
	// for 5 min are among them, although they make it none of these.
	Reasons []string
}

// Health reports the state of the consumer without I/O. It is live, but not ready,
// before Run is called, during a stop and after a clean one; before PostgreSQL has answered;
// while Kafka answers that it does not serve this client; and while Kafka does not answer this
// process, but has answered another one of the group within 30 s.
//
// It does not work in these cases, and while PostgreSQL, fetching from
// Kafka, committing offsets or a dead-letter topic fails, because no restart brings
// these back. It does not work either before the group has assigned partitions to it and
// it is known where to begin; while it waits at a batch that is too large, or for longer
// than SlowHandler for a transaction to begin or to commit; and while a handler runs on after its
// HandlerTimeout, or a hook, a decoder or another function of the host for as long. Once one
// has run for twice as long, the consumer is not live. An outage
// ends with the next try that succeeds, or if nothing was tried
// for MaxPollInterval, for example because the partition is with another member.
//
// The package outboxhttp serves this to probes.
func (c *Consumer) Health() ConsumerHealth {
	h := c.engine.Health()
	return ConsumerHealth{h.Group, h.Live, h.Ready, h.Works, h.Answered, h.Partitions, waitingOf(h.Waiting), outagesOf(h.Outages), h.Reasons}
}

// Pause has this process handle nothing of some topics, or without topics nothing at all,
// until Resume is called. Handlers finish what they are at, and what they have done is
// committed; an event that has failed is tried again after the pause. The member keeps its
// partitions, so other members of the group do not handle what it has paused. Pause may be
// called at any time, also before Run, and returns at once.
//
// Operators pause a group in all its processes, and over restarts, with the command
// outbox consumer pause, the API of outboxadmin, or outboxops.Consumers. A topic is
// handled once no pause of it is left. Deliver is not paused.
//
// The error names topics that the consumer does not read. Nothing is paused then.
func (c *Consumer) Pause(topics ...string) error { return c.engine.Pause(topics) }

// Resume ends the pause that Pause has begun with the same topics, or without topics. It
// does not end those of operators. The error is that of Pause.
func (c *Consumer) Resume(topics ...string) error { return c.engine.Resume(topics) }

func needsTx(h Handler) bool { return !check.IsNil(h) && h.handler().Kind != handling.NoTx }

// ConsumerConfig tunes a [Consumer]. The zero value is ready for production.
type ConsumerConfig struct {
	// HandlerConfig has the settings that consumers and workers share.
	HandlerConfig

	// MaxQueueBytes bounds the records that wait or are handled, over all partitions, in bytes after decompression; at
	// least 1 MiB. Fetched records that are not queued yet are not included, see [NewConsumer]. Zero means 67,108,864
	// (64 MiB).
	MaxQueueBytes int

	// MaxPollInterval is the longest duration of a transaction. Kafka waits as long for a member to give up a
	// partition. It must exceed the session timeout (30 s). Zero means 5 min.
	MaxPollInterval time.Duration

	// DeadLetterTopic returns the dead-letter topic of a topic. It must exist, see the package outboxtopics, and the
	// consumer must not read it. While it accepts nothing, dead events and the later events of their keys wait; without
	// a database their partition waits. Nil means {topic}.dlq.
	DeadLetterTopic func(topic string) string

	// Decode reads records; a nil message without an error skips the record. [PlainRecords], [DecodeDebezium] and
	// [DecodeByTopic] read records of other producers. Nil means [DecodeCloudEvent].
	Decode func(*kgo.Record) (*Message, error)
}

const (
	defaultMaxPollInterval = 5 * time.Minute
	defaultMaxQueueBytes   = 64 << 20
	minMaxQueueBytes       = 1 << 20
)

func (c ConsumerConfig) withDefaults() ConsumerConfig {
	c.HandlerConfig = c.HandlerConfig.withDefaults()
	c.MaxPollInterval = cmp.Or(c.MaxPollInterval, defaultMaxPollInterval)
	c.MaxQueueBytes = cmp.Or(c.MaxQueueBytes, defaultMaxQueueBytes)
	c.HandlerTimeout = cmp.Or(c.HandlerTimeout, c.MaxPollInterval/2)
	if c.DeadLetterTopic == nil {
		c.DeadLetterTopic = DeadLetterTopic
	}
	if c.Decode == nil {
		c.Decode = DecodeCloudEvent
	}
	if c.Alerts.Alerter == nil {
		c.Alerts.Alerter = LogAlerter{Logger: c.Logger, without: []AlertKind{AlertDeadDeliveries, AlertLost}}
	}
	return c
}

// validate checks a configuration with its defaults.
func (c ConsumerConfig) validate() error {
	errs := []error{
		c.HandlerConfig.validate(),
		check.NotNegative("MaxQueueBytes", c.MaxQueueBytes),
	}
	if c.MaxQueueBytes < minMaxQueueBytes {
		errs = append(errs, fmt.Errorf("field MaxQueueBytes is %d: must be at least %d", c.MaxQueueBytes, minMaxQueueBytes))
	}
	if c.HandlerTimeout > c.MaxPollInterval/2 {
		errs = append(errs, fmt.Errorf("field HandlerTimeout is %v: must be at most half of MaxPollInterval, %v", c.HandlerTimeout, c.MaxPollInterval/2))
	}
	return errors.Join(errs...)
}

// checkWithoutDatabase returns an error for what was given that needs a database.
func (c ConsumerConfig) checkWithoutDatabase(handlers []Handler) error {
	var errs []error
	if slices.ContainsFunc(handlers, needsTx) {
		errs = append(errs, fmt.Errorf("db %w", ErrNilArgument))
	}
	if c.Alerts != (AlertConfig{}) {
		errs = append(errs, errors.New("field Alerts: what alerts are about is in the database, and there is none"))
	}
	if c.From == StartDefault {
		errs = append(errs, errors.New("field From: without a database it must be FromStart or FromEnd"))
	}
	if c.HoldDead {
		errs = append(errs, errors.New("field HoldDead: it needs a database"))
	}
	if len(c.RetryDeadAfter) > 0 {
		errs = append(errs, errors.New("field RetryDeadAfter: it needs a database"))
	}
	return errors.Join(errs...)
}

// rules returns the configuration as the engine takes it.
func (c ConsumerConfig) rules(group string) consumer.Rules {
	handling := c.HandlerConfig.rules(group)
	return consumer.Rules{
		Rules: &handling, FromStart: c.From == FromStart, MaxPoll: c.MaxPoll, MaxQueueBytes: c.MaxQueueBytes, Concurrency: c.Concurrency,
		MaxPollInterval: c.MaxPollInterval, DeadLetterTopic: c.DeadLetterTopic,
		Decode: func(r *kgo.Record) (*envelope.Message, error) {
			m, err := c.Decode(r)
			return (*envelope.Message)(m), err
		},
	}
}
