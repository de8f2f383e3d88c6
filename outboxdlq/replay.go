package outboxdlq

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/kafka"
)

// ReplayConfig tunes [Replay]. All fields but Topic may be zero.
type ReplayConfig struct {
	// Topic is the dead-letter topic. Required.
	Topic string

	// To has the topics that dead letters may go back to. The original topic in a dead letter is
	// input of the clients that may write to the dead-letter topic, and dead letters are sent with
	// your rights. Nil means the one topic whose dead-letter topic Topic is by its name,
	// {topic}.dlq.
	To []string

	// From has the offset to begin with, by partition. The other partitions are read
	// from their first offset.
	From map[int32]int64

	// Choose reports whether a dead letter is to be sent. Nil means all.
	Choose func(DeadLetter) bool

	// DryRun reports what would be sent and sends nothing.
	DryRun bool

	// Progress is called for each chosen dead letter when it was sent, or with the
	// reason why not, and for each record that is no dead letter, as [Read] returns
	// those. It is called from one goroutine. Nil is not called.
	Progress func(d DeadLetter, err error)
}

func (c ReplayConfig) withDefaults() ReplayConfig {
	if topic, ok := strings.CutSuffix(c.Topic, deadletter.TopicSuffix); ok && c.To == nil {
		c.To = []string{topic}
	}
	return c
}

func (c ReplayConfig) validate() error {
	var errs []error
	if c.Topic == "" {
		errs = append(errs, fmt.Errorf("field Topic %w", outbox.ErrEmpty))
	} else if err := check.Topic(c.Topic); err != nil {
		errs = append(errs, fmt.Errorf("field Topic %w", err))
	} else if c.To == nil {
		errs = append(errs, fmt.Errorf("field To %w: %s is not named {topic}%s, so name the topics that its dead letters may go back to", outbox.ErrEmpty, c.Topic, deadletter.TopicSuffix))
	}
	for _, topic := range c.To {
		if err := check.Topic(topic); err != nil {
			errs = append(errs, fmt.Errorf("field To %w", err))
		}
	}
	if err := kafka.CheckOffsets(c.From); err != nil {
		errs = append(errs, fmt.Errorf("field From: %w", err))
	}
	return errors.Join(errs...)
}

// ReplayReport is what [Replay] did.
type ReplayReport struct {
	// Read is how many records it read, chosen or not.
	Read int
	// Sent is how many Kafka has acknowledged. In a dry run, it is how many would be
	// sent.
	Sent int
	// Failed are the records that are no dead letters, and the dead letters that were
	// chosen and not sent.
	Failed []ReplayFailure
	// Absent are the groups that records were sent for and that have no committed offset in the
	// topic, as far as Kafka says it: they never read it, are gone or have another name. The
	// records for such a group are handled only if the group appears.
	Absent []string
	// Next is the offset behind the last record that was read and, if chosen, sent or
	// reported, by partition.
	Next map[int32]int64
}

// ReplayFailure says why a record of a dead-letter topic was not sent.
type ReplayFailure struct {
	// Partition is the partition of the dead-letter topic.
	Partition int32
	// Offset is the offset in that partition.
	Offset int64
	// Err is a [*outbox.FieldError] if the record is no dead letter, [ErrOtherTopic],
	// [ErrOriginalGone], or the error of Kafka or of the client. A record that Kafka did not acknowledge
	// may have arrived.
	Err error
}

// Left reports whether the run failed to send d or did not reach it. After a run that
// ended early, use it as the Choose of another run, for the rest.
func (r ReplayReport) Left(d DeadLetter) bool {
	next, ok := r.Next[d.Record.Partition]
	return !ok || d.Record.Offset >= next || slices.ContainsFunc(r.Failed, func(f ReplayFailure) bool {
		return f.Partition == d.Record.Partition && f.Offset == d.Record.Offset
	})
}

// deliveryTimeout is when a record that Kafka did not acknowledge counts as failed.
const deliveryTimeout = 30 * time.Second

// Replay sends the chosen records of a dead-letter topic back to the topics that they came from,
// with their keys, values and headers. Two extra headers, [outbox.ReplayGroup] and
// [outbox.ReplayAction], say that only the group and the action that failed handle them. Consumers
// look for the dead letter before they believe that, so they need the right to read the dead-letter
// topic. The records stay in the dead-letter topic, which is read as [Read] reads it. The records
// that are sent get the current timestamp. They keep their order, except for those that were in
// flight together with a record that Kafka rejects.
//
// A run sends each record at most once. These kinds of records are reported, and the run goes on:
// those that Kafka rejects, those that are no dead letters or those of another topic
// ([ErrOtherTopic]), and those of which something was omitted and whose original record is gone
// ([ErrOriginalGone]). Any other failure ends the run with an error when the outcome of all records
// in flight is known, and so does the end of ctx. The report is valid with an error too, and
// [ReplayReport.Left] chooses the rest for another run.
//
// It makes two Kafka clients from opts and closes them. It refuses the options that
// [outbox.NewRelay] refuses.
func Replay(ctx context.Context, opts []kgo.Opt, cfg ReplayConfig) (ReplayReport, error) {
	r, err := newRun(opts, cfg)
	if err != nil {
		return ReplayReport{}, fmt.Errorf("outbox: replay config: %w", err)
	}
	defer r.client.Close()
	defer r.single.Close()
	if err := r.all(ctx); err != nil {
		return r.report, fmt.Errorf("outbox: replay of %s: %w", cfg.Topic, err)
	}
	return r.report, nil
}

