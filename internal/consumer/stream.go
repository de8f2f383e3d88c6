package consumer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/starts"
	"github.com/outboxgo/outbox/internal/wait"
)

// The client returns [kafka.ErrNeedsStream] for a batch that would need more than kgo.MaxDecompressBatchBytes, and
// fetches the batch again. A stream reads such a batch in its place and decompresses it piece by piece: records that
// are not too long themselves are handled like any other, and one that is too long loses its value and becomes a dead
// letter. A stream goes on as long as such batches follow. Then the client continues behind them.

// streams are the streams of a membership. One decompresses at a time, so that memory is bounded by one.
type streams struct {
	slot    chan struct{}     // holds one while a stream reads
	waiting atomic.Int32      // streams that wait for the slot
	wanted  []kafka.Partition // by the current poll; only the poll loop

	mu    sync.Mutex
	ended []streamEnd        // streams after which the client is to continue
	wake  context.CancelFunc // ends the current poll; nil between polls
}

// streamEnd says where the client continues.
type streamEnd struct {
	worker *partitionWorker
	next   kgo.EpochOffset
}

// polling returns the context of a poll, which end ends.
func (s *streams) polling(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.wake = cancel; len(s.ended) > 0 {
		cancel()
	}
	return ctx, cancel
}

// end notes the end of a stream, and ends the current poll.
func (s *streams) end(w *partitionWorker, next kgo.EpochOffset) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = append(s.ended, streamEnd{w, next})
	if s.wake != nil {
		s.wake()
	}
}

// takeEnded returns the ended streams once.
func (s *streams) takeEnded() []streamEnd {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := s.ended
	s.ended, s.wake = nil, nil
	return ended
}

// take waits for the slot. It returns false if ctx ends.
func (s *streams) take(ctx context.Context, w *partitionWorker) bool {
	s.waiting.Add(1)
	defer s.waiting.Add(-1)
	defer w.streamWait.begin()()
	select {
	case s.slot <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// runStreams starts the streams that a poll wants, and has the client continue behind those that have
// ended. The poll loop calls it while no partition can be revoked.
func (m *membership) runStreams(ctx context.Context, loops *sync.WaitGroup) {
	for _, at := range m.streams.wanted {
		if w := m.workerOf(at); w != nil && w.beginStream() {
			loops.Go(func() { m.stream(ctx, w) })
		}
	}
	m.streams.wanted = nil
	offsets := map[string]map[int32]kgo.EpochOffset{}
	var ended []*partitionWorker
	for _, e := range m.streams.takeEnded() {
		if m.workerOf(e.worker.partition) == e.worker {
			put(offsets, e.worker.partition.Topic, e.worker.partition.Number, e.next)
			ended = append(ended, e.worker)
		}
	}
	if len(ended) > 0 {
		m.client.SetOffsets(offsets)
	}
	for _, w := range ended {
		w.endStream()
	}
}

// stream reads large batches of a partition until the worker is stopped, or none is next.
func (m *membership) stream(ctx context.Context, w *partitionWorker) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(w.stopping, cancel)()
	at := w.partition
	most, _ := m.client.OptValue(kgo.MaxDecompressBatchBytes).(int)
	s := &batchReader{m: m, w: w, most: most, next: w.nextRead()}
	m.log.Info("outbox: a batch is larger than this consumer decompresses at once, and is read as a stream", "partition", at.Name(), "from", s.next.Offset)
	for m.streams.take(ctx, w) {
		began := time.Now()
		if read := w.nextRead(); read.Offset > s.next.Offset {
			s.next = read
		}
		more, err := s.read(ctx)
		<-m.streams.slot
		var unreadable *unreadableError
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, errNoRoom):
			w.awaitRoom(ctx, nil)
		case errors.As(err, &unreadable):
			w.block(unreadable)
			m.log.Error("outbox: a batch of records cannot be read, and its partition waits; set the offset of the group to next_offset to pass over the batch",
				"topic", at.Topic, "partition", at.Number, "offset", unreadable.offset, "next_offset", unreadable.next, "error", unreadable.err)
			return
		case kafka.IsReplaced(err):
			m.starts.Stall(at)
			wait.Sleep(ctx, m.outages.Backoff(outageFetchingTopic+at.Topic))
		case err != nil:
			m.fetchFails(began, at, err)
			wait.Sleep(ctx, m.outages.Backoff(outageFetchingTopic+at.Topic))
		case !more:
			m.fetchWorks(at)
			m.streams.end(w, s.next)
			return
		}
	}
}

var (
	errNothingRead = errors.New("the broker has no whole batch where one was")
	errNoRoom      = errors.New("the queue is full, and other streams wait")
)

// unreadableError is the error of a batch that is no sequence of records, or that is compressed in a way that needs
// too much memory.
type unreadableError struct {
	offset, next int64
	err          error
}

func (e *unreadableError) Error() string { return e.err.Error() }

// batchReader reads batches of a partition as streams.
type batchReader struct {
	m    *membership
	w    *partitionWorker
	most int             // bytes that a record may have, and a batch that is no large one
	next kgo.EpochOffset // where reading continues
}

