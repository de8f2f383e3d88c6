package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// CheckOpts refuses options that belong to the consumer, and those with which it
// would not do what it promises. Which options there are, and what becomes of each, is in
// TestConsumerOptions.
func CheckOpts(opts []kgo.Opt) error {
	const itsOwn = "it belongs to the consumer"
	const topicsFollow = "topics follow from the handlers"
	const itsField = "ConsumerConfig has a field for it"
	return kafka.CheckOpts(opts, func(o kafka.HostOpts) {
		o.RejectCommon()
		o.Reject(o.Names(kgo.ConsumerGroup), "ConsumerGroup", "it is the argument group of NewConsumer")
		o.Reject(o.Names(kgo.ShareGroup), "ShareGroup", itsOwn)
		o.Reject(o.Client.OptValue(kgo.GroupProtocol) != "consumer", "GroupProtocol", itsOwn)
		o.Reject(o.Lists(kgo.ConsumeTopics), "ConsumeTopics", topicsFollow)
		o.Reject(o.Lists(kgo.ConsumePartitions), "ConsumePartitions", topicsFollow)
		o.Reject(o.Lists(kgo.ConsumeExcludeTopics), "ConsumeExcludeTopics", topicsFollow)
		o.Reject(o.Sets(kgo.ConsumeRegex), "ConsumeRegex", topicsFollow+", and a topic's name is also in that of its dead letters")
		o.Reject(o.Sets(kgo.KeepControlRecords), "KeepControlRecords", "markers of transactions are no events")
		o.Reject(o.Differs(kgo.ConsumeStartOffset, unlikelyOffset), "ConsumeStartOffset", "ConsumerConfig.From says where a new group begins")
		o.Reject(o.Differs(kgo.ConsumeResetOffset, unlikelyOffset), "ConsumeResetOffset", itsOwn)
		o.Reject(o.Differs(kgo.FetchIsolationLevel, int8(1)), "FetchIsolationLevel", "events of aborted transactions never happened")
		o.Reject(o.Differs(kgo.SessionTimeout, unlikelyTimeout), "SessionTimeout", itsField)
		o.Reject(o.Differs(kgo.HeartbeatInterval, unlikelyHeartbeat), "HeartbeatInterval", itsField)
		o.Reject(o.Differs(kgo.RebalanceTimeout, unlikelyTimeout), "RebalanceTimeout", "ConsumerConfig.MaxPollInterval says it")
		o.Reject(o.Sets(kgo.OnPartitionsAssigned), "OnPartitionsAssigned", itsOwn)
		o.Reject(o.Sets(kgo.OnPartitionsRevoked), "OnPartitionsRevoked", itsOwn)
		o.Reject(o.Sets(kgo.OnPartitionsLost), "OnPartitionsLost", itsOwn)
		o.Reject(o.Sets(kgo.OnOffsetsFetched), "OnOffsetsFetched", "its error would keep the member from its partitions")
		o.Reject(o.Sets(kgo.AdjustFetchOffsetsFn), "AdjustFetchOffsetsFn", itsOwn)
		o.Reject(o.Sets(kgo.StopProducerOnDataLossDetected), "StopProducerOnDataLossDetected", "no dead letter could be sent any more")
	}, unlikelyOpts...)
}

// What the host sets to the value that an option has by itself cannot be told from what it
// does not set, and it must not be overridden silently. So options are looked at behind
// others that nobody sets.
const (
	unlikelyTimeout   = 40*time.Second + 1
	unlikelyHeartbeat = time.Duration(1) // below any SessionTimeout, as kgo wants it
)

var unlikelyOffset = kgo.NewOffset().At(1<<62 - 1)

var unlikelyOpts = []kgo.Opt{
	kgo.ConsumeStartOffset(unlikelyOffset), kgo.ConsumeResetOffset(unlikelyOffset), kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	kgo.SessionTimeout(unlikelyTimeout), kgo.HeartbeatInterval(unlikelyHeartbeat), kgo.RebalanceTimeout(unlikelyTimeout),
}

// fetchMaxWait is how long a broker may keep a fetch that finds nothing, unless the
// host says otherwise. A partition that is resumed is in none until the one that is
// under way returns, so its queue has to last that long.
const fetchMaxWait = 250 * time.Millisecond

// fetchMaxBytes is how many bytes a fetch from a broker brings, before decompression,
// unless the host says otherwise.
const fetchMaxBytes = 8 << 20

