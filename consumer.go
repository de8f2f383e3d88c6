package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// Consumer passes the events of topics to handlers: those of a partition in order,
// partitions in parallel. Any number of processes may run the same group; each
// partition is assigned to one of them.
type Consumer struct {
	cfg       ConsumerConfig
	hostOpts  []kgo.Opt
	opts      []kgo.Opt // with what the promises need
	processor *processor
	reader    *reader
	handled   *handledStore // nil without PostgreSQL
	starts    *starts.Store // nil without PostgreSQL
	pauses    *pauses.Set
	operators *pauses.Store   // what they have paused; nil without PostgreSQL
	alerts    *consumerAlerts // nil without PostgreSQL
	slots     slots
	breakers  *actionBreakers // nil without PostgreSQL
	outages   *outage.Logs    // of PostgreSQL, Kafka and dead-letter topics

	running atomic.Bool
	current atomic.Pointer[membership]  // nil while it does not run
	parked  atomic.Pointer[deliveryRun] // nil while it does not run, and without PostgreSQL
	state   runState
}

// NewConsumer returns a consumer of the topics in which the registry has the events
// of the handlers. It makes its own Kafka client from opts when it runs: brokers,
// TLS, SASL and hooks are the caller's, group, topics and commits the consumer's.
// Options that name these are refused. The error names every bad field, option and
// handler.
//
// A new group skips what was in the topics before its first start, unless FromStart
// says otherwise. Its first member writes down in db where it begins, so that nothing is
// skipped later: partitions that are added, topics that are created later or created
// again, and, where Kafka has lost the offsets of the group, what came after the position
// that was saved last.
//
// With a database, an event whose handler fails is parked: see MaxRetries of [HandlerConfig]. It
// is handled again by any member of the group, in the order of its key, and what has become of
// it is a row of event_delivery.
//
// NewConsumer does no I/O. A running consumer uses a connection of db for each
// partition that it handles at the moment, see ConsumerConfig.Concurrency, up to four for parked
// events, and up to six more; closing db stays with the caller. A nil db will do if every handler is one of [HandleNoTx], and
// FromStart or FromEnd is set.
//
// Of each partition up to 20,000 records or 16 MiB wait in memory, of all of them
// MaxQueueBytes and a batch of each, and what fetches bring beyond that: of each broker
// 8 MiB that were polled and 8 MiB that wait to be, decompressed 64 MiB and a batch,
// unless opts says otherwise. A batch of more than 64 MiB is not read, again unless opts
// says otherwise: an ERROR says so, and its partition waits for an operator.
//
// Functions in opts, such as hooks and dialers, are called by the Kafka client in its own
// goroutines: one that panics ends the process, as anywhere else, and one that hangs
// holds the client up. Only a decompressor is guarded.
//
// A fetch waits up to 250 ms for something to arrive, unless opts
// says otherwise. While it waits for partitions that have nothing, it brings nothing
// for a partition whose queue was full when it began: the longer it may wait, the
// longer that one does.
func NewConsumer(db *pgxpool.Pool, opts []kgo.Opt, events *Registry, cfg ConsumerConfig, handlers ...Handler) (*Consumer, error) {
	given := cfg
	cfg = cfg.withDefaults()
	errs := []error{cfg.validate(given), checkConsumerOpts(opts)}
	if events == nil {
		errs = append(errs, fmt.Errorf("registry %w", ErrNilArgument))
	}
	var routes routes
	if events != nil {
		var err error
		routes, err = newRoutes(events, &cfg.HandlerConfig, handlers)
		errs = append(errs, err)
	}
	if db == nil {
		errs = append(errs, given.checkWithoutDatabase(handlers))
	}
	err := errors.Join(errs...)
	if err == nil {
		cfg.DeadLetterTopic, err = fixedDeadLetterTopics(cfg.DeadLetterTopic, routes.topics)
	}
	var all []kgo.Opt
	if err == nil {
		all, err = consumerOpts(opts, cfg, routes.topics)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: consumer config: %w", err)
	}
	log := cfg.Logger.With("group", cfg.Group)
	cfg.HandlerConfig = cfg.guarded(log)
	c := &Consumer{
		cfg: cfg, hostOpts: slices.Clone(opts), opts: all, outages: outage.NewLogs(log), pauses: pauses.NewSet(),
		processor: &processor{cfg: cfg.HandlerConfig, routes: routes, log: log, input: &inputLog{}, apart: new(sync.Map)},
	}
	c.reader = &reader{processor: c.processor, decode: cfg.Decode}
	if cfg.Concurrency > 0 {
		c.slots.calls = handling.NewSlots(cfg.Concurrency)
	}
	if db != nil {
		c.slots.transactions = handling.SlotsOf(db)
		c.handled = newHandledStore(db, cfg.Schema, cfg.Group)
		c.handled.durable = true // the group's offset, which is in Kafka, says that events are handled
		c.processor.store = c.handled
		c.breakers = newActionBreakers(&c.cfg.HandlerConfig, routes, log)
		c.starts = starts.NewStore(db, cfg.Schema, cfg.Group)
		c.operators = pauses.NewStore(db, cfg.Schema, cfg.Group)
		c.alerts = newConsumerAlerts(db, &c.cfg, log)
	}
	return c, nil
}