// read fetches batches, and adds their records to the queue. It reports whether the next batch may be a large one.
func (s *batchReader) read(ctx context.Context) (more bool, err error) {
	client, err := s.m.second.get()
	if err != nil {
		return false, err
	}
	at := s.w.partition
	fetching, cancel := context.WithTimeout(ctx, streamFetchTimeout)
	defer cancel()
	answer, err := kafka.NewReader(client).Raw(fetching, at, s.m.starts.TopicID(at.Topic), s.next)
	switch {
	case errors.Is(err, kerr.OffsetOutOfRange) && answer.LogStartOffset > s.next.Offset: // Kafka has removed the batch
		s.next.Offset = answer.LogStartOffset
		return false, nil
	case s.next.Epoch >= 0 && (errors.Is(err, kerr.OffsetOutOfRange) || err == nil && answer.DivergingEpoch.EndOffset >= 0):
		// Kafka has lost records that were read. The client asks with the epoch where they end, and reports
		// it. If Kafka does not know that either, a stream must not ask again with this epoch.
		s.w.forgetEpoch()
		return false, nil
	case err != nil:
		return false, err
	}
	return s.readAll(ctx, answer)
}

// streamFetchTimeout bounds a fetch, for which a stream keeps the others waiting.
const streamFetchTimeout = 30 * time.Second

// readAll adds the records of the batches of an answer, up to the first batch that is the client's own.
func (s *batchReader) readAll(ctx context.Context, answer *kmsg.FetchResponseTopicPartition) (more bool, err error) {
	const control = 1 << 5
	from := s.next.Offset
	for in := answer.RecordBatches; len(in) > batchMagic; {
		size := batchHead + int(int32(binary.BigEndian.Uint32(in[batchLength:])))
		if size < batchHead || size > len(in) {
			break // a part of a batch
		}
		var batch kmsg.RecordBatch
		if in[batchMagic] != 2 || batch.ReadFrom(in[:size]) != nil {
			first := int64(binary.BigEndian.Uint64(in))
			return false, &unreadableError{first, first + 1, errors.New("the batch has an unknown format")}
		}
		in = in[size:]
		last, large := batch.FirstOffset+int64(batch.LastOffsetDelta), true
		switch {
		case last < s.next.Offset:
			continue
		case batch.Attributes&control != 0:
			endTransaction(answer, &batch)
		case batch.NumRecords == 0 && len(batch.Records) == 0, isAborted(answer, &batch):
		case kgo.CompressionCodecType(batch.Attributes&7) == kgo.CodecNone:
			return false, nil
		default:
			large, err = s.add(ctx, &batch, answer.LogStartOffset)
		}
		if err != nil {
			return false, err
		}
		s.next = kgo.EpochOffset{Epoch: batch.PartitionLeaderEpoch, Offset: last + 1}
		if !large {
			return false, nil
		}
	}
	end := answer.HighWatermark
	if answer.LastStableOffset >= 0 {
		end = answer.LastStableOffset
	}
	if s.next.Offset == from && from < end {
		return false, errNothingRead
	}
	return s.next.Offset > from, nil
}

// Positions in the head of a batch.
const (
	batchLength = 8
	batchHead   = 12 // the length counts from here
	batchMagic  = 16
)

// isAborted reports whether a batch belongs to an aborted transaction.
func isAborted(answer *kmsg.FetchResponseTopicPartition, batch *kmsg.RecordBatch) bool {
	const transactional = 1 << 4
	return batch.Attributes&transactional != 0 && slices.ContainsFunc(answer.AbortedTransactions, func(t kmsg.FetchResponseTopicPartitionAbortedTransaction) bool {
		return t.ProducerID == batch.ProducerID && t.FirstOffset <= batch.FirstOffset
	})
}

// endTransaction removes the transaction that a control batch ends from the aborted ones. A producer has one at a time.
func endTransaction(answer *kmsg.FetchResponseTopicPartition, end *kmsg.RecordBatch) {
	answer.AbortedTransactions = slices.DeleteFunc(answer.AbortedTransactions, func(t kmsg.FetchResponseTopicPartitionAbortedTransaction) bool {
		return t.ProducerID == end.ProducerID && t.FirstOffset <= end.FirstOffset
	})
}

const (
	pieceRecords = 1_000
	pieceBytes   = 1 << 20
)

// add adds the records of a batch to the queue, and waits while the queue is full. It reports whether the batch is too
// large for the client. If decompressing takes too much memory, the records that remain are added without anything.
func (s *batchReader) add(ctx context.Context, batch *kmsg.RecordBatch, logStart int64) (large bool, err error) {
	p := &piece{batchReader: s, logStart: logStart}
	codec := kgo.CompressionCodecType(batch.Attributes & 7)
	err = contain.Do(func() (err error) {
		defer func() {
			if v := recover(); v != nil {
				err = contain.NewPanic(v)
			}
		}()
		in, err := kafka.Inflate(batch.Records, codec)
		if err != nil {
			return err
		}
		defer func() { _ = in.Close() }()
		bytes, err := p.addAll(ctx, newBatchStream(batch, s.w.partition, contextReader{ctx, in}, s.most))
		large = kafka.IsLarge(batch.Records, codec, bytes, int(p.seen), p.headers, s.most)
		return err
	})
	if errors.Is(err, errNoRoom) {
		return false, errNoRoom
	}
	if kafka.IsTooFar(err) {
		large, err = true, p.addUnread(ctx, batch, err)
	}
	if err != nil && ctx.Err() == nil && !errors.Is(err, errNoRoom) {
		err = &unreadableError{batch.FirstOffset, batch.FirstOffset + int64(batch.LastOffsetDelta) + 1, fmt.Errorf("batch at offset %d: %w", batch.FirstOffset, err)}
	}
	return large, err
}