// consumerOpts are the host's options with what the promises need.
func consumerOpts(host []kgo.Opt, cfg *Rules, topics []string) ([]kgo.Opt, error) {
	maxWrite, err := kafka.LargestWrite(host) // dead letters are as large as what was read
	if err != nil {
		return nil, err
	}
	around := func(host []kgo.Opt) []kgo.Opt { return aroundHost(host, cfg, topics, maxWrite) }
	return around(host), kafka.ValidateOpts(host, around)
}

func aroundHost(host []kgo.Opt, cfg *Rules, topics []string, maxWrite int32) []kgo.Opt {
	return append(append([]kgo.Opt{kgo.FetchMaxWait(fetchMaxWait), kgo.FetchMaxBytes(fetchMaxBytes)}, kafka.Bounded(host)...),
		kgo.ConsumerGroup(cfg.Group),
		kgo.ConsumeTopics(topics...),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()), // starts decides
		// If the committed offset no longer exists, what there is must not be skipped.
		kgo.ConsumeResetOffset(kgo.RewindOffset(time.Minute)),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		// They tell an end of a transaction from a record that Kafka has removed.
		kgo.KeepControlRecords(),
		kgo.SessionTimeout(cfg.SessionTimeout),
		kgo.HeartbeatInterval(cfg.HeartbeatInterval),
		kgo.RebalanceTimeout(cfg.MaxPollInterval),
		kgo.DisableAutoCommit(),
		// No partition may be revoked between a poll and the queues.
		kgo.BlockRebalanceOnPoll(),
		// For dead letters, see kafka.ProducerOpts.
		kgo.RequiredAcks(kgo.AllISRAcks()),
		kgo.RecordDeliveryTimeout(deadLetterDelivery),
		kgo.AllowIdempotentProduceCancellation(),
		kgo.ProducerBatchMaxBytes(maxWrite),
		kgo.ProducerLinger(0),
	)
}

// membership is one Run of a consumer in its group: a Kafka client, and a worker for
// each partition that the group has assigned to it.
type membership struct {
	cfg            *Rules
	reader         *reader
	outages        *outage.Logs
	log            *slog.Logger
	client         *kgo.Client
	hangUp         context.CancelFunc // ends all that the client does
	hostOpts       []kgo.Opt          // those of client without what makes it a member
	commitRequests chan struct{}      // holds at most one
	starts         *starts.Member
	replays        *deadletter.Replays
	limits         limits
	bound          *kafka.FetchBound
	lag            handling.Trend

	pieces              handling.Pieces // in which partitions are fetched
	once                sync.Once
	fetchPartitionBytes int32 // of the options; set once

	committing sync.Mutex // held for a commit, so that none is under way while partitions go
	mu         sync.Mutex
	workers    map[kafka.Partition]*partitionWorker
	running    map[*partitionWorker]bool // those in workers, and those that are to end and have not yet
	member     string                    // the member id under which the group assigned the partitions
	closing    bool                      // takes no more partitions
}

