package outboxreplay

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// sender sends records and keeps the order of each key, even if Kafka rejects records. It belongs to one
// goroutine.
type sender struct {
	client *kgo.Client // sends only when it is flushed
	single *kgo.Client // for records that are sent alone, up to the largest request
	limits kafka.Limits
	buffer kafka.Buffer
	loaded kafka.Loaded // by client
}

func newSender(opts []kgo.Opt) (*sender, error) {
	largest, err := kafka.LargestWrite(opts)
	if err != nil {
		return nil, err
	}
	all := kafka.ProducerOpts(kafka.Bounded(opts), deliveryTimeout)
	client, err := kafka.NewClient(slices.Concat(all, kafka.FlushOpts(opts)))
	if err != nil {
		return nil, err
	}
	single, err := kafka.NewClient(append(all, kgo.ProducerBatchMaxBytes(largest)))
	if err != nil {
		client.Close()
		return nil, err
	}
	s := &sender{client: client, single: single, buffer: kafka.BufferOf(client), loaded: kafka.Loaded{}}
	s.limits.ReadClient(client)
	return s, nil
}

func (s *sender) close() {
	s.client.Close()
	s.single.Close()
}

// errBehind is the error of a record that was not sent because an earlier record failed.
var errBehind = errors.New("an event before it was not sent")

// send sends records and returns an error for each. Nil means that all replicas have the record.
func (s *sender) send(ctx context.Context, records []kgo.Record) (errs []error) {
	s.limits.Learn(ctx, s.client, records)
	errs = make([]error, len(records))
	for from := 0; from < len(records); {
		rest := records[from:]
		n := slices.IndexFunc(rest, func(r kgo.Record) bool { return s.limits.Exceeds(&r) })
		if n < 0 {
			n = len(rest)
		}
		n = min(n, s.limits.Fitting(rest[:n], errs[from:]), s.buffer.Fitting(rest[:n], errs[from:]))
		if n == 0 { // the first record is too large for a batch
			n = 1
			errs[from] = produceOne(ctx, s.single, &rest[0])
		} else {
			s.produce(ctx, rest[:n], errs[from:from+n])
		}
		if slices.ContainsFunc(errs[from:from+n], func(err error) bool { return err != nil }) {
			for i := from + n; i < len(errs); i++ {
				errs[i] = errBehind
			}
			return errs
		}
		from += n
	}
	return errs
}

// produce sends records together. If Kafka rejects a batch, it writes none of its records. The client gives the error
// to all records of the partition that are in batches, also in later ones. Then produce sends them again one by one,
// up to the first that fails again.
func (s *sender) produce(ctx context.Context, records []kgo.Record, errs []error) {
	fresh := s.loaded.Missing(records, errs)
	var waiting sync.WaitGroup
	waiting.Add(len(records))
	for i := range records {
		s.client.Produce(ctx, &records[i], func(_ *kgo.Record, err error) {
			errs[i] = err
			waiting.Done()
		})
	}
	kafka.AwaitLoaded(ctx.Done(), s.client, fresh)
	s.loaded.Note(s.client, fresh)
	_ = s.client.Flush(ctx) // its only error is the end of the context, which does not end
	waiting.Wait()
	for i := range records {
		if kafka.RejectionClass(errs[i]) != "" {
			errs[i] = produceOne(ctx, s.single, &records[i])
		}
		if errs[i] != nil {
			for k := i + 1; k < len(errs); k++ {
				if errs[k] != nil {
					errs[k] = errBehind
				}
			}
			return
		}
	}
}

func produceOne(ctx context.Context, client *kgo.Client, r *kgo.Record) error {
	return client.ProduceSync(ctx, r).FirstErr()
}
