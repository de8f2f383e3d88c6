package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// membership is a consumer's time in its group with one Kafka client. It has a worker for each
// partition that the group has assigned.
type membership struct {
	cfg            *Rules
	reader         *reader
	outages        *outage.Logs
	contact        *kafka.Contact
	log            *slog.Logger
	client         *kgo.Client
	hangUp         context.CancelFunc // ends all requests of the client
	hostOpts       []kgo.Opt          // options of a client that is no member of the group
	second         secondClient       // reads what is not the next of a partition
	commitRequests chan struct{}      // signals keepCommitting; capacity 1
	starts         *starts.Member
	replays        *deadletter.Replays
	streams        streams
	limits         limits
	bound          *kafka.FetchBound
	lag            handling.Trend

	pieces              handling.Pieces // bytes of one fetch of a partition; written by the client and the poll loop
	once                sync.Once
	fetchPartitionBytes int32 // FetchMaxPartitionBytes of the options; set once

	forgetting sync.Mutex
	forgotten  atomic.Int64 // how often the client has forgotten a dead-letter topic; written under forgetting

	committing sync.Mutex // held during a commit and while partitions are revoked
	mu         sync.Mutex // guards the fields below
	workers    map[kafka.Partition]*partitionWorker
	running    map[*partitionWorker]bool // workers that have not ended; also those of revoked partitions
	member     string                    // the member id under which the group assigned the partitions
	closing    bool                      // assigned ignores new partitions
	unread     map[kafka.Partition]error // assigned partitions, and topics, whose last fetch has failed
}

// join makes a client from opts, which joins the group in the background. The client lives until
// close, also if the context in the host's options ends earlier.
func join(host, opts []kgo.Opt, cfg *Rules, r *reader, store *starts.Store, limits limits, outages *outage.Logs, contact *kafka.Contact) (*membership, error) {
	ctx, err := kafka.ContextOf(host)
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	bound, err := kafka.NewFetchBound(host)
	if err != nil {
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m := &membership{
		cfg: cfg, reader: r, outages: outages, contact: contact, log: r.processor.Log, hangUp: cancel, hostOpts: host, bound: bound,
		limits:         limits,
		commitRequests: make(chan struct{}, 1), workers: map[kafka.Partition]*partitionWorker{}, running: map[*partitionWorker]bool{},
	}
	m.streams.slot = make(chan struct{}, 1)
	m.limits.budget = handling.NewBudget(cfg.MaxQueueBytes)
	m.starts = starts.NewMember(starts.Config{
		Store: store, Group: cfg.Group, Topics: r.processor.Routes.Topics, Handlers: handlersOf(r.processor.Routes), FromStart: cfg.FromStart, Log: m.log, Outages: outages,
		Commit: m.commitStarts, Begun: m.begun, Lost: m.lostRecords, Pause: m.pauseFetching, Resume: m.resumeStalled,
	})
	m.committing.Lock() // callbacks of the client may commit before m.client is set
	defer m.committing.Unlock()
	client, err := kafka.NewClient(append(slices.Clip(opts),
		kgo.WithContext(ctx),
		kgo.WithDecompressor(bound),
		kgo.WithHooks(batchHook(m.pieces.Saw)),
		kgo.OnPartitionsAssigned(m.assigned),
		kgo.OnPartitionsRevoked(m.revoked),
		kgo.OnPartitionsLost(m.lost),
		kgo.OnOffsetsFetched(m.starts.OffsetsFetched),
		kgo.AdjustFetchOffsetsFn(m.starts.StartOffsets),
	))
	if err != nil {
		cancel()
		return nil, fmt.Errorf("make Kafka client: %w", err)
	}
	m.client = client
	m.second.opts = append(kafka.Bounded(host), kgo.WithContext(ctx))
	m.replays = deadletter.NewReplays(m.second.get)
	return m, nil
}

// secondClient is a client that is no member of the group, made when it is needed first. Its fetches do not wait
// behind those of the member: a broker answers the fetches of a client one by one.
type secondClient struct {
	opts   []kgo.Opt
	mu     sync.Mutex
	client *kgo.Client // nil until get
	closed bool
}

func (s *secondClient) get() (_ *kgo.Client, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.client == nil {
		if s.closed {
			return nil, kgo.ErrClientClosed
		}
		s.client, err = kafka.NewClient(s.opts)
	}
	return s.client, err
}

func (s *secondClient) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.client != nil {
		s.client.Close()
	}
}

