// Package starts finds where a consumer group begins to read.
//
// Kafka cannot say whether a group is new: it deletes old offsets, and those of deleted topics. So the
// first member of a group stores the start of all partitions of a topic in the table consumer_start,
// and other members read it there.
//
// A listed partition begins at its stored start. Once the group has begun to read it, reading continues at the
// committed offset, or without one at the position that was saved last. A partition that is not listed is read from
// its beginning. A decision is committed to Kafka and then noted in PostgreSQL, before anything is read. Partitions of
// which Kafka does not say where they begin, because they have no leader, keep no others from being read.
//
// Members of several releases may have different handlers, so handlers are registered in consumer_handler. A
// member that begins with a partition, and lacks a handler of the group, opens a gap in consumer_gap: the handler
// has not seen what this member commits. A member with the handler first reads the gap, for this handler, and
// then goes on. The gaps of a handler that the group does not know yet begin at the committed offsets.
//
// A topic that was deleted and created again has another id. A client goes on asking for the id that it saw
// first, so the membership ends and the consumer joins with a new client.
package starts

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/wait"
)

// Config is what a [Member] needs.
type Config struct {
	Store     *Store // nil without PostgreSQL
	Group     string
	Topics    []string
	Handlers  []Handler
	FromStart bool // outbox.HandlerConfig.From is FromStart
	Log       *slog.Logger
	Outages   *outage.Logs

	// Commit commits the offsets at which reading begins, unless the context has ended.
	Commit func(context.Context, map[kafka.Partition]kgo.EpochOffset) error
	// Begun is called before reading of a partition begins.
	Begun func(kafka.Partition, Beginning)
	// Lost is called for records of a partition that Kafka has removed unread.
	Lost func(p kafka.Partition, records int64)
	// Pause and Resume stop fetching a partition for a while.
	Pause, Resume func(kafka.Partition)
}

// Beginning says how reading of a partition begins.
type Beginning struct {
	// EpochOffset is the committed offset, with the epoch of the record before it, or -1 if that is not known.
	kgo.EpochOffset
	Gaps []Gap // before the offset; the client reads from the first of them on
	Assignment
}

// Member is one member of a group with its Kafka client. It decides where the client
// begins to read, watches the topics, and saves positions.
type Member struct {
	cfg      Config
	id       uuid.UUID     // of this membership
	client   *kgo.Client   // set before prepared is closed
	prepared chan struct{} // closed when the starts of the group are stored
	stalled  chan struct{} // wakes watch; capacity 1
	outdated context.Context
	end      context.CancelFunc // ends outdated

	mu        sync.Mutex
	cluster   string                                // Kafka's id of the cluster
	fetched   map[kafka.Partition]kafka.GroupOffset // the answer that the client has got last
	ids       map[string]kafka.TopicID              // of topics, as this client saw them first
	stalls    map[kafka.Partition]int               // how often brokers did not know the topic of a partition
	missing   map[string]time.Time                  // when something was refused because of a topic, last
	omitted   map[string]bool                       // topics that did not exist when reading began
	awaited   map[kafka.Partition]int64             // partitions of which Kafka did not say then where they begin or end
	held      map[kafka.Partition]kafka.TopicID     // noted as assigned to this member; nil after End
	replaced  map[string]bool                       // topics that were deleted and created again
	positions map[kafka.Partition]position
	committed map[kafka.Partition]int64 // the offsets that were noted last
}

// NewMember returns a member that does nothing yet.
func NewMember(cfg Config) *Member {
	m := &Member{
		cfg: cfg, id: uuid.New(), prepared: make(chan struct{}), stalled: make(chan struct{}, 1),
		ids: map[string]kafka.TopicID{}, stalls: map[kafka.Partition]int{}, missing: map[string]time.Time{}, omitted: map[string]bool{},
		awaited: map[kafka.Partition]int64{}, held: map[kafka.Partition]kafka.TopicID{}, replaced: map[string]bool{}, positions: map[kafka.Partition]position{},
		committed: map[kafka.Partition]int64{},
	}
	m.outdated, m.end = context.WithCancel(context.Background())
	return m
}

// Outdated returns a context that ends when a new client is needed, because a topic was recreated: a
// client keeps to the topic id that it saw first.
func (m *Member) Outdated() context.Context { return m.outdated }

// Run stores starts, watches topics and saves positions until ctx is cancelled.
func (m *Member) Run(ctx context.Context, client *kgo.Client) {
	m.client = client
	m.prepare(ctx)
	var loops sync.WaitGroup
	loops.Go(func() { m.keepSaving(ctx, saveInterval) })
	loops.Go(func() { m.keepAsking(ctx) })
	defer loops.Wait()
	m.watch(ctx)
	m.end()
}

