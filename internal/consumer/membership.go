package consumer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

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
