package starts

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// start is where reading begins in a partition.
type start struct {
	at    int64 // or kafka.FirstOffset, kafka.EndOffset
	epoch int32 // of the record before at; -1 if it is not known
	known bool  // Kafka and PostgreSQL have it already
	lost  int64 // number of offsets before at that Kafka has removed unread
	first int64 // the first offset that Kafka still has; None if it has not said it
}

func (s start) epochOffset() kgo.EpochOffset { return kgo.EpochOffset{Epoch: s.epoch, Offset: s.at} }

// errStarting means that the group gets the events of an archive first (outboxreplay.StartGroup). It is checked after
// the topics are listed: a start that comes later finds them, and fails.
var errStarting = errors.New("the group gets the events of an archive first")

// begin decides where reading begins in partitions with these committed offsets. A new decision is
// committed to Kafka first and then stored in PostgreSQL, both before the first record is read. If this
// member dies in between, the next one decides the same. Partitions of which Kafka does not say where they begin are
// left out, unless there are no others: a later client reads them.
func (m *Member) begin(ctx context.Context, committed map[string]map[int32]kgo.Offset) (map[string]map[int32]kgo.Offset, error) {
	found, err := m.describe(ctx, slices.Sorted(maps.Keys(committed)))
	if err != nil {
		return nil, err
	}
	committed = m.omitMissing(committed, found)
	topics := map[string]topic{}
	var lacking []Handler
	silent := silence{}
	if m.cfg.Store != nil {
		if topics, lacking, err = m.learn(ctx, found); err != nil {
			return nil, err
		}
		for name := range topics {
			if of := topics[name].silent; len(of) > 0 {
				delete(committed, name)
				maps.Copy(silent, of)
			}
		}
	}
	for name := range topics {
		if topics[name].starting {
			return nil, errStarting
		}
	}
	decided := m.decideAll(committed, found, topics)
	maps.Copy(silent, m.resolve(ctx, decided))
	m.askEpochs(ctx, decided)
	if len(decided) == 0 && len(silent) > 0 {
		return nil, silent.cause()
	}
	if err := m.confirm(ctx, topics, decided); err != nil {
		return nil, err
	}
	var gaps map[kafka.Partition][]Gap
	if m.cfg.Store != nil {
		if gaps, err = m.findGaps(ctx, topics, lacking, decided); err != nil {
			return nil, err
		}
	}
	froms := map[kafka.Partition]int64{}
	for at, s := range decided {
		froms[at] = s.at
		for _, g := range gaps[at] {
			froms[at] = min(froms[at], g.From)
		}
	}
	assignments, err := m.noteAssigned(ctx, topics, froms)
	if err != nil {
		return nil, err
	}
	m.await(silent)
	for at, s := range decided {
		m.begun(at, s.at, topics[at.Topic].partitions[at.Number])
		m.cfg.Begun(at, Beginning{EpochOffset: s.epochOffset(), Gaps: gaps[at], Assignment: assignments[at]})
		m.reportLost(at, s.at-s.lost, s.lost)
	}
	return offsetsFor(committed, decided, froms, silent), nil
}

// offsetsFor returns committed without silent partitions, and with the offsets from which the others are to be read.
// These have the epoch of the committed offset, so that the client finds out whether Kafka has lost records before.
func offsetsFor(
	committed map[string]map[int32]kgo.Offset, decided map[kafka.Partition]start, froms map[kafka.Partition]int64, silent silence,
) map[string]map[int32]kgo.Offset {
	offsets := map[string]map[int32]kgo.Offset{}
	for name, numbers := range committed {
		offsets[name] = maps.Clone(numbers)
	}
	for at := range silent {
		delete(offsets[at.Topic], at.Number)
	}
	for at, s := range decided {
		if from := froms[at]; !s.known || from < s.at {
			offsets[at.Topic][at.Number] = kgo.NewOffset().At(from).WithEpoch(s.epoch)
		}
	}
	return offsets
}

// omitMissing returns committed without topics that do not exist or may not be described, so that the
// other topics do not wait for them. It removes them from found, too. They are read only by a later
// client that finds them.
func (m *Member) omitMissing(committed map[string]map[int32]kgo.Offset, found map[string]topicInfo) map[string]map[int32]kgo.Offset {
	there := maps.Clone(committed)
	for name := range committed {
		t, visible := found[name]
		switch {
		case !visible:
			m.Missing(name, kerr.TopicAuthorizationFailed)
		case len(t.partitions) == 0:
			m.Missing(name, kerr.UnknownTopicOrPartition)
		default:
			continue
		}
		delete(there, name)
		delete(found, name)
		m.mu.Lock()
		m.omitted[name] = true
		m.mu.Unlock()
	}
	return there
}

