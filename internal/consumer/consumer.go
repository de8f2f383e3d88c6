package consumer

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/delivery"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Rules are the configuration of a consumer, with all defaults. The package outbox checks and
// documents it.
type Rules struct {
	*handling.Rules
	FromStart       bool
	MaxPoll         int // the most records of one transaction
	MaxQueueBytes   int
	Concurrency     int // the most handlers at the same time; 0 for no limit
	MaxPollInterval time.Duration
	DeadLetterTopic func(topic string) string
	Decode          func(*kgo.Record) (*envelope.Message, error)

	SessionTimeout, HeartbeatInterval time.Duration // see [CheckOpts]
}

// Consumer passes the events of topics to handlers. [Consumer.Run] may run once at a time.
type Consumer struct {
	Rules     *Rules
	db        *pgxpool.Pool // nil without PostgreSQL
	hostOpts  []kgo.Opt
	opts      []kgo.Opt // hostOpts and the options that the consumer sets
	Processor *handling.Processor
	reader    *reader
	handled   *handling.Notes // nil without PostgreSQL
	starts    *starts.Store   // nil without PostgreSQL
	pauses    *pauses.Set
	groups    tables.GroupReader    // not without PostgreSQL
	operators *pauses.Store         // reads the pauses of operators; nil without PostgreSQL
	Alert     func(context.Context) // sends alerts until its context ends; nil without PostgreSQL
	alerting  *outage.Log           // outages of the lease for alerts
	slots     handling.CallSlots
	breakers  *handling.ActionBreakers // nil without PostgreSQL
	outages   *outage.Logs             // outages of PostgreSQL, Kafka and dead-letter topics
	contact   *kafka.Contact
	answered  atomic.Bool // PostgreSQL has answered since Run began

	running atomic.Bool
	current atomic.Pointer[membership]   // set by Run; nil while the consumer does not run
	parked  atomic.Pointer[delivery.Run] // set by Run; nil while the consumer does not run, and without PostgreSQL
	gates   deadLetterGates              // of the dead letters of parked events
	state   handling.RunState
}

// New returns a consumer of the topics of routes. It does no I/O. The error names bad options and
// dead-letter topics.
func New(db *pgxpool.Pool, opts []kgo.Opt, cfg Rules, routes handling.Routes) (*Consumer, error) {
	var err error
	if cfg.DeadLetterTopic, err = fixedDeadLetterTopics(cfg.DeadLetterTopic, routes.Topics); err != nil {
		return nil, err
	}
	all, err := consumerOpts(opts, &cfg, routes.Topics)
	if err != nil {
		return nil, err
	}
	c := &Consumer{Rules: &cfg, db: db, hostOpts: slices.Clone(opts), opts: all, outages: outage.NewLogs(cfg.Log), pauses: pauses.NewSet()}
	if db == nil {
		c.Processor = handling.NewProcessor(*cfg.Rules, routes, nil)
	} else {
		c.handled = handling.NewNotes(db, cfg.Schema, cfg.Group)
		// The offset in Kafka must not be ahead of PostgreSQL, so commits wait for the disk.
		c.handled.Durable = true
		c.handled.Limits = handling.LimitsOf(cfg.MaxPollInterval)
		c.Processor = handling.NewProcessor(*cfg.Rules, routes, c.handled)
	}
	cfg.Rules = c.Processor.Rules
	c.contact = kafka.NewContact(append(kafka.Bounded(opts), kgo.WithContext(context.Background())), false, func(began time.Time, err error, _ ...any) {
		c.outages.Report(outageKafka, began, err)
	})
	c.reader = &reader{processor: c.Processor, decode: cfg.Decode}
	if cfg.Concurrency > 0 {
		c.slots.Calls = handling.NewSlots(cfg.Concurrency)
	}
	if db != nil {
		c.slots.Transactions = handling.SlotsOf(db)
		c.breakers = handling.NewActionBreakers(c.Processor.Rules, routes, c.slots.Most())
		c.starts = starts.NewStore(db, cfg.Schema, cfg.Group)
		c.groups = tables.NewGroupReader(db, cfg.Schema)
		c.operators = pauses.NewStore(db, cfg.Schema, cfg.Group)
		c.alerting = outage.NewLog(cfg.Log, leaseForAlerts)
	}
	return c, nil
}