// membership implements [partitionGroup].

func (m *membership) pauseFetching(p kafka.Partition)  { m.client.PauseFetchPartitions(p.Only()) }
func (m *membership) resumeFetching(p kafka.Partition) { m.client.ResumeFetchPartitions(p.Only()) }
func (m *membership) requestCommit()                   { wait.Signal(m.commitRequests) }
func (m *membership) topicID(topic string) kafka.TopicID {
	return m.starts.TopicID(topic)
}

// proveHeld does not wait for a commit or a revocation that is under way: a revocation waits for its workers.
func (m *membership) proveHeld(ctx context.Context, at kafka.Partition, committed kgo.EpochOffset) error {
	if !m.committing.TryLock() {
		return errCommitting
	}
	defer m.committing.Unlock()
	began := time.Now()
	err := m.commitEach(ctx, ctx, map[kafka.Partition]kgo.EpochOffset{at: committed})
	if ctx.Err() == nil && !isRebalance(err) && !errors.Is(err, errRevoked) {
		m.outages.Report(outageCommitting, began, err)
	}
	return err
}

// truncated implements partitionGroup. The poll loop calls it, too.
func (m *membership) truncated(loss *kgo.ErrDataLoss) {
	m.starts.Truncated(kafka.Partition{Topic: loss.Topic, Number: loss.Partition}, loss.ResetTo, loss)
}

func (m *membership) suspect(ctx context.Context, at kafka.Partition, offset int64, stopped bool) (ends int, err error) {
	return m.starts.Suspect(ctx, at, offset, stopped)
}

func (m *membership) openGaps(ctx context.Context, at kafka.Partition, from int64) error {
	return m.starts.OpenGaps(ctx, at, from)
}

func (m *membership) passGaps(ctx context.Context, gaps []starts.Gap, until int64) error {
	return m.starts.PassGaps(ctx, gaps, until)
}

// produce sends a record and waits for Kafka. Where the client has sent to a topic that was deleted and created again,
// it forgets the old one, and sends the record once more.
func (m *membership) produce(ctx context.Context, record *kgo.Record) error {
	before := m.forgotten.Load()
	err := m.client.ProduceSync(ctx, record).FirstErr()
	if !kafka.IsReplaced(err) {
		return err
	}
	m.forgetReplaced(record.Topic, before)
	return m.client.ProduceSync(ctx, record).FirstErr()
}

// forgetReplaced has the client forget a topic to which it has sent, unless it has forgotten one since before: the
// records that others have sent to the new topic meanwhile would fail, although they may arrive.
func (m *membership) forgetReplaced(topic string, before int64) {
	m.forgetting.Lock()
	defer m.forgetting.Unlock()
	if m.forgotten.Load() == before {
		m.client.PurgeTopicsFromProducing(topic)
		m.forgotten.Add(1)
	}
}

// The functions below are callbacks of [starts.Member].

// commitStarts commits the offsets at which reading begins. It returns errRevoked if a partition is
// not assigned any more: another member may have committed a later offset.
func (m *membership) commitStarts(ctx context.Context, begins map[kafka.Partition]kgo.EpochOffset) error {
	m.committing.Lock()
	defer m.committing.Unlock()
	return m.commitEach(ctx, context.Background(), begins)
}