// Group returns the consumer group.
func (c *Consumer) Group() string { return c.cfg.Group }

// Topics returns the topics that the consumer reads, sorted.
func (c *Consumer) Topics() []string { return slices.Clone(c.processor.routes.topics) }

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
// member, which takes it over after SessionTimeout.
//
// Outages of Kafka and PostgreSQL are waited out, not returned. Run returns an error
// only if an operator has to act: [ErrNotMigrated].
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer c.running.Store(false)
	c.state.begin()
	err := c.run(ctx)
	c.state.end(err)
	return err
}

func (c *Consumer) run(ctx context.Context) (err error) {
	if err := c.checkTables(ctx); err != nil || ctx.Err() != nil {
		return err
	}
	defer c.watchPauses(ctx)()
	defer c.alerts.start(ctx)()
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
	for ctx.Err() == nil { // again if a topic was created again: the client cannot read the new one
		m, err := join(c.hostOpts, c.opts, &c.cfg, c.reader, c.starts, limits{slots: c.slots, pauses: c.pauses, parking: parking}, c.outages)
		if err != nil {
			return err
		}
		c.current.Store(m)
		polling := m.startPolling(ctx)
		select { // and not when polling has ended: it waits while partitions are given up
		case <-ctx.Done():
		case <-m.starts.Outdated().Done():
		}
		if ctx.Err() != nil {
			c.state.stop()
		}
		c.current.Store(nil)
		m.close(polling)
	}
	return nil
}

// What outages of a consumer are named in its log; those of dead-letter topics have a
// name each.
const (
	outageFetching   = "fetching"
	outageCommitting = "committing offsets"

	outageCommittingTopic = "committing offsets of topic " // with its name
)

// checkTables waits for PostgreSQL and checks that the tables of consumers are as this release
// needs them. It also reads what is paused, before anything is handled.
func (c *Consumer) checkTables(ctx context.Context) error {
	if c.handled == nil {
		return nil
	}
	answered := outage.Announce(c.processor.log, "PostgreSQL, or for a connection of its pool", checkTimeout)
	defer answered()
	for ctx.Err() == nil {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, checkTimeout)
		err := errors.Join(c.handled.check(try), c.starts.Check(try), c.readPauses(try))
		cancel()
		answered()
		if pg.IsUndefined(err) {
			return pg.NotMigrated(c.cfg.Schema, err)
		}
		if err == nil {
			c.outages.Report(outagePostgres, began, nil)
			return nil
		}
		if ctx.Err() == nil {
			c.outages.Report(outagePostgres, began, err)
			wait.Sleep(ctx, c.outages.Backoff(outagePostgres))
		}
	}
	return nil
}

// Deliver passes a record to the handlers as [Consumer.Run] does, without Kafka: it
// is for tests. Each action runs once, in a transaction of its own; errors are
// returned, not tried again, and there are no dead letters. Actions that are done
// already are skipped, and event types without a handler as Unknown says. Headers of a
// replay count, see [ReplayGroup].
func (c *Consumer) Deliver(ctx context.Context, record *kgo.Record) error {
	p := c.processor.forOne(new(handling.Activity))
	from := originOf(record, kafka.TopicID{})
	it := c.reader.read(ctx, record, replayOf(record), &from)
	if it.isSkipped(c.cfg.Unknown) {
		return nil
	}
	errs := []error{it.err}
	for t := range it.inOrder() {
		errs = append(errs, p.processOne(ctx, t))
	}
	return errors.Join(errs...)
}

func needsTx(h Handler) bool { return !check.IsNil(h) && h.handler().kind != noTx }