// run is one call of [Replay]. It belongs to one goroutine.
type run struct {
	cfg               ReplayConfig
	client            *kgo.Client
	single            *kgo.Client // for records that are sent alone, up to the largest request
	reader, originals *kafka.Reader
	report            ReplayReport
	groups            map[addressee]bool // to which something was sent, and whether they are there
}

// addressee is a group that dead letters of a topic are sent back for.
type addressee struct{ group, topic string }

func newRun(opts []kgo.Opt, cfg ReplayConfig) (*run, error) {
	cfg = cfg.withDefaults()
	if err := errors.Join(cfg.validate(), kafka.CheckProducerOpts(opts)); err != nil {
		return nil, err
	}
	maxWrite, err := kafka.LargestWrite(opts)
	if err != nil {
		return nil, err
	}
	opts = kafka.ProducerOpts(kafka.Bounded(opts), deliveryTimeout)
	client, err := kafka.NewClient(opts)
	if err != nil {
		return nil, err
	}
	single, err := kafka.NewClient(append(opts, kgo.ProducerBatchMaxBytes(maxWrite)))
	if err != nil {
		client.Close()
		return nil, err
	}
	return &run{
		cfg: cfg, client: client, single: single,
		reader: kafka.NewReader(client), originals: kafka.NewReader(client),
		groups: map[addressee]bool{},
	}, nil
}

// all replays partition by partition.
func (r *run) all(ctx context.Context) error {
	spans, err := r.reader.Spans(ctx, r.cfg.Topic, r.cfg.From)
	if err != nil {
		return err
	}
	r.report.Next = map[int32]int64{}
	for _, s := range spans {
		r.report.Next[s.Number] = s.Next
	}
	for _, s := range spans {
		for s.Next < s.End {
			records, err := r.reader.Read(ctx, &s)
			if err != nil {
				return err
			}
			if err := r.replay(ctx, records); err != nil {
				return err
			}
			r.report.Next[s.Number] = s.Next
		}
	}
	return nil
}

// resend is a dead letter and the record that is sent back for it.
type resend struct {
	DeadLetter
	record *kgo.Record // nil if nothing can be sent
	err    error
}

// replay sends back the chosen ones of records that were read together, and reports
// them. Its error ends the run.
func (r *run) replay(ctx context.Context, records []*kgo.Record) error {
	resends, stop := r.choose(ctx, records)
	if !r.cfg.DryRun {
		r.send(ctx, resends)
	}
	for _, s := range resends {
		if s.err == nil {
			r.report.Sent++
			r.lookForGroup(ctx, addressee{s.Group, s.OriginalTopic})
		} else {
			at := s.Record
			r.report.Failed = append(r.report.Failed, ReplayFailure{Partition: at.Partition, Offset: at.Offset, Err: s.err})
			if stop == nil && !isRejected(s.err) {
				stop = fmt.Errorf("%v at offset %d: %w", kafka.PartitionOf(at), at.Offset, s.err)
			}
		}
		if r.cfg.Progress != nil {
			r.cfg.Progress(s.DeadLetter, s.err)
		}
	}
	return stop
}

// lookForGroup asks Kafka once whether a group has read a topic. If Kafka does not answer that, for
// example because the right to ask is missing, it stays unknown.
func (r *run) lookForGroup(ctx context.Context, to addressee) {
	if _, known := r.groups[to]; known {
		return
	}
	offsets, err := kafka.AllGroupOffsets(ctx, r.client, to.group)
	r.groups[to] = err != nil
	for at := range offsets {
		r.groups[to] = r.groups[to] || at.Topic == to.topic
	}
	if !r.groups[to] && !slices.Contains(r.report.Absent, to.group) {
		r.report.Absent = append(r.report.Absent, to.group)
	}
}

// isRejected reports whether the error is about this record alone, so that others can
// be sent.
func isRejected(err error) bool {
	var notDeadLetter *outbox.FieldError
	return kafka.RejectionClass(err) != "" || errors.Is(err, ErrOriginalGone) || errors.Is(err, ErrOtherTopic) || errors.As(err, &notDeadLetter)
}

// choose returns the chosen ones of records, and those that are no dead letters. Its
// error ends the run before the record that it names.
func (r *run) choose(ctx context.Context, records []*kgo.Record) (resends []resend, stop error) {
	for _, record := range records {
		var s resend
		s.DeadLetter, s.err = Decode(record)
		chosen := s.err != nil || r.cfg.Choose == nil || r.cfg.Choose(s.DeadLetter)
		if chosen && s.err == nil {
			s.record, s.err = r.recordOf(ctx, s.DeadLetter)
		}
		if s.err != nil && !isRejected(s.err) {
			return resends, fmt.Errorf("original of %v at offset %d: %w", kafka.PartitionOf(record), record.Offset, s.err)
		}
		if chosen {
			resends = append(resends, s)
		}
		r.report.Read++
		r.report.Next[record.Partition] = record.Offset + 1
	}
	return resends, nil
}

