package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/consumer"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
)

// ConsumerConfig tunes a [Consumer]. The zero value is ready for production.
type ConsumerConfig struct {
	// HandlerConfig is what has nothing to do with Kafka.
	HandlerConfig

	// From is where a new group begins in each topic that it reads for the first time: at the
	// beginning of the topic, or with what comes after its first start. A partition or a topic that
	// is added later is read from its beginning in any case.
	//
	// Without a database From is required, and holds for every partition in which Kafka has no
	// offset of the group: also for a partition that is added later, and after the offsets have
	// expired. What FromEnd then skips is logged. Zero means FromEnd.
	From Start

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

	// SessionTimeout is how long Kafka waits for a heartbeat before it gives the
	// partitions to others; and how long a handler may go on when its partition is
	// taken away. It is longer than the interval of kgo.HeartbeatInterval. Zero means 30 s.
	SessionTimeout time.Duration
	// MaxPollInterval bounds a transaction. It is also how long Kafka waits for a member that has to give
	// up a partition. It is longer than SessionTimeout. Zero means 5 min.
	MaxPollInterval time.Duration

	// StopTimeout is how long [Consumer.Run] may outlive its context. Handlers have three
	// fifths of it to finish the events that they are at. Zero means 5 s.
	StopTimeout time.Duration

	// Alerts says when an alert is sent that deliveries are dead or wait for too long, or that Kafka has
	// removed records unread, and to whom. Where a relay leads or a worker runs, its process sends these
	// instead. Else it is for one member of one group: of the first by name that has any. It alerts to
	// all groups, and to relays that no process leads. Another member takes over within two
	// SessionTimeout. It needs a database. The zero value logs alerts.
	Alerts AlertConfig

	// DeadLetterTopic names the topic for the dead letters of another, which must not be
	// one that the consumer reads. It is called for each topic when the consumer is made.
	// Nil means {topic}.dlq. The topic must exist, see the package outboxtopics: while it
	// takes nothing, what is given up waits, and what is behind it in its key; without a database its partition waits.
	DeadLetterTopic func(topic string) string

	// Decode reads records. A nil message without an error passes over the record,
	// for example because of its source. For other producers' records there are
	// [PlainRecords], [DecodeDebezium] and [DecodeByTopic]. Nil means
	// [DecodeCloudEvent].
	Decode func(*kgo.Record) (*Message, error)
}

const (
	defaultSession         = 30 * time.Second
	defaultMaxPollInterval = 5 * time.Minute
	defaultMaxQueueBytes   = 64 << 20
	minMaxQueueBytes       = 1 << 20
)

func (c ConsumerConfig) withDefaults() ConsumerConfig {
	c.HandlerConfig = c.HandlerConfig.withDefaults()
	c.MaxPoll = cmp.Or(c.MaxPoll, defaultMaxPoll)
	c.SessionTimeout = cmp.Or(c.SessionTimeout, defaultSession)
	c.MaxPollInterval = cmp.Or(c.MaxPollInterval, defaultMaxPollInterval)
	c.MaxQueueBytes = cmp.Or(c.MaxQueueBytes, defaultMaxQueueBytes)
	c.StopTimeout = cmp.Or(c.StopTimeout, defaultStopTimeout)
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

// validate checks a configuration with its defaults. given is without them.
func (c ConsumerConfig) validate(given ConsumerConfig) error {
	session := check.Field[time.Duration]{Name: "SessionTimeout", Value: c.SessionTimeout, Given: given.SessionTimeout}
	errs := []error{
		c.HandlerConfig.validate(),
		c.From.validate(),
		check.NotNegative("MaxPoll", c.MaxPoll),
		check.NotAbove("MaxPoll", c.MaxPoll, maxMaxPoll),
		check.NotNegative("SessionTimeout", c.SessionTimeout),
		check.NotNegative("StopTimeout", c.StopTimeout),
		check.NotNegative("MaxQueueBytes", c.MaxQueueBytes),
		check.NotNegative("Concurrency", c.Concurrency),
		c.Alerts.settings().Validate(),
		check.Shorter(session, check.Field[time.Duration]{Name: "MaxPollInterval", Value: c.MaxPollInterval, Given: given.MaxPollInterval}),
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
	handling := c.HandlerConfig.rules(group, c.StopTimeout)
	return consumer.Rules{
		Rules: &handling, FromStart: c.From == FromStart, MaxPoll: c.MaxPoll, MaxQueueBytes: c.MaxQueueBytes, Concurrency: c.Concurrency,
		SessionTimeout: c.SessionTimeout, MaxPollInterval: c.MaxPollInterval, DeadLetterTopic: c.DeadLetterTopic,
		Decode: func(r *kgo.Record) (*envelope.Message, error) {
			m, err := c.Decode(r)
			return (*envelope.Message)(m), err
		},
	}
}