// Names of outages in the log.
const (
	outageStarting = "finding where reading begins"
	outageSaving   = "saving positions"
	outageTopic    = "topic " // with its name
)

// prepare stores where the group begins in topics that it has not read before. StartOffsets waits for
// it.
func (m *Member) prepare(ctx context.Context) {
	defer close(m.prepared)
	answered := outage.Announce(m.cfg.Log, "Kafka and PostgreSQL, to find where reading begins", tryTimeout)
	defer answered()
	for m.cfg.Store != nil && ctx.Err() == nil {
		began := time.Now()
		err := m.tryPrepare(ctx)
		answered()
		if m.report(ctx, began, err) == nil {
			return
		}
	}
}

func (m *Member) tryPrepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	found, err := m.describe(ctx, m.cfg.Topics)
	if err != nil {
		return err
	}
	topics, _, err := m.learn(ctx, found)
	if err != nil {
		return err
	}
	silent := silence{}
	for _, t := range topics {
		if len(t.silent) == 0 {
			return nil
		}
		maps.Copy(silent, t.silent)
	}
	return silent.cause()
}

// tryTimeout bounds a try to find where reading begins. A dead connection may give no error, and an
// outage is logged only once a try has failed.
const tryTimeout = 30 * time.Second

// StartOffsets is a function for [kgo.AdjustFetchOffsetsFn], which calls it before
// partitions are read. It does not return until PostgreSQL and Kafka have answered: a
// partition that began elsewhere would skip records. After End it returns no partitions.
func (m *Member) StartOffsets(ctx context.Context, committed map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	select {
	case <-m.prepared:
	case <-ctx.Done():
	}
	for said := false; ctx.Err() == nil; {
		began := time.Now()
		try, cancel := context.WithTimeout(ctx, tryTimeout)
		offsets, err := m.begin(try, committed)
		cancel()
		if errors.Is(err, errEnded) {
			return nil, nil
		}
		if errors.Is(err, errStarting) {
			if !said {
				m.cfg.Log.Info("outbox: the group gets the events of an archive first, reading begins after that")
			}
			said = true
			_ = m.report(ctx, began, nil)
			wait.Sleep(ctx, startingInterval)
			continue
		}
		if m.report(ctx, began, err) == nil {
			return offsets, nil
		}
	}
	return nil, context.Cause(ctx)
}

// startingInterval is how often a member looks whether its group has the events of an archive.
const startingInterval = time.Second

// report reports the result of a try, and waits a little after a failure.
func (m *Member) report(ctx context.Context, began time.Time, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	m.cfg.Outages.Report(outageStarting, began, err)
	if err != nil {
		wait.Sleep(ctx, m.cfg.Outages.Backoff(outageStarting))
	}
	return err
}

// learn returns the stored rows of topics, and the handlers of the group that this member lacks. It stores topics that
// are not listed yet, and handlers of this member that are not registered yet. A topic stays unlisted while Kafka does
// not say where all its partitions begin.
func (m *Member) learn(ctx context.Context, found map[string]topicInfo) (map[string]topic, []Handler, error) {
	topics, err := m.learnTopics(ctx, maps.Clone(found))
	if err != nil {
		return nil, nil, err
	}
	listed := maps.Clone(found)
	maps.DeleteFunc(listed, func(name string, _ topicInfo) bool { return len(topics[name].silent) > 0 })
	lacking, err := m.registerHandlers(ctx, listed, topics)
	return topics, lacking, err
}

func (m *Member) learnTopics(ctx context.Context, found map[string]topicInfo) (map[string]topic, error) {
	ids := map[string]kafka.TopicID{}
	for name, t := range found {
		ids[name] = t.id
	}
	written, err := m.cfg.Store.topics(ctx, ids)
	if err != nil {
		return nil, err
	}
	maps.DeleteFunc(found, func(name string, _ topicInfo) bool { return written[name].listed })
	if len(found) == 0 {
		return written, nil
	}
	silent, err := m.list(ctx, found, written)
	if err != nil {
		return nil, err
	}
	topics, err := m.cfg.Store.topics(ctx, ids) // another member may have been faster
	for at, cause := range silent {
		if t := topics[at.Topic]; err == nil && !t.listed {
			t.silent = t.silent.with(at, cause)
			topics[at.Topic] = t
		}
	}
	return topics, err
}

// topicInfo is a topic as Kafka describes it. One that does not exist has no partitions.
type topicInfo struct {
	id         kafka.TopicID
	partitions []int32
}

var errCreatedAgain = errors.New("topic was deleted and created again")