// recordOf returns the record that is sent back for a dead letter.
func (r *run) recordOf(ctx context.Context, d DeadLetter) (*kgo.Record, error) {
	if !slices.Contains(r.cfg.To, d.OriginalTopic) {
		return nil, fmt.Errorf("%w: %s", ErrOtherTopic, d.OriginalTopic)
	}
	record := &kgo.Record{Topic: d.OriginalTopic, Key: d.Record.Key, Value: d.Record.Value}
	headers := d.Record.Headers
	if d.ValueOmitted > 0 || d.KeyOmitted > 0 || d.HeadersOmitted > 0 {
		original, err := r.original(ctx, d)
		if err != nil {
			return nil, err
		}
		if d.ValueOmitted > 0 {
			record.Value = original.Value
		}
		if d.KeyOmitted > 0 {
			record.Key = original.Key
		}
		if d.HeadersOmitted > 0 {
			headers = original.Headers
		}
	}
	record.Headers = replayHeaders(d, headers)
	return record, nil
}

// replayHeaders returns the headers of the original, and those that say who handles the
// record.
func replayHeaders(d DeadLetter, original []kgo.RecordHeader) []kgo.RecordHeader {
	headers := make([]kgo.RecordHeader, 0, len(original)+4)
	for _, h := range original {
		if !deadletter.IsOwn(h.Key) {
			headers = append(headers, h)
		}
	}
	first := cmp.Or(d.ReplayOf, deadletter.Origin(d.OriginalTopic, d.OriginalPartition, d.OriginalOffset))
	from := deadletter.Origin(d.Record.Topic, d.Record.Partition, d.Record.Offset)
	headers = append(headers, header(outbox.ReplayOf, first), header(outbox.ReplayFrom, from), header(outbox.ReplayGroup, d.Group))
	if d.Action != "" {
		headers = append(headers, header(outbox.ReplayAction, d.Action))
	}
	return headers
}

func header(name, value string) kgo.RecordHeader {
	return kgo.RecordHeader{Key: name, Value: []byte(value)}
}

// original reads the original record of a dead letter that lacks something of it. In a topic that
// was deleted and created again, another record may be at its offset.
func (r *run) original(ctx context.Context, d DeadLetter) (*kgo.Record, error) {
	spans, err := r.originals.Spans(ctx, d.OriginalTopic, map[int32]int64{d.OriginalPartition: d.OriginalOffset})
	if errors.Is(err, kerr.UnknownTopicOrPartition) {
		return nil, ErrOriginalGone
	}
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(spans, func(s kafka.Span) bool { return s.Number == d.OriginalPartition })
	if spans[at].Next >= spans[at].End {
		return nil, ErrOriginalGone
	}
	records, err := r.originals.Read(ctx, &spans[at])
	if errors.Is(err, kerr.OffsetOutOfRange) { // deleted since spans asked
		return nil, ErrOriginalGone
	}
	if err != nil {
		return nil, err
	}
	if len(records) == 0 || !isOriginal(records[0], d) {
		return nil, ErrOriginalGone
	}
	return records[0], nil
}

// isOriginal compares a record with the description of the original in a dead letter. Dead letters
// of earlier releases have no digest.
func isOriginal(r *kgo.Record, d DeadLetter) bool {
	if r.Offset != d.OriginalOffset || !d.OriginalTimestamp.IsZero() && !r.Timestamp.Equal(d.OriginalTimestamp) {
		return false
	}
	if d.digest != "" {
		return deadletter.Digest(r) == d.digest
	}
	return len(r.Value) == d.ValueOmitted && bytes.Equal(r.Key, d.Record.Key)
}

// send sends records and waits for every outcome, even if ctx ends meanwhile: Kafka may
// have records that it has not acknowledged. If Kafka rejects a batch, it writes none
// of its records, and all of them get the error. So each of them is sent again alone,
// and so is a record that is larger than the client's batches.
func (r *run) send(ctx context.Context, resends []resend) {
	ctx = context.WithoutCancel(ctx)
	produce(ctx, r.client, resends)
	for i := range resends {
		if resends[i].record != nil && kafka.RejectionClass(resends[i].err) != "" {
			produce(ctx, r.single, resends[i:i+1])
		}
	}
}

// produce sends records and sets their errors.
func produce(ctx context.Context, client *kgo.Client, resends []resend) {
	var waiting sync.WaitGroup
	for i := range resends {
		s := &resends[i]
		if s.record == nil {
			continue
		}
		waiting.Add(1)
		client.Produce(ctx, s.record, func(_ *kgo.Record, err error) {
			s.err = err
			waiting.Done()
		})
	}
	waiting.Wait()
}
