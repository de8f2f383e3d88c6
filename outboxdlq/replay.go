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

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/outboxops"
)

// ReplayConfig tunes [Replay].
type ReplayConfig struct {
	// Topic is the dead-letter topic. Required.
	Topic string

	// To has the topics that dead letters may go back to. It is required if Topic is not named {topic}.dlq. Danger:
	// Replay sends with your rights, and any client that may write to the dead-letter topic can name any original
	// topic. Nil means only {topic} of {topic}.dlq.
	To []string

	// From has the first offset to read, by partition. Other partitions are read from their first offset.
	From map[int32]int64

	// Choose reports whether to send a dead letter. Nil means all.
	Choose func(DeadLetter) bool

	// DryRun reports the records that would be sent, and sends nothing.
	DryRun bool

	// DB has outbox_audit: Replay adds a row for each topic and group. Nil means none.
	DB *pgxpool.Pool
	// Schema holds the tables of outbox. Empty means public.
	Schema string
	// Audit is the operator and the reason. It is required if DB is set and DryRun is not. Zero means none.
	Audit outboxops.AuditInfo

	// Progress is called after each chosen dead letter, with the error if it was not sent, and for each record that is
	// not a dead letter, with the error of [Read]. Nil means none.
	Progress func(d DeadLetter, err error)
}

func (c ReplayConfig) withDefaults() ReplayConfig {
	if topic, ok := strings.CutSuffix(c.Topic, deadletter.TopicSuffix); ok && c.To == nil {
		c.To = []string{topic}
	}
	c.Schema = cmp.Or(c.Schema, pg.DefaultSchema)
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
	errs = append(errs, check.Schema(c.Schema))
	if c.DB != nil && !c.DryRun {
		errs = append(errs, check.Audit("Audit.", c.Audit.Operator, c.Audit.Reason, maxReason))
	}
	return errors.Join(errs...)
}

// ReplayReport is the result of [Replay].
type ReplayReport struct {
	// Read is the number of records that were read, chosen or not.
	Read int
	// Sent is the number of records that Kafka has acknowledged. In a dry run, it is the number of records
	// that would be sent.
	Sent int
	// Failed are the records that are no dead letters, and the chosen dead letters that were not sent.
	Failed []ReplayFailure
	// Absent are groups that records were sent for, but that have no committed offset in the topic, if
	// Kafka answers this. They have never read the topic, do not exist any more, or have another name. A
	// record for such a group is handled only if the group appears.
	Absent []string
	// Next is, by partition, the offset behind the last record that was read. If the record was chosen, it
	// was also sent or reported.
	Next map[int32]int64
}

// ReplayFailure is a record of a dead-letter topic that was not sent.
type ReplayFailure struct {
	// Partition is the partition of the dead-letter topic.
	Partition int32
	// Offset is the offset in that partition.
	Offset int64
	// Err is a [*outbox.FieldError] if the record is no dead letter. Otherwise it is [ErrOtherTopic], [ErrCompacted],
	// [ErrOriginalGone], or the error of Kafka or of the client. A record that Kafka did not acknowledge
	// may have arrived.
	Err error
}

// Left reports whether the run failed to send d or did not reach it. After a run that ended early, use it
// as the Choose of another run, which then sends the rest.
func (r ReplayReport) Left(d DeadLetter) bool {
	next, ok := r.Next[d.Record.Partition]
	return !ok || d.Record.Offset >= next || slices.ContainsFunc(r.Failed, func(f ReplayFailure) bool {
		return f.Partition == d.Record.Partition && f.Offset == d.Record.Offset
	})
}

// deliveryTimeout is the time after which a record without an acknowledgement counts as failed.
const deliveryTimeout = 30 * time.Second

// Replay sends the chosen records of a dead-letter topic back to the topics that they came from, with their
// keys, values and headers. Two extra headers, [outbox.ReplayGroup] and [outbox.ReplayAction], name the
// group and the action that failed: only they handle the record. Consumers look for the dead letter before
// they believe these headers, so they need the right to read the dead-letter topic.
//
// Replay reads the dead-letter topic as [Read] does. The records stay there. Sent records get the current
// timestamp. They keep their order, except for records that were in flight together with a record that
// Kafka rejects.
//
// Replay leaves out the dead letters of a replay for one group, because no handler has failed. A run sends each record
// at most once. Replay reports these records and continues:
//
//   - records that Kafka rejects
//   - records that are no dead letters
//   - dead letters of another topic ([ErrOtherTopic]), or of a compacted one ([ErrCompacted])
//   - dead letters with omitted parts whose original record is gone, or of which nothing was read ([ErrOriginalGone]),
//     or whose original record is in a batch that the client does not decompress
//
// Any other failure, or the end of ctx, ends the run with an error when the outcome of all records in
// flight is known. The report is valid with an error too, and [ReplayReport.Left] chooses the rest for
// another run.
//
// Replay makes two Kafka clients from opts and closes them. It refuses the options that [outbox.NewRelay]
// refuses.
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
	groups            map[addressee]bool // groups to which records were sent, and whether they exist
	audited           map[addressee]bool
	compacted         map[string]bool // topics, as far as Kafka was asked
}

