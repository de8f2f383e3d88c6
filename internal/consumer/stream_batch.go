package consumer

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/short"
)

// omission says what of a record was too long to be read. It is in the record's Context, and in event_delivery.record.
type omission struct {
	Value   int    `json:"value"` // bytes
	Key     int    `json:"key"`   // bytes
	Headers int    `json:"headers"`
	Digest  string `json:"digest,omitempty"` // of the whole record
	Cause   string `json:"cause,omitempty"`  // why nothing could be read; "" if the record is too long
}

type omissionKey struct{}

// omissionOf returns what is missing of a record, or nil.
func omissionOf(r *kgo.Record) *omission {
	if r.Context == nil {
		return nil
	}
	o, _ := r.Context.Value(omissionKey{}).(*omission)
	return o
}

// json returns the form of Missing in [delivery.Record].
func (o *omission) json() []byte {
	text, err := json.Marshal(o)
	if err != nil {
		panic(err) // numbers and text always marshal
	}
	return text
}

// attach notes in a record what is missing of it.
func (o *omission) attach(r *kgo.Record) {
	r.Context = context.WithValue(context.Background(), omissionKey{}, o)
}

// Error implements error: a record of which something is missing cannot be decoded.
func (o *omission) Error() string {
	if o.Cause != "" {
		return o.Cause
	}
	return fmt.Sprintf("the record is longer than this consumer decompresses (kgo.MaxDecompressBatchBytes): omitted are a value of %d bytes, a key of %d and %d headers", o.Value, o.Key, o.Headers)
}

// headers returns the headers of a dead letter about what is missing.
func (o *omission) headers() (headers []kgo.RecordHeader) {
	for _, part := range []struct {
		name    string
		omitted int
	}{{deadletter.ValueOmitted, o.Value}, {deadletter.KeyOmitted, o.Key}, {deadletter.HeadersOmitted, o.Headers}} {
		if part.omitted > 0 {
			headers = append(headers, header(part.name, strconv.Itoa(part.omitted)))
		}
	}
	if o.Digest != "" {
		headers = append(headers, header(deadletter.OriginalDigest, o.Digest))
	}
	if o.Cause != "" {
		headers = append(headers, header(deadletter.Unread, short.Text(o.Cause, maxErrorText)))
	}
	return headers
}

// keptOfLong is how many bytes are kept of the key of a record that is too long, and how many of its headers. The
// value is omitted.
const keptOfLong = 1 << 20

// headerSize is what a header needs in memory, without its name and value.
const headerSize = 64

var errCorrupt = errors.New("the records of the batch are corrupt")

// batchStream reads the records of a batch from a stream, one by one. A record needs at most most bytes: what is
// longer is passed over by its length.
type batchStream struct {
	batch *kmsg.RecordBatch
	at    kafka.Partition
	most  int
	in    *bufio.Reader
	bytes int   // that were read
	end   int   // where the current record ends, in these bytes
	err   error // the first error of a read
	left  int32 // records
	long  *omission
	sum   deadletter.Digester // of long
}

func newBatchStream(batch *kmsg.RecordBatch, at kafka.Partition, in io.Reader, most int) *batchStream {
	return &batchStream{batch: batch, at: at, most: most, in: bufio.NewReaderSize(in, 64<<10), left: batch.NumRecords}
}

// next returns the next record, or io.EOF.
func (s *batchStream) next() (*kgo.Record, error) {
	if s.left <= 0 {
		return nil, s.atEnd()
	}
	s.left--
	s.end = s.bytes + binary.MaxVarintLen64
	length := s.varint()
	if length < 0 || s.err != nil {
		return nil, s.failed()
	}
	s.end = s.bytes + length
	s.long = nil
	r := &kgo.Record{
		Topic: s.at.Topic, Partition: s.at.Number, LeaderEpoch: s.batch.PartitionLeaderEpoch, ProducerID: s.batch.ProducerID, ProducerEpoch: s.batch.ProducerEpoch,
	}
	s.pass(1, false) // attributes, which no record has
	r.Timestamp = time.UnixMilli(s.batch.FirstTimestamp + int64(s.varint()))
	if s.batch.Attributes&(1<<3) != 0 { // the time at which the broker has appended the batch
		r.Timestamp = time.UnixMilli(s.batch.MaxTimestamp)
	}
	r.Offset = s.batch.FirstOffset + int64(s.varint())
	room, kept := s.most, s.most
	if length > s.most {
		s.long, s.sum = new(omission), deadletter.NewDigester()
		room, kept = keptOfLong, 0
	}
	var omitted int
	if r.Key, omitted = s.part(room); omitted > 0 {
		s.long.Key = omitted
	}
	if r.Value, omitted = s.part(kept); omitted > 0 {
		s.long.Value = omitted
	}
	if s.long == nil {
		room -= len(r.Key) + len(r.Value)
	}
	for n := s.varint(); n > 0 && s.err == nil; n-- {
		room = s.header(r, room)
	}
	if s.err != nil || s.bytes > s.end {
		return nil, s.failed()
	}
	s.pass(s.end-s.bytes, false)
	if s.long != nil && *s.long != (omission{}) {
		s.long.Digest = s.sum.Sum()
		s.long.attach(r)
	}
	if s.err != nil {
		return nil, s.failed()
	}
	return r, nil
}