// decideAll returns where reading begins in partitions with these committed offsets.
func (m *Member) decideAll(committed map[string]map[int32]kgo.Offset, found map[string]topicInfo, topics map[string]topic) map[kafka.Partition]start {
	decided := map[kafka.Partition]start{}
	for name, numbers := range committed {
		for number, offset := range numbers {
			at, fromStart := kafka.Partition{Topic: name, Number: number}, m.cfg.FromStart
			last := offset.EpochOffset()
			from := last.Offset
			if m.fetchedOffset(at).IsOfDeleted(found[name].id, m.clusterID()) {
				m.cfg.Log.Warn("outbox: the committed offset is that of a topic that was deleted and created again, it does not count",
					"partition", at.Name(), "offset", from)
				from, fromStart = None, true // the group is older than the topic
			}
			s := m.decide(at, topics[name], from, fromStart)
			if s.epoch = -1; s.known {
				s.epoch = last.Epoch
			}
			decided[at] = s
		}
	}
	return decided
}

// decide returns where reading begins in a partition. committed is negative if Kafka has no offset.
func (m *Member) decide(at kafka.Partition, t topic, committed int64, fromStart bool) start {
	p, listed := t.partitions[at.Number]
	switch {
	case m.cfg.Store == nil && committed >= 0:
		return start{at: committed, known: true}
	case m.cfg.Store == nil && fromStart:
		return start{at: kafka.FirstOffset}
	case m.cfg.Store == nil:
		return start{at: kafka.EndOffset}
	case !listed:
		m.cfg.Log.Warn("outbox: partition was added, it is read from its beginning", "partition", at.Name())
		return start{at: kafka.FirstOffset}
	case p.position == None:
		return start{at: p.start}
	case committed >= 0:
		return start{at: committed, known: true}
	}
	m.cfg.Log.Warn("outbox: Kafka has no committed offset any more, reading goes on at the position that was saved last",
		"partition", at.Name(), "offset", p.position)
	return start{at: p.position}
}

// resolve asks Kafka where the partitions begin and, if necessary, where they end, and
// finds out which records Kafka has removed before the group read them. It removes the partitions from decided that
// cannot be begun without an answer, and returns them.
func (m *Member) resolve(ctx context.Context, decided map[kafka.Partition]start) (silent silence) {
	wanted := map[kafka.Partition]int64{}
	for at, s := range decided {
		wanted[at] = kafka.FirstOffset
		if s.at == kafka.EndOffset {
			wanted[at] = kafka.EndOffset
		}
	}
	firsts, found, silent := m.ask(ctx, wanted)
	maps.DeleteFunc(silent, func(at kafka.Partition, _ error) bool { return decided[at].at >= 0 }) // known without an answer
	skipped, ends := int64(0), 0
	for at, s := range decided {
		if silent[at] != nil {
			delete(decided, at)
			continue
		}
		first, ok := firsts[at]
		s.first = None
		if ok {
			s.first = first
		}
		switch {
		case s.at == kafka.EndOffset:
			s.at = found[at]
			skipped += s.at - first
			ends++
		case s.at == kafka.FirstOffset:
			s.at = first
		case ok && s.at < first:
			s = start{at: first, epoch: -1, lost: first - s.at, first: first}
		}
		decided[at] = s
	}
	if skipped > 0 {
		m.cfg.Log.Warn("outbox: partitions have no committed offset, reading begins at their ends", "partitions", ends, "records", skipped)
	}
	return silent
}

// askEpochs asks for the epochs of new starts behind the beginnings of their partitions. Without them, the client would
// not find out that Kafka has lost records before such a start, and read all of the partition. The epoch of the leader
// stands for that of the record before the start, which is not newer. Without an answer, a start has no epoch.
func (m *Member) askEpochs(ctx context.Context, decided map[kafka.Partition]start) {
	wanted := map[kafka.Partition]int64{}
	for at, s := range decided {
		if !s.known && s.first != None && s.at > s.first {
			wanted[at] = kafka.EndOffset
		}
	}
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	ends, err := kafka.ListEpochOffsets(ctx, m.client, kafka.Committed, wanted)
	if err != nil {
		m.cfg.Log.Debug("outbox: new offsets have no epoch, so a loss of records before them may not be noticed", "error", err)
	}
	for at, end := range ends {
		s := decided[at]
		s.epoch = end.Epoch
		decided[at] = s
	}
}

// confirm commits new starts to Kafka, and then stores them in PostgreSQL.
func (m *Member) confirm(ctx context.Context, topics map[string]topic, decided map[kafka.Partition]start) error {
	offsets, notes := map[kafka.Partition]kgo.EpochOffset{}, []Offset(nil)
	for at, s := range decided {
		if !s.known {
			offsets[at] = s.epochOffset()
			notes = append(notes, Offset{Partition: at, Topic: topics[at.Topic].id, At: s.at, Lost: s.lost})
		}
	}
	if len(offsets) == 0 {
		return nil
	}
	if err := m.cfg.Commit(ctx, offsets); err != nil {
		return fmt.Errorf("commit first offsets: %w", err)
	}
	if m.cfg.Store == nil {
		return nil
	}
	return m.cfg.Store.Begin(ctx, notes)
}

// reportLost reports records that Kafka has removed before the group read them.
func (m *Member) reportLost(at kafka.Partition, from, records int64) {
	if records > 0 {
		m.cfg.Log.Warn("outbox: Kafka has removed records that this group has not committed", "partition", at.Name(), "from", from, "records", records)
		m.cfg.Lost(at, records)
	}
}
