package outbox

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

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/kafka"
)

// ReplayConfig tunes [ReplayDeadLetters]. All but Topic may be zero.
type ReplayConfig struct {
	// Topic is the dead-letter topic. Required.
	Topic string

	// From is the offset to begin with, by partition. Partitions that are not in it
	// are read from their first one.
	From map[int32]int64

	// Choose picks what is sent. Nil means all.
	Choose func(DeadLetter) bool

	// DryRun reports what would be sent and sends nothing.
	DryRun bool

	// Progress is told of each dead letter that was chosen, once it was sent or it is
	// known why it was not, and of each record that is no dead letter; see
	// [DeadLetters] for those. It is called from one goroutine. Nil is not called.
	Progress func(d DeadLetter, err error)
}

func (c ReplayConfig) validate() error {
	var errs []error
	if c.Topic == "" {
		errs = append(errs, fmt.Errorf("field Topic %w", ErrEmpty))
	} else if err := check.Topic(c.Topic); err != nil {
		errs = append(errs, fmt.Errorf("field Topic %w", err))
	}
	if err := checkFrom(c.From); err != nil {
		errs = append(errs, fmt.Errorf("field From: %w", err))
	}
	return errors.Join(errs...)
}

// ReplayReport is what [ReplayDeadLetters] did.
type ReplayReport struct {
	// Read is how many records it read, chosen or not.
	Read int
	// Sent is how many Kafka has acknowledged; in a dry run, how many would be sent.
	Sent int
	// Failed are the records that are no dead letters, and the dead letters that were
	// chosen and not sent.
	Failed []ReplayFailure
	// Next is the offset behind the last record that was dealt with, by partition.
	Next map[int32]int64
}

// ReplayFailure says why a record of a dead-letter topic was not sent.
type ReplayFailure struct {
	// Partition is that of the dead-letter topic.
	Partition int32
	// Offset is that of the partition.
	Offset int64
	// Err is a [*FieldError] for what is no dead letter, [ErrOriginalGone], or what
	// Kafka or the client said; a record that got no answer may have arrived.
	Err error
}

// Left reports whether the run failed to send d or did not come to it. After a run
// that ended early, it is the Choose of another one for the rest.
func (r ReplayReport) Left(d DeadLetter) bool {
	next, ok := r.Next[d.Record.Partition]
	return !ok || d.Record.Offset >= next || slices.ContainsFunc(r.Failed, func(f ReplayFailure) bool {
		return f.Partition == d.Record.Partition && f.Offset == d.Record.Offset
	})
}

// replayDelivery is when a record without an answer counts as failed.
const replayDelivery = 30 * time.Second

// ReplayDeadLetters sends the chosen records of a dead-letter topic back to the topics
// they came from, with their keys, values and headers, and with headers by which only
// the group that could not handle them takes them, and only that action ([ReplayGroup],
// [ReplayAction]). They stay in the dead-letter topic, which is read as [DeadLetters]
// reads it, get the timestamp of the replay, and keep their order, but for what was in
// flight together with a record that Kafka refuses.
//
// A run sends each record at most once. What Kafka refuses, what is no dead letter, and
// what has lost its value with the original record ([ErrOriginalGone]) is in the report,
// and the run goes on. Any other failure ends it with an error, once the outcome of
// what is in flight is known; so does the end of ctx. The report is valid beside an
// error too, and [ReplayReport.Left] picks the rest for another run.
//
// It makes two Kafka clients from opts and closes them; options that are not for a
// relay are not for this either.
func ReplayDeadLetters(ctx context.Context, opts []kgo.Opt, cfg ReplayConfig) (ReplayReport, error) {
	r, err := newReplay(opts, cfg)
	if err != nil {
		return ReplayReport{}, fmt.Errorf("outbox: replay config: %w", err)
	}
	defer r.client.Close()
	defer r.single.Close()
	if err := r.run(ctx); err != nil {
		return r.report, fmt.Errorf("outbox: replay of %s: %w", cfg.Topic, err)
	}
	return r.report, nil
}

// replay is a run. It belongs to one goroutine.
type replay struct {
	cfg               ReplayConfig
	client            *kgo.Client
	single            *kgo.Client // takes larger records, which go alone
	reader, originals *offsetReader
	report            ReplayReport
}

func newReplay(opts []kgo.Opt, cfg ReplayConfig) (*replay, error) {
	if err := errors.Join(cfg.validate(), kafka.CheckProducerOpts(opts)); err != nil {
		return nil, err
	}
	maxWrite, err := kafka.LargestWrite(opts)
	if err != nil {
		return nil, err
	}
	opts = kafka.ProducerOpts(opts, replayDelivery)
	client, err := kafka.NewClient(opts)
	if err != nil {
		return nil, err
	}
	single, err := kafka.NewClient(append(opts, kgo.ProducerBatchMaxBytes(maxWrite)))
	if err != nil {
		client.Close()
		return nil, err
	}
	return &replay{
		cfg: cfg, client: client, single: single,
		reader: &offsetReader{client: client}, originals: &offsetReader{client: client},
	}, nil
}

func (r *replay) run(ctx context.Context) error {
	spans, err := r.reader.spans(ctx, r.cfg.Topic, r.cfg.From)
	if err != nil {
		return err
	}
	r.report.Next = map[int32]int64{}
	for _, s := range spans {
		r.report.Next[s.Number] = s.next
	}
	for _, s := range spans {
		for s.next < s.end {
			records, err := r.reader.read(ctx, &s)
			if err != nil {
				return err
			}
			if err := r.replay(ctx, records); err != nil {
				return err
			}
			r.report.Next[s.Number] = s.next
		}
	}
	return nil
}