// describe asks Kafka about topics. A client cannot read a topic that was created again
// after the client first saw it, so the ids that are seen first count. A topic that Kafka
// does not let us see is not in the result.
func (m *Member) describe(ctx context.Context, names []string) (map[string]topicInfo, error) {
	response, err := kafka.Metadata(ctx, m.client, names...)
	if err != nil {
		return nil, fmt.Errorf("describe topics: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if response.ClusterID != nil {
		m.cluster = *response.ClusterID
	}
	found := map[string]topicInfo{}
	for _, t := range response.Topics {
		err := kerr.ErrorForCode(t.ErrorCode)
		if t.Topic == nil || errors.Is(err, kerr.TopicAuthorizationFailed) {
			continue // fetching reports it
		}
		if err != nil && !kafka.IsTopicOutage(err) {
			return nil, fmt.Errorf("describe topic %s: %w", *t.Topic, err)
		}
		info := topicInfo{id: t.TopicID}
		for _, p := range t.Partitions {
			info.partitions = append(info.partitions, p.Partition)
		}
		before, seen := m.ids[*t.Topic]
		switch {
		case err != nil:
		case !seen:
			m.ids[*t.Topic] = info.id
		case before != info.id:
			m.replaced[*t.Topic] = true
			m.endOutdated("topic was deleted and created again, a new client reads it from its beginning", *t.Topic)
			return nil, fmt.Errorf("topic %s: %w", *t.Topic, errCreatedAgain)
		}
		found[*t.Topic] = info
	}
	return found, nil
}

// TopicID returns the id of the topic that the client reads, zero if it is not known.
func (m *Member) TopicID(topic string) kafka.TopicID {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ids[topic]
}

// endOutdated ends Outdated, so that a new client takes over.
func (m *Member) endOutdated(why, topic string) {
	if m.outdated.Err() == nil {
		m.cfg.Log.Warn("outbox: "+why, "topic", topic)
	}
	m.end()
}

// list stores where the group begins in topics that are not listed. It leaves out the topics of partitions of which
// Kafka does not say it, and returns these partitions.
func (m *Member) list(ctx context.Context, found map[string]topicInfo, written map[string]topic) (silence, error) {
	maybeOld := map[string][]int32{}
	for name, t := range found {
		if !written[name].before && len(t.partitions) > 0 {
			maybeOld[name] = t.partitions
		}
	}
	committed, err := kafka.GroupOffsets(ctx, m.client, m.cfg.Group, maybeOld)
	if err != nil {
		return nil, err
	}
	wanted := map[kafka.Partition]int64{}
	for name, t := range found {
		which := int64(kafka.EndOffset)
		if m.cfg.FromStart || written[name].before || hasOffset(committed, name) {
			which = kafka.FirstOffset
		}
		for _, n := range t.partitions {
			wanted[kafka.Partition{Topic: name, Number: n}] = which
		}
	}
	firsts, begins, silent := m.ask(ctx, wanted)
	for at := range silent {
		delete(found, at.Topic)
	}
	if len(found) == 0 {
		return silent, nil
	}
	m.logSkipped(found, firsts, begins)
	topics, counts := map[string]topic{}, m.counting(committed, found)
	for name, t := range found {
		topics[name] = newTopic(name, t, begins, counts)
		m.logListed(name, len(t.partitions), written[name].before)
	}
	return silent, m.cfg.Store.list(ctx, topics)
}

// logSkipped logs how many records a group skips that is new, or reads a topic for the first time: it begins at the
// end. It is as new if its name was changed by mistake.
func (m *Member) logSkipped(topics map[string]topicInfo, firsts, begins map[kafka.Partition]int64) {
	records := map[string]int64{}
	for at, first := range firsts {
		records[at.Topic] += begins[at] - first
	}
	for topic, n := range records {
		if _, listed := topics[topic]; listed && n > 0 {
			m.cfg.Log.Warn("outbox: the group reads a topic for the first time, what is in it is not handled unless FromStart is set", "topic", topic, "records", n)
		}
	}
}

// hasOffset reports whether the group has a committed offset in a topic. Then it is not
// new, although nothing is written about it, and its other partitions are read from their
// beginning.
func hasOffset(committed map[kafka.Partition]kafka.GroupOffset, topic string) bool {
	for p := range committed {
		if p.Topic == topic {
			return true
		}
	}
	return false
}

func newTopic(name string, info topicInfo, begins, committed map[kafka.Partition]int64) topic {
	t := topic{id: info.id, partitions: map[int32]partition{}}
	for _, n := range info.partitions {
		at := kafka.Partition{Topic: name, Number: n}
		p := partition{start: begins[at], position: None}
		if offset, ok := committed[at]; ok {
			p.position = offset
		}
		t.partitions[n] = p
	}
	return t
}

// logListed logs anything unusual about a topic that the group sees for the first time.
func (m *Member) logListed(name string, partitions int, before bool) {
	if before && partitions > 0 {
		m.cfg.Log.Info("outbox: topic was created after the group began, it is read from its beginning", "topic", name, "partitions", partitions)
	}
}