// addressee is a group for which dead letters of a topic are sent back.
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
		groups: map[addressee]bool{}, audited: map[addressee]bool{}, compacted: map[string]bool{},
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

// replay sends back the chosen records of a batch, and reports them. Its error ends the run.
func (r *run) replay(ctx context.Context, records []*kgo.Record) error {
	resends, read, stop := r.choose(ctx, records)
	if !r.cfg.DryRun {
		if err := r.audit(ctx, resends); err != nil {
			return err // the report has none of the batch, because none of it is sent
		}
		r.send(ctx, resends)
	}
	for _, record := range records[:read] {
		r.report.Read++
		r.report.Next[record.Partition] = record.Offset + 1
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

// lookForGroup asks Kafka once whether a group has read a topic. If Kafka does not answer, for example
// because the right to ask is missing, the answer stays unknown.
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

// isRejected reports whether the error concerns only this record, so that other records can be sent.
func isRejected(err error) bool {
	var notDeadLetter *outbox.FieldError
	return kafka.RejectionClass(err) != "" || errors.Is(err, ErrOriginalGone) || errors.Is(err, ErrOtherTopic) || errors.Is(err, ErrCompacted) ||
		errors.Is(err, kafka.ErrBatch) || errors.As(err, &notDeadLetter)
}

// choose returns the chosen records, and the records that are no dead letters, of the first read records. Its error
// ends the run before the record that it names.
func (r *run) choose(ctx context.Context, records []*kgo.Record) (resends []resend, read int, stop error) {
	for _, record := range records {
		var s resend
		s.DeadLetter, s.err = Decode(record)
		chosen := s.err != nil || (r.cfg.Choose == nil || r.cfg.Choose(s.DeadLetter)) && !s.ofReplay()
		if chosen && s.err == nil {
			s.record, s.err = r.recordOf(ctx, s.DeadLetter)
		}
		if s.err != nil && !isRejected(s.err) {
			return resends, read, fmt.Errorf("original of %v at offset %d: %w", kafka.PartitionOf(record), record.Offset, s.err)
		}
		if chosen {
			resends = append(resends, s)
		}
		read++
	}
	return resends, read, nil
}

// recordOf returns the record that is sent back for a dead letter.
func (r *run) recordOf(ctx context.Context, d DeadLetter) (*kgo.Record, error) {
	if d.ofReplay() { // only an edit asks
		return nil, fmt.Errorf("%w: the dead letter names the group of a record that was sent for it alone", ErrOriginalGone)
	}
	if !slices.Contains(r.cfg.To, d.OriginalTopic) {
		return nil, fmt.Errorf("%w: %s", ErrOtherTopic, d.OriginalTopic)
	}
	if r.isCompacted(ctx, d.OriginalTopic) {
		return nil, fmt.Errorf("%w: %s", ErrCompacted, d.OriginalTopic)
	}
	if d.unread != "" {
		return nil, unreadError(d.unread)
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

// isCompacted asks Kafka once whether a topic is compacted. If it does not answer, the topic counts as another one.
func (r *run) isCompacted(ctx context.Context, topic string) bool {
	is, known := r.compacted[topic]
	if !known {
		is = kafka.IsCompacted(ctx, r.client, topic)
		r.compacted[topic] = is
	}
	return is
}

// replayHeaders returns the headers of the original, and the headers that name the group and the action.
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

// original reads the original record of a dead letter with omitted parts. In a topic that was deleted and
// created again, another record may be at its offset.
func (r *run) original(ctx context.Context, d DeadLetter) (*kgo.Record, error) {
	span, err := r.originals.Span(ctx, kafka.Partition{Topic: d.OriginalTopic, Number: d.OriginalPartition}, d.OriginalOffset)
	if errors.Is(err, kerr.UnknownTopicOrPartition) {
		return nil, ErrOriginalGone
	}
	if err != nil {
		return nil, err
	}
	if span.Next >= span.End {
		return nil, ErrOriginalGone
	}
	records, err := r.originals.Read(ctx, &span)
	switch {
	case errors.Is(err, kerr.OffsetOutOfRange): // deleted since Span asked for the offsets
		return nil, ErrOriginalGone
	case errors.Is(err, kafka.ErrBatch):
		return nil, fmt.Errorf("the original record cannot be read: %w", err)
	case err != nil:
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

// send sends records and waits for every outcome. It waits even if ctx ends, because Kafka may have records
// that it has not acknowledged. If Kafka rejects a batch, it writes none of its records, and all of them
// get the error. Then send sends each of them again alone. It also sends a record alone that is larger than
// the client's batches.
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