// returning is a dead letter on its way back.
type returning struct {
	DeadLetter
	back *kgo.Record // nil if it cannot be sent
	err  error
}

// replay deals with records that were read together. Its error ends the run.
func (r *replay) replay(ctx context.Context, records []*kgo.Record) error {
	letters, stop := r.choose(ctx, records)
	if !r.cfg.DryRun {
		r.send(ctx, letters)
	}
	for _, l := range letters {
		if l.err == nil {
			r.report.Sent++
		} else {
			at := l.Record
			r.report.Failed = append(r.report.Failed, ReplayFailure{Partition: at.Partition, Offset: at.Offset, Err: l.err})
			if stop == nil && !isOwnFault(l.err) {
				stop = fmt.Errorf("%v at offset %d: %w", kafka.PartitionOf(at), at.Offset, l.err)
			}
		}
		if r.cfg.Progress != nil {
			r.cfg.Progress(l.DeadLetter, l.err)
		}
	}
	return stop
}

// isOwnFault reports whether a record is to blame and others may be sent.
func isOwnFault(err error) bool {
	return kafka.RejectionClass(err) != "" || errors.Is(err, ErrOriginalGone)
}

// choose returns the chosen ones of records, and those that are no dead letters. Its
// error ends the run before the record that it names.
func (r *replay) choose(ctx context.Context, records []*kgo.Record) (letters []returning, stop error) {
	for _, record := range records {
		var l returning
		l.DeadLetter, l.err = DecodeDeadLetter(record)
		chosen := l.err != nil || r.cfg.Choose == nil || r.cfg.Choose(l.DeadLetter)
		if chosen && l.err == nil {
			l.back, l.err = r.back(ctx, l.DeadLetter)
		}
		if l.err != nil && !isOwnFault(l.err) {
			return letters, fmt.Errorf("original of %v at offset %d: %w", kafka.PartitionOf(record), record.Offset, l.err)
		}
		if chosen {
			letters = append(letters, l)
		}
		r.report.Read++
		r.report.Next[record.Partition] = record.Offset + 1
	}
	return letters, nil
}

// back returns the record to be sent.
func (r *replay) back(ctx context.Context, d DeadLetter) (*kgo.Record, error) {
	back := &kgo.Record{Topic: d.OriginalTopic, Key: d.Record.Key, Value: d.Record.Value, Headers: replayHeaders(d)}
	if d.ValueOmitted > 0 {
		original, err := r.original(ctx, d)
		if err != nil {
			return nil, err
		}
		back.Value = original.Value
	}
	return back, nil
}

// replayHeaders returns those of the original, and for whom it is.
func replayHeaders(d DeadLetter) []kgo.RecordHeader {
	headers := make([]kgo.RecordHeader, 0, len(d.Record.Headers))
	for _, h := range d.Record.Headers {
		if h.Key != ReplayOf && !isReplayHeader(h.Key) && !strings.HasPrefix(h.Key, deadLetterPrefix) {
			headers = append(headers, h)
		}
	}
	first := cmp.Or(d.ReplayOf, placeOf(d.OriginalTopic, d.OriginalPartition, d.OriginalOffset))
	headers = append(headers, header(ReplayOf, first), header(ReplayGroup, d.Group))
	if d.Action != "" {
		headers = append(headers, header(ReplayAction, d.Action))
	}
	return headers
}

// original reads the record that a dead letter without a value was made of. In a topic
// that was deleted and made again, another one may be in its place.
func (r *replay) original(ctx context.Context, d DeadLetter) (*kgo.Record, error) {
	spans, err := r.originals.spans(ctx, d.OriginalTopic, map[int32]int64{d.OriginalPartition: d.OriginalOffset})
	if errors.Is(err, kerr.UnknownTopicOrPartition) {
		return nil, ErrOriginalGone
	}
	if err != nil {
		return nil, err
	}
	at := slices.IndexFunc(spans, func(s span) bool { return s.Number == d.OriginalPartition })
	if spans[at].next >= spans[at].end {
		return nil, ErrOriginalGone
	}
	records, err := r.originals.read(ctx, &spans[at])
	if errors.Is(err, kerr.OffsetOutOfRange) { // deleted a moment ago
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

func isOriginal(r *kgo.Record, d DeadLetter) bool {
	return r.Offset == d.OriginalOffset && len(r.Value) == d.ValueOmitted && bytes.Equal(r.Key, d.Record.Key) &&
		(d.OriginalTimestamp.IsZero() || r.Timestamp.Equal(d.OriginalTimestamp))
}

// send sends letters and waits for every outcome, whatever becomes of the caller's
// context: Kafka may have what it has not acknowledged. A refusal names whatever
// shared a batch, and nothing of it was written: those are sent again, each alone,
// and so is what is larger than the client's batches.
func (r *replay) send(ctx context.Context, letters []returning) {
	ctx = context.WithoutCancel(ctx)
	produce(ctx, r.client, letters)
	for i := range letters {
		if letters[i].back != nil && kafka.RejectionClass(letters[i].err) != "" {
			produce(ctx, r.single, letters[i:i+1])
		}
	}
}

func produce(ctx context.Context, client *kgo.Client, letters []returning) {
	var waiting sync.WaitGroup
	for i := range letters {
		l := &letters[i]
		if l.back == nil {
			continue
		}
		waiting.Add(1)
		client.Produce(ctx, l.back, func(_ *kgo.Record, err error) {
			l.err = err
			waiting.Done()
		})
	}
	waiting.Wait()
}