// join makes the client from opts. Kafka is asked for partitions in the background. The
// client lives until close, whatever becomes of the context in the host's options.
func join(host, opts []kgo.Opt, cfg *Rules, r *reader, store *starts.Store, limits limits, outages *outage.Logs) (*membership, error) {
	ctx, err := kafka.ContextOf(host)
	if err != nil {
		return nil, fmt.Errorf("outbox: make Kafka client: %w", err)
	}
	bound, err := kafka.NewFetchBound(host)
	if err != nil {
		return nil, fmt.Errorf("outbox: make Kafka client: %w", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m := &membership{
		cfg: cfg, reader: r, outages: outages, log: r.processor.Log, hangUp: cancel, hostOpts: host, bound: bound,
		limits:         limits,
		commitRequests: make(chan struct{}, 1), workers: map[kafka.Partition]*partitionWorker{}, running: map[*partitionWorker]bool{},
	}
	m.limits.budget = handling.NewBudget(cfg.MaxQueueBytes)
	m.starts = starts.NewMember(starts.Config{
		Store: store, Group: cfg.Group, Topics: r.processor.Routes.Topics, FromStart: cfg.FromStart, Log: m.log, Outages: outages,
		Commit: m.commitStarts, Begun: m.begun, Lost: m.lostRecords, Pause: m.pauseFetching, Resume: m.resumeStalled,
	})
	m.committing.Lock() // the client may want to commit before it is returned
	defer m.committing.Unlock()
	client, err := kafka.NewClient(append(slices.Clip(opts),
		kgo.WithContext(ctx),
		kgo.WithDecompressor(bound),
		kgo.WithHooks(batchHook(m.pieces.Saw)),
		kgo.OnPartitionsAssigned(m.assigned),
		kgo.OnPartitionsRevoked(m.revoked),
		kgo.OnPartitionsLost(m.lost),
		kgo.AdjustFetchOffsetsFn(m.starts.StartOffsets),
	))
	if err != nil {
		cancel()
		return nil, fmt.Errorf("outbox: make Kafka client: %w", err)
	}
	m.client, m.replays = client, deadletter.NewReplays(client)
	return m, nil
}

// What a [partitionWorker] needs of its group, see [partitionGroup].

func (m *membership) pauseFetching(p kafka.Partition)  { m.client.PauseFetchPartitions(p.Only()) }
func (m *membership) resumeFetching(p kafka.Partition) { m.client.ResumeFetchPartitions(p.Only()) }
func (m *membership) requestCommit()                   { wait.Signal(m.commitRequests) }
func (m *membership) topicID(topic string) kafka.TopicID {
	return m.starts.TopicID(topic)
}

func (m *membership) produce(ctx context.Context, record *kgo.Record) error {
	return m.client.ProduceSync(ctx, record).FirstErr()
}

// pollRecords is how many records a poll takes from what was fetched. How many of a
// partition are handled together is up to its worker.
const pollRecords = 1_000

// startPolling polls in the background, and returns a channel that is closed when that
// has ended.
func (m *membership) startPolling(ctx context.Context) (ended <-chan struct{}) {
	polling := make(chan struct{})
	go func() {
		defer close(polling)
		m.poll(ctx)
	}()
	return polling
}

// poll fills the queues until ctx is cancelled.
func (m *membership) poll(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer context.AfterFunc(m.starts.Outdated(), cancel)()
	var beside sync.WaitGroup
	defer beside.Wait()
	defer cancel()
	beside.Go(func() { m.keepCommitting(ctx) })
	beside.Go(func() { m.starts.Run(ctx, m.client) })
	beside.Go(func() { m.checkDeadLetterTopics(ctx) })
	beside.Go(func() { m.watchHandlers(ctx) })
	beside.Go(func() { m.watchLag(ctx) })
	beside.Go(func() { m.watchWaiting(ctx) })
	beside.Go(func() { m.limits.pauses.Watch(ctx, m.reader.processor.Routes.Topics, m.pauseTopics) })
	for ctx.Err() == nil {
		began := time.Now()
		fetches := m.client.PollRecords(ctx, pollRecords)
		fetches.EachError(func(topic string, number int32, err error) {
			m.fetchFailed(ctx, began, kafka.Partition{Topic: topic, Number: number}, err)
		})
		fetches.EachPartition(m.distribute)
		if m.pieces.Grew() {
			m.limitFetches(m.client)
		}
		if m.limits.budget.IsOver() {
			for _, w := range m.all() {
				w.recheckQueue()
			}
		}
		if fetches.NumRecords() < pollRecords {
			m.bound.Reset()
		}
		m.client.AllowRebalance()
	}
}

// distribute puts what a poll brought for a partition into its queue.
func (m *membership) distribute(p kgo.FetchTopicPartition) {
	if len(p.Records) == 0 {
		return
	}
	at := kafka.Partition{Topic: p.Topic, Number: p.Partition}
	w := m.workerOf(at)
	if w == nil { // fetched for an assignment that is over
		return
	}
	if m.outages.Failing() {
		m.outages.Report(outageFetching, time.Now(), nil)
	}
	m.starts.Works(at)
	if from, lost := w.fetched(p.FetchPartition); lost > 0 {
		m.starts.Passed(at, from, lost)
	}
	w.add(p.Records)
}

// fetchFailed logs the failure of a fetch. The client goes on trying in any case.
func (m *membership) fetchFailed(ctx context.Context, began time.Time, at kafka.Partition, err error) {
	var loss *kgo.ErrDataLoss
	var large *kgo.ErrDecompressTooLarge
	switch {
	case ctx.Err() != nil:
	case errors.As(err, &loss):
		m.log.Warn("outbox: Kafka has lost records of a partition", "partition", at.Name(), "error", err)
	case errors.Is(err, kafka.ErrFetchFull):
	case errors.As(err, &large):
		m.block(at, large)
	case kafka.IsReplaced(err):
		m.starts.Stall(at)
	default:
		m.outages.Report(outageFetching, began, err)
	}
}

// block notes that the client does not fetch a partition any more, because of a batch.
func (m *membership) block(at kafka.Partition, large *kgo.ErrDecompressTooLarge) {
	if w := m.workerOf(at); w != nil {
		w.block(large)
	}
	m.log.Error("outbox: a batch of records is larger than this consumer decompresses, and its partition waits; raise kgo.MaxDecompressBatchBytes in the Kafka options and start again, "+
		"or set the offset of the group to next_offset to pass over the batch", "topic", large.Topic, "partition", large.Partition, "offset", large.Offset, "next_offset", large.NextOffset,
		"bytes", m.client.OptValue(kgo.MaxDecompressBatchBytes))
}

// What [starts.Member] needs of its group.

// commitStarts commits the offsets with which reading begins, unless the partitions were
// given up while that was decided: another member may be further on already.
func (m *membership) commitStarts(ctx context.Context, begins map[kafka.Partition]int64) error {
	m.committing.Lock()
	defer m.committing.Unlock()
	offsets := map[string]map[int32]kgo.EpochOffset{}
	for at, offset := range begins {
		if ctx.Err() != nil || m.workerOf(at) == nil {
			return errGivenUp
		}
		put(offsets, at.Topic, at.Number, kgo.EpochOffset{Epoch: -1, Offset: offset})
	}
	rejected, err := m.commitOffsets(context.Background(), offsets)
	for topic, failed := range rejected {
		err = errors.Join(err, fmt.Errorf("topic %s: %w", topic, failed))
	}
	return err
}

var errGivenUp = errors.New("partition is assigned no longer")

func (m *membership) begun(at kafka.Partition, offset int64) {
	if w := m.workerOf(at); w != nil {
		w.begin(offset)
	}
}

func (m *membership) lostRecords(at kafka.Partition, records int64) {
	if m.cfg.Hooks.Lost != nil {
		m.cfg.Hooks.Lost(at.Topic, at.Number, records)
	}
}

// resumeStalled fetches a partition again, unless its queue is full.
func (m *membership) resumeStalled(at kafka.Partition) {
	if w := m.workerOf(at); w != nil && !w.isPaused() {
		m.resumeFetching(at)
	}
}

// workerOf returns the worker of a partition, or nil.
func (m *membership) workerOf(at kafka.Partition) *partitionWorker {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.workers[at]
}

func (m *membership) assigned(_ context.Context, client *kgo.Client, topics map[string][]int32) {
	client.ResumeFetchPartitions(topics) // one may have been paused when it was revoked
	if m.outages.Failing() {
		m.outages.Report(outageFetching, time.Now(), nil) // the group works again, also where the topics have nothing new
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.member, _ = client.GroupMetadata()
	if m.closing {
		return
	}
	for topic, numbers := range topics {
		for _, number := range numbers {
			at := kafka.Partition{Topic: topic, Number: number}
			w := newPartitionWorker(at, m.reader, m, m.cfg, m.limits, m.outages)
			m.workers[at], m.running[w] = w, true
			go func() {
				w.run()
				m.mu.Lock()
				defer m.mu.Unlock()
				delete(m.running, w)
			}()
		}
	}
	m.limitFetches(client)
}

// limitFetches has each partition fetched in pieces of at most its share of MaxQueueBytes,
// or of the largest batch.
func (m *membership) limitFetches(client *kgo.Client) {
	m.once.Do(func() { m.fetchPartitionBytes, _ = client.OptValue(kgo.FetchMaxPartitionBytes).(int32) })
	all, _ := client.OptValue(kgo.FetchMaxBytes).(int32)
	client.UpdateFetchMaxBytes(all, int32(min(int(m.fetchPartitionBytes), m.pieces.Size(m.limits.budget.Share()))))
}

// batchHook is called by the Kafka client with the compressed size of each batch that it
// has fetched.
type batchHook func(bytes int)

func (f batchHook) OnFetchBatchRead(_ kgo.BrokerMetadata, _ string, _ int32, read kgo.FetchBatchMetrics) {
	f(read.CompressedBytes)
}

// revoked gives partitions up: what is in flight is finished and committed. Kafka
// waits for it, and the client sends heartbeats meanwhile.
func (m *membership) revoked(_ context.Context, client *kgo.Client, topics map[string][]int32) {
	m.committing.Lock()
	defer m.committing.Unlock()
	workers := m.remove(topics)
	m.finish(workers, m.cfg.SessionTimeout, abandonGrace)
	m.limitFetches(client)
	if err := m.commit(context.Background(), workers); err != nil {
		m.log.Debug("outbox: offsets of revoked partitions not committed, what they cover is repeated", "error", err)
	}
}

// lost ends the work on partitions that another member may have already.
func (m *membership) lost(_ context.Context, _ *kgo.Client, topics map[string][]int32) {
	m.abandon(m.remove(topics), abandonGrace)
}

// abandonGrace is how long a worker has to return after its context has ended, when the
// group waits for its partition.
const abandonGrace = time.Second

// remove takes the workers of partitions out of the map, so that nothing else commits
// for them.
func (m *membership) remove(topics map[string][]int32) (workers []*partitionWorker) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for topic, numbers := range topics {
		for _, number := range numbers {
			at := kafka.Partition{Topic: topic, Number: number}
			if w := m.workers[at]; w != nil {
				workers = append(workers, w)
				delete(m.workers, at)
			}
		}
	}
	return workers
}

func (m *membership) all() (workers []*partitionWorker) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.workers {
		workers = append(workers, w)
	}
	return workers
}

const (
	// commitPause keeps busy partitions from committing all the time. After a crash
	// that much arrives again, and what is noted in event_handled is skipped.
	commitPause   = 100 * time.Millisecond
	commitTimeout = 5 * time.Second
	// commitRetry is after which time offsets of a topic that Kafka has refused are tried
	// again, unless there is something else to commit before.
	commitRetry = 10 * time.Second
)

// keepCommitting commits what is handled until ctx is cancelled. A commit that failed
// is tried again.
func (m *membership) keepCommitting(ctx context.Context) {
	for ctx.Err() == nil {
		wait.Await(ctx, ctx, m.commitRequests, commitRetry)
		if ctx.Err() != nil {
			return
		}
		if m.commitAll(context.Background()) != nil {
			m.requestCommit()
		}
		wait.Sleep(ctx, commitPause)
	}
}

// commitAll commits for the partitions that are not being revoked.
func (m *membership) commitAll(ctx context.Context) error {
	m.committing.Lock()
	defer m.committing.Unlock()
	return m.commit(ctx, m.all())
}

// uncommitted returns how far workers have come, where Kafka does not know yet.
func uncommitted(workers []*partitionWorker) (offsets map[string]map[int32]kgo.EpochOffset, covered map[*partitionWorker]kgo.EpochOffset) {
	offsets, covered = map[string]map[int32]kgo.EpochOffset{}, map[*partitionWorker]kgo.EpochOffset{}
	for _, w := range workers {
		if next, ok := w.uncommitted(); ok {
			put(offsets, w.partition.Topic, w.partition.Number, next)
			covered[w] = next
		}
	}
	return offsets, covered
}

// commit commits how far workers have come. The caller holds committing.
func (m *membership) commit(ctx context.Context, workers []*partitionWorker) error {
	offsets, covered := uncommitted(workers)
	if len(offsets) == 0 {
		return nil
	}
	began := time.Now()
	rejected, err := m.commitOffsets(ctx, offsets)
	if err != nil {
		if !isRebalance(err) {
			m.outages.Report(outageCommitting, began, err)
		}
		return err
	}
	m.outages.Report(outageCommitting, began, nil)
	m.noteCommitted(began, covered, rejected)
	return nil
}

// noteCommitted notes what Kafka knows. What it has refused is committed with what follows.
func (m *membership) noteCommitted(began time.Time, covered map[*partitionWorker]kgo.EpochOffset, rejected rejectedTopics) {
	m.reportRejected(began, covered, rejected)
	for w, next := range covered {
		if rejected[w.partition.Topic] == nil {
			w.committed(next)
			m.starts.Committed(w.partition, next.Offset)
		}
	}
}

// isRebalance reports whether a commit failed because the group is rebalancing. The
// partitions that stay are committed afterwards.
func isRebalance(err error) bool {
	return errors.Is(err, kerr.RebalanceInProgress) || errors.Is(err, kerr.IllegalGeneration) || errors.Is(err, kerr.UnknownMemberID) ||
		errors.Is(err, errExpelled)
}