// commitEach is commitStarts for a caller that holds committing. The first context says whether to commit, and the
// second one bounds the commit.
func (m *membership) commitEach(ctx, bound context.Context, begins map[kafka.Partition]kgo.EpochOffset) error {
	offsets := map[string]map[int32]kgo.EpochOffset{}
	for at, offset := range begins {
		if ctx.Err() != nil || m.workerOf(at) == nil {
			return errRevoked
		}
		put(offsets, at.Topic, at.Number, offset)
	}
	rejected, err := m.commitOffsets(bound, offsets)
	for topic, failed := range rejected {
		err = errors.Join(err, fmt.Errorf("topic %s: %w", topic, failed))
	}
	return err
}

var (
	errRevoked    = errors.New("partition is assigned no longer")
	errCommitting = errors.New("another commit is under way")
)

func (m *membership) begun(at kafka.Partition, b starts.Beginning) {
	if w := m.workerOf(at); w != nil {
		w.begin(b)
	}
}

func (m *membership) lostRecords(at kafka.Partition, records int64) {
	if m.cfg.Hooks.Lost != nil {
		m.cfg.Hooks.Lost(at.Topic, at.Number, records)
	}
}

// resumeStalled resumes fetching of a partition, unless its queue is full or a stream reads it.
func (m *membership) resumeStalled(at kafka.Partition) {
	if w := m.workerOf(at); w != nil {
		w.resume()
	}
}

// workerOf returns the worker of a partition, or nil.
func (m *membership) workerOf(at kafka.Partition) *partitionWorker {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.workers[at]
}

// answered notes that Kafka has assigned partitions to this member, or has returned records.
func (m *membership) answered() {
	m.contact.Heard(nil)
	if m.outages.Failing() {
		m.outages.Report(outageFetching, time.Now(), nil)
		m.outages.Report(outageKafka, time.Now(), nil)
	}
}

func (m *membership) assigned(_ context.Context, client *kgo.Client, topics map[string][]int32) {
	m.answered()
	client.ResumeFetchPartitions(topics) // a partition may have been paused when it was revoked
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

// revoked ends the workers of revoked partitions and commits their offsets. Kafka waits for it, and
// the client sends heartbeats meanwhile.
func (m *membership) revoked(_ context.Context, client *kgo.Client, topics map[string][]int32) {
	m.committing.Lock()
	defer m.committing.Unlock()
	workers := m.remove(topics)
	m.finish(workers, m.cfg.SessionTimeout, abandonGrace)
	m.limitFetches(client)
	defer inBackground(func() { m.starts.Ended(topics) })() // the next member may only begin after that
	if err := m.commit(context.Background(), workers); err != nil {
		m.log.Debug("outbox: offsets of revoked partitions not committed; their events arrive again", "error", err)
	}
}

// inBackground calls f. wait waits for it.
func inBackground(f func()) (wait func()) {
	var running sync.WaitGroup
	running.Go(f)
	return running.Wait
}

// lost ends the workers of lost partitions at once: another member may have the partitions.
func (m *membership) lost(_ context.Context, _ *kgo.Client, topics map[string][]int32) {
	m.starts.Expelled(topics)
	m.abandon(m.remove(topics), abandonGrace)
}

// abandonGrace is how long a rebalance waits for a worker after its context has ended.
const abandonGrace = time.Second

// remove removes the workers of partitions from the map, so that commitAll leaves them out.
func (m *membership) remove(topics map[string][]int32) (workers []*partitionWorker) {
	defer func() {
		for topic := range topics {
			m.endUnread(topic)
		}
	}()
	m.mu.Lock()
	defer m.mu.Unlock()
	for topic, numbers := range topics {
		for _, number := range numbers {
			at := kafka.Partition{Topic: topic, Number: number}
			if w := m.workers[at]; w != nil {
				workers = append(workers, w)
				delete(m.workers, at)
			}
			delete(m.unread, at)
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