// Run handles events until ctx is cancelled. It returns [check.ErrRunning] if it runs already.
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return check.ErrRunning
	}
	defer c.running.Store(false)
	c.answered.Store(false)
	c.state.Begin()
	err := c.runOnce(ctx)
	c.state.End(err)
	return err
}

func (c *Consumer) runOnce(ctx context.Context) (err error) {
	defer c.askKafka(ctx)()
	if err := c.checkTables(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	defer c.watchPauses(ctx)()
	defer c.startAlerts(ctx)()
	ctx, end := context.WithCancel(ctx)
	defer end()
	parking, endParked, err := c.startParked(ctx, end)
	if err != nil || ctx.Err() != nil {
		return err
	}
	defer func() {
		end()
		err = errors.Join(err, endParked())
	}()
	for ctx.Err() == nil { // a new client after a topic was deleted and created: the old one cannot read it
		m, err := join(c.hostOpts, c.opts, c.Rules, c.reader, c.starts, limits{slots: c.slots, pauses: c.pauses, parking: parking, alone: make(chan struct{}, 1)}, c.outages, c.contact)
		if err != nil {
			return err
		}
		c.current.Store(m)
		polling := m.startPolling(ctx)
		select { // not on polling: the poll loop blocks while partitions are revoked
		case <-ctx.Done():
		case <-m.starts.Outdated().Done():
		}
		if ctx.Err() != nil {
			c.state.Stop()
		}
		c.current.Store(nil)
		m.close(polling)
	}
	return nil
}

// askKafka asks Kafka in the background whether it answers. The returned function ends that.
func (c *Consumer) askKafka(ctx context.Context) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var asking sync.WaitGroup
	asking.Go(func() { c.contact.Run(ctx) })
	return func() {
		cancel()
		asking.Wait()
	}
}

// Names of outages in the log. Each dead-letter topic has its own name, see outageDeadLetters.
const (
	outageKafka      = "Kafka"
	outageFetching   = "fetching"
	outageCommitting = "committing offsets"

	outageCommittingTopic = "committing offsets of topic " // with its name
)

// checkTables waits for PostgreSQL, checks that the schema is migrated and reads the pauses of
// operators. It returns nil if ctx ends first.
func (c *Consumer) checkTables(ctx context.Context) error {
	if c.handled == nil {
		return nil
	}
	answered := outage.Announce(c.Processor.Log, "PostgreSQL, or for a connection of its pool", handling.CheckTimeout, pg.Address(c.db)...)
	defer answered()
	for ctx.Err() == nil {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, handling.CheckTimeout)
		err := errors.Join(pg.CheckSessions(try, c.db), c.handled.Check(try), c.starts.Check(try), c.readPauses(try))
		cancel()
		answered()
		if errors.Is(err, pg.ErrEncoding) {
			return err
		}
		if pg.IsUndefined(err) {
			return pg.NotMigrated(c.Rules.Schema, err)
		}
		if err == nil {
			c.outages.Report(handling.OutagePostgres, began, nil)
			c.answered.Store(true)
			return nil
		}
		if ctx.Err() == nil {
			c.outages.Report(handling.OutagePostgres, began, err)
			wait.Sleep(ctx, c.outages.Backoff(handling.OutagePostgres))
		}
	}
	return nil
}

// Deliver passes a record to the handlers without Kafka: each action once, in its own transaction.
func (c *Consumer) Deliver(ctx context.Context, record *kgo.Record) error {
	p := c.Processor.ForOne(new(handling.Activity))
	from := originOf(record, kafka.TopicID{})
	it := c.reader.read(ctx, record, replayOf(record), &from)
	if it.isSkipped(c.Rules.DeadLetterUnknown) {
		return nil
	}
	if it.Err != nil {
		return it.Err
	}
	var errs []error
	for t := range it.InOrder() {
		_, err := p.ProcessOne(ctx, t)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// partitionLag is the lag of a partition: the offsets from Next to End are not handled.
type partitionLag struct {
	Topic     string
	Partition int32
	Next, End int64
}

// records returns the number of offsets that are not handled.
func (l partitionLag) records() int64 { return max(0, l.End-l.Next) }

// Lag returns the lag of the partitions that are assigned to this process.
func (c *Consumer) Lag(ctx context.Context) ([]partitionLag, error) {
	m := c.current.Load()
	if m == nil {
		return nil, nil
	}
	return m.lags(ctx)
}
