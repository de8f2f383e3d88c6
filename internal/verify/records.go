package verify

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/kafka"
)

// records reads Kafka.
type records struct {
	*check
	client   *kgo.Client
	ends     map[kafka.Partition]int64
	endsErr  error // of some partitions
	endsAt   time.Time
	sources  *names
	settings map[string]topicSettings
}

// askEnds asks for the ends of all partitions, because the topics of the events are not known yet.
func (r *records) askEnds() error {
	all, err := kafka.Metadata(r.ctx, r.client)
	if err != nil {
		return fmt.Errorf("ask Kafka for its topics: %w", err)
	}
	wanted := map[kafka.Partition]int64{}
	for _, t := range all.Topics {
		if t.Topic == nil || t.IsInternal || t.ErrorCode != 0 {
			continue
		}
		for _, p := range t.Partitions {
			wanted[kafka.Partition{Topic: *t.Topic, Number: p.Partition}] = kafka.EndOffset
		}
	}
	r.ends, r.endsErr = kafka.ListOffsets(r.ctx, r.client, kafka.Committed, wanted)
	r.endsAt = time.Now()
	return context.Cause(r.ctx)
}

// readAll reads the topics of the events from about the time when the first of them was recorded.
func (r *records) readAll(sources *names, since int64) error {
	r.sources = sources
	if r.report.FirstAt.IsZero() {
		return nil
	}
	topics := r.names.texts
	settings, err := askSettings(r.ctx, r.client, topics)
	if err != nil {
		return err
	}
	r.settings = settings
	r.begin("records read", 0)
	start := time.UnixMicro(since).Add(-margin)
	for number, topic := range topics {
		if err := r.readTopic(topic, uint32(number), start); err != nil {
			return fmt.Errorf("read topic %s: %w", topic, err)
		}
	}
	return nil
}

// readTopic reads the partitions of a topic up to the ends of askEnds.
func (r *records) readTopic(topic string, number uint32, start time.Time) error {
	reader := kafka.NewReader(r.client)
	spans, err := reader.Spans(r.ctx, topic, nil)
	if errors.Is(err, kerr.UnknownTopicOrPartition) || errors.Is(err, kerr.InvalidTopicException) {
		r.topics[number] = topicState{missing: true}
		return nil
	}
	if err != nil {
		return err
	}
	wanted := map[kafka.Partition]int64{}
	for _, s := range spans {
		wanted[s.Partition] = start.UnixMilli()
	}
	starts, err := kafka.ListOffsets(r.ctx, r.client, kafka.Committed, wanted)
	if err != nil {
		return err
	}
	state := topicState{keptFrom: r.settings[topic].keptFrom(r.endsAt)}
	for _, s := range spans {
		end, known := r.ends[s.Partition]
		if !known {
			if r.endsErr != nil {
				return r.endsErr
			}
			continue // it was added later
		}
		first := s.Next
		s.End = min(s.End, end)
		if at := starts[s.Partition]; at < 0 {
			s.Next = s.End
		} else {
			s.Next = min(max(s.Next, at), s.End)
		}
		r.step.Total += s.End - s.Next
		kept, err := r.readPartition(reader, s, number)
		if err != nil {
			return err
		}
		switch { // Kafka has removed the records in front of the first one
		case first == 0 || s.Next > first:
		case kept == endless:
			state.keptFrom = max(state.keptFrom, r.settings[topic].emptyFrom(r.endsAt))
		default:
			state.keptFrom = max(state.keptFrom, kept)
		}
	}
	r.topics[number] = state
	return nil
}

// readPartition reads a partition, and returns the time of its first record.
func (r *records) readPartition(reader *kafka.Reader, s kafka.Span, topic uint32) (first int64, err error) {
	first = endless
	for s.Next < s.End {
		before := s.Next
		records, err := reader.Read(r.ctx, &s)
		if err != nil {
			return first, err
		}
		for _, record := range records {
			if first == endless {
				first = record.Timestamp.UnixMicro()
			}
			if err := r.note(record, topic); err != nil {
				return first, err
			}
		}
		if err := r.add(int(s.Next - before)); err != nil {
			return first, err
		}
	}
	return first, nil
}

// note adds a record, if it is one of our sources.
func (r *records) note(record *kgo.Record, topic uint32) error {
	var id, source, at, media []byte
	for i := range record.Headers {
		h := &record.Headers[i]
		switch h.Key {
		case "ce_id":
			id = h.Value
		case "ce_source":
			source = h.Value
		case "ce_time":
			at = h.Value
		case "content-type":
			media = h.Value
		default:
			if deadletter.IsReplay(h.Key) {
				r.report.Replayed++
				return nil
			}
		}
	}
	if id == nil && strings.HasPrefix(string(media), "application/cloudevents") {
		if m, err := envelope.DecodeRecord(record.Value, kafka.Headers(record)); err == nil {
			id, source, at = []byte(m.ID), []byte(m.Source), envelope.AppendTime(nil, m.Time)
		}
	}
	event, err := uuid.ParseBytes(id)
	if err != nil || !r.sources.has(source) {
		r.report.Foreign++
		return nil //nolint:nilerr // a record without the id of an event is not ours
	}
	r.report.Records++
	s := sighting{event: eventID(event), side: sideRecord, topic: topic, partition: record.Partition, position: record.Offset,
		at: min(record.Timestamp.UnixMicro(), timeOf(event, at))}
	it := s.item()
	return r.events.add(&it)
}

// timeOf returns the time in a UUIDv7, which is about that of recording, or else the time that the event names.
func timeOf(id uuid.UUID, named []byte) int64 {
	if id.Version() == 7 {
		return int64(binary.BigEndian.Uint64(id[:8])>>16) * 1000
	}
	at, _ := time.Parse(time.RFC3339Nano, string(named)) // other producers may write what they like
	return microsOf(at, endless)
}

// topicSettings are settings of a topic that let Kafka remove records.
type topicSettings struct {
	compacts       bool
	retains        time.Duration // negative: not known, or for ever
	compactsBehind time.Duration
}

// keptFrom returns since when the record of an event must be there, as far as compaction is concerned.
func (t topicSettings) keptFrom(now time.Time) int64 {
	if !t.compacts {
		return beginning
	}
	return now.Add(-t.compactsBehind).UnixMicro()
}

// emptyFrom returns the same for a partition that is empty, and had records.
func (t topicSettings) emptyFrom(now time.Time) int64 {
	if t.retains <= 0 {
		return now.UnixMicro()
	}
	return now.Add(-t.retains).UnixMicro()
}

// askSettings asks for the settings of topics. Those that Kafka does not tell have the zero value.
func askSettings(ctx context.Context, client *kgo.Client, topics []string) (map[string]topicSettings, error) {
	all := map[string]topicSettings{}
	request := kafka.SettingsRequest(topics, kafka.CleanupPolicy, "retention.ms", "retention.bytes", "min.compaction.lag.ms")
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("ask Kafka for settings of topics: %w", err)
	}
	for _, resource := range response.Resources {
		values := kafka.SettingsOf(resource)
		t := topicSettings{compacts: kafka.Compacts(values),
			compactsBehind: millis(values["min.compaction.lag.ms"])}
		if values["retention.bytes"] == "-1" {
			t.retains = millis(values["retention.ms"])
		}
		all[resource.ResourceName] = t
	}
	return all, nil
}

func millis(text string) time.Duration {
	n, _ := strconv.ParseInt(text, 10, 64) // no number: zero
	return time.Duration(min(n, int64(time.Duration(1<<62)/time.Millisecond))) * time.Millisecond
}