// atEnd returns io.EOF, or the error of a batch that has more than its records.
func (s *batchStream) atEnd() error {
	switch _, err := s.in.Peek(1); {
	case err == nil, s.left < 0:
		return errCorrupt
	default:
		return err
	}
}

func (s *batchStream) failed() error {
	if s.err == nil || errors.Is(s.err, io.EOF) || errors.Is(s.err, io.ErrUnexpectedEOF) {
		return errCorrupt
	}
	return s.err
}

// varint reads a number.
func (s *batchStream) varint() int {
	var number uint64
	for shift := 0; shift < 64 && s.err == nil; shift += 7 {
		var b byte
		b, s.err = s.in.ReadByte()
		s.bytes++
		number |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return int(number>>1) ^ -int(number&1)
		}
	}
	if s.err == nil {
		s.err = errCorrupt
	}
	return 0
}

// part reads a key or a value. One longer than room is omitted, and its size returned.
func (s *batchStream) part(room int) (part []byte, omitted int) {
	size := s.varint()
	if s.long != nil {
		s.sum.Begin(max(size, -1))
	}
	switch {
	case size < 0:
		return nil, 0
	case size > room && s.long != nil:
		s.pass(size, true)
		return nil, size
	}
	return s.read(size, s.long != nil), 0
}

// header reads a header, which is omitted if there is no room for it. It returns the room behind it.
func (s *batchStream) header(r *kgo.Record, room int) int {
	size := s.varint()
	if size < 0 {
		s.err = errCorrupt
		return room
	}
	var name []byte
	fits := size+headerSize <= room
	if fits {
		name = s.read(size, false)
	} else {
		s.beginLong(r)
		name, _ = s.in.Peek(min(size, headerSize)) // no name that is longer is one of a replay
	}
	own := deadletter.IsOwn(string(name))
	if !fits {
		s.passPart(size, !own)
	} else if s.long != nil && !own {
		s.sum.Add(name)
	}
	value := s.varint()
	if used := size + max(value, 0) + headerSize; fits && used <= room {
		h := kgo.RecordHeader{Key: string(name)}
		if s.long != nil && !own {
			s.sum.Begin(max(value, -1))
		}
		if value >= 0 {
			h.Value = s.read(value, s.long != nil && !own)
		}
		r.Headers = append(r.Headers, h)
		return room - used
	}
	if s.long == nil {
		if s.beginLong(r); !own {
			s.sum.Add(name)
		}
	}
	s.passPart(value, !own)
	s.long.Headers++
	return room
}

// beginLong begins to omit parts of a record that was read without an omission so far.
func (s *batchStream) beginLong(r *kgo.Record) {
	if s.long != nil {
		return
	}
	s.long, s.sum = new(omission), deadletter.NewDigester()
	s.sum.Add(r.Key)
	s.sum.Add(r.Value)
	for _, h := range r.Headers {
		s.sum.AddHeader(h)
	}
}

// passPart passes over a part, which may be added to the digest.
func (s *batchStream) passPart(size int, digest bool) {
	if digest {
		s.sum.Begin(max(size, -1))
	}
	s.pass(max(size, 0), digest)
}

// read reads bytes of the record into memory.
func (s *batchStream) read(size int, digest bool) []byte {
	if s.err != nil {
		return nil
	}
	if size > s.end-s.bytes {
		s.err = errCorrupt
		return nil
	}
	part := make([]byte, size)
	_, s.err = io.ReadFull(s.in, part)
	s.bytes += size
	if digest {
		s.sum.Write(part)
	}
	return part
}

// pass reads bytes of the record without keeping them.
func (s *batchStream) pass(size int, digest bool) {
	if size > s.end-s.bytes && s.err == nil {
		s.err = errCorrupt
	}
	for size > 0 && s.err == nil {
		var piece []byte
		piece, s.err = s.in.Peek(min(size, s.in.Size()))
		if digest {
			s.sum.Write(piece)
		}
		n, _ := s.in.Discard(len(piece))
		size -= n
		s.bytes += n
		if n > 0 && errors.Is(s.err, io.EOF) && size == 0 {
			s.err = nil
		}
	}
}