// piece is a part of a batch that is added to the queue at once.
type piece struct {
	*batchReader
	logStart int64 // of the partition
	records  []*kgo.Record
	size     int
	seen     int32 // records of the batch, also those that were read before
	headers  int   // of these records
	last     int64 // the offset of the last one
}

// addAll adds records to the queue. It returns how many bytes they have, decompressed.
func (p *piece) addAll(ctx context.Context, records *batchStream) (bytes int, err error) {
	for {
		r, err := records.next()
		if errors.Is(err, io.EOF) {
			return records.bytes, p.flush(ctx)
		}
		if err != nil {
			return 0, errors.Join(err, p.flush(ctx))
		}
		if err := p.put(ctx, r); err != nil {
			return 0, err
		}
	}
}

// addUnread adds records in place of those that cannot be decompressed. They become dead letters with their places.
func (p *piece) addUnread(ctx context.Context, batch *kmsg.RecordBatch, cause error) error {
	last := batch.FirstOffset + int64(batch.LastOffsetDelta)
	missing := &omission{Cause: fmt.Sprintf("the batch at offset %d takes too much memory to decompress: %v", batch.FirstOffset, cause)}
	if p.seen == 0 {
		p.last = batch.FirstOffset - 1
	}
	for offset := max(p.last, last-int64(batch.NumRecords-p.seen)) + 1; offset <= last; offset++ {
		r := &kgo.Record{Topic: p.w.partition.Topic, Partition: p.w.partition.Number, Offset: offset, LeaderEpoch: batch.PartitionLeaderEpoch, Timestamp: time.UnixMilli(batch.MaxTimestamp)}
		missing.attach(r)
		if err := p.put(ctx, r); err != nil {
			return err
		}
	}
	return p.flush(ctx)
}

// put adds a record, unless it was read before.
func (p *piece) put(ctx context.Context, r *kgo.Record) error {
	p.seen, p.headers, p.last = p.seen+1, p.headers+len(r.Headers), r.Offset
	if r.Offset < p.next.Offset {
		return nil
	}
	p.records = append(p.records, r)
	p.size += sizeOf(p.records[len(p.records)-1:])
	if p.size < pieceBytes && len(p.records) < pieceRecords {
		return nil
	}
	return p.flush(ctx)
}

// flush adds the records of the piece to the queue, once there is room. It returns errNoRoom if another stream is to
// have the slot first. What is not added is read again.
func (p *piece) flush(ctx context.Context) error {
	if len(p.records) == 0 {
		return nil
	}
	if !p.w.awaitRoom(ctx, &p.m.streams) {
		if ctx.Err() == nil {
			return errNoRoom
		}
		return context.Cause(ctx)
	}
	p.m.distribute(kgo.FetchPartition{Partition: p.w.partition.Number, Records: p.records, LogStartOffset: p.logStart}, p.w)
	p.records, p.size = nil, 0
	return nil
}

// contextReader ends a stream when its context ends.
type contextReader struct {
	ctx context.Context
	io.Reader
}

func (r contextReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	return r.Reader.Read(p)
}

// awaitRoom waits while the queue is full. It returns false if ctx ends, or if other streams wait after roomWait. The
// caller decompresses a batch from its start again then, so it waits that long.
func (w *partitionWorker) awaitRoom(ctx context.Context, others *streams) bool {
	for w.isPaused() {
		if !wait.Await(ctx, ctx, w.room, roomWait) && others != nil && others.waiting.Load() > 0 || ctx.Err() != nil {
			return false
		}
	}
	return ctx.Err() == nil
}

const roomWait = time.Second

// beginStream ends the client's fetching until endStream. It returns false if it has ended already, or if it is not
// known yet where reading begins.
func (w *partitionWorker) beginStream() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || w.streamed || w.read == starts.None {
		return false
	}
	w.streamed = true
	w.group.pauseFetching(w.partition)
	return true
}

// endStream resumes the client's fetching, unless the queue is full.
func (w *partitionWorker) endStream() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.streamed = false
	if !w.closed && !w.paused {
		w.group.resumeFetching(w.partition)
	}
}

// nextRead returns the offset after the last record that was read, and the epoch of that record.
func (w *partitionWorker) nextRead() kgo.EpochOffset {
	w.mu.Lock()
	defer w.mu.Unlock()
	return kgo.EpochOffset{Epoch: w.epoch, Offset: w.read}
}

// forgetEpoch forgets the epoch of the last record that was read.
func (w *partitionWorker) forgetEpoch() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.epoch = -1
}
