package kafka

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/klauspost/compress/zstd"
	"github.com/twmb/franz-go/pkg/kbin"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/contain"
)

// MaxDecompressed is how many bytes a batch of records may have, unless the host says
// otherwise with [kgo.MaxDecompressBatchBytes], and how many a client decompresses before
// what it has is taken over. The client's own bound is 1 GiB for each batch.
const MaxDecompressed = 64 << 20

// Bounded returns the options of a client that reads: those of the host, and MaxDecompressed
// unless the host says otherwise.
func Bounded(host []kgo.Opt) []kgo.Opt {
	return append([]kgo.Opt{kgo.MaxDecompressBatchBytes(MaxDecompressed)}, host...)
}

// DecompressorOf returns the decompressor of a client, which minds the limits in the
// host's options.
func DecompressorOf(client *kgo.Client) kgo.Decompressor {
	d, _ := client.OptValue(kgo.WithDecompressor).(kgo.Decompressor)
	if bound, ok := d.(*FetchBound); ok {
		return bound.each
	}
	return d
}

// FetchBound is the decompressor of a consumer, with a bound for all the batches of the
// fetches that wait to be polled: compressed well, those of a fetch would be as large as
// they like together.
type FetchBound struct {
	each kgo.Decompressor // with the host's limit for a batch
	most int              // that limit
	used atomic.Int64
}

// ErrFetchFull is an error of a partition of a fetch that is left out. It is in the next
// fetch again.
var ErrFetchFull = errors.New("the fetch has enough records of other partitions")

// ErrNeedsStream is the error of a batch that needs too much memory, or that is no sequence of records. It stands in
// for [kgo.ErrMaxDecompress], at which the client ends fetching for good, also if it discards the error.
var ErrNeedsStream = errors.New("the batch is to be read as a stream")

// NewFetchBound returns the decompressor for clients with the host's options.
func NewFetchBound(host []kgo.Opt) (*FetchBound, error) {
	b := &FetchBound{}
	err := CheckOpts(Bounded(host), func(o HostOpts) {
		b.each = DecompressorOf(o.Client)
		b.most, _ = o.Client.OptValue(kgo.MaxDecompressBatchBytes).(int)
	})
	return b, err
}

// Decompress implements [kgo.Decompressor].
func (b *FetchBound) Decompress(src []byte, codec kgo.CompressionCodecType) ([]byte, error) {
	if codec == kgo.CodecNone {
		return src, nil
	}
	if b.used.Load() > MaxDecompressed {
		return nil, ErrFetchFull
	}
	out, err := b.decompress(src, codec)
	if errors.Is(err, kgo.ErrMaxDecompress) || IsTooFar(err) {
		return nil, ErrNeedsStream
	}
	if err != nil {
		return nil, err
	}
	if bytes, ok := needs(out); !ok || bytes > b.most {
		return nil, ErrNeedsStream
	}
	b.used.Add(int64(len(out)))
	return out, nil
}

const (
	recordMemory = 200 // of a record in memory, without its parts
	headerMemory = 40  // of a header
)

// IsLarge reports whether a client decompresses no batch that has as many bytes, records and headers, or the window of
// src, if it decompresses most bytes.
func IsLarge(src []byte, codec kgo.CompressionCodecType, bytes, records, headers, most int) bool {
	var frame zstd.Header
	if codec == kgo.CodecZstd && frame.Decode(src) == nil && frame.WindowSize > uint64(most) {
		return true
	}
	return bytes+recordMemory*records+headerMemory*headers > most
}

// needs estimates the memory of the records of a batch, which may be many times the batch. It returns false for what is
// no sequence of records: the client would read the records up to there, without an error, and no further.
func needs(records []byte) (bytes int, ok bool) {
	bytes = len(records)
	for in := records; len(in) > 0; {
		length, n := binary.Varint(in)
		if n <= 0 || length < 0 || length > int64(len(in)-n) {
			return bytes, isMessageSet(records)
		}
		headers, ok := headersOf(in[n : n+int(length)])
		if !ok {
			return bytes, isMessageSet(records)
		}
		bytes += recordMemory + headerMemory*headers
		in = in[n+int(length):]
	}
	return bytes, true
}

// headersOf returns the number of headers of a record. It reads the record as the client does.
func headersOf(record []byte) (n int, ok bool) {
	in := kbin.Reader{Src: record}
	in.Int8() // attributes
	in.Varlong()
	in.Varint()
	in.VarintBytes()
	in.VarintBytes()
	n = max(0, int(in.VarintArrayLen()))
	for i := 0; i < n && in.Ok(); i++ {
		in.VarintBytes()
		in.VarintBytes()
	}
	return n, in.Ok()
}

// isMessageSet reports whether a batch has the form that producers of Kafka 0.10 and earlier send.
func isMessageSet(in []byte) bool {
	const lengthAt, head, magicAt = 8, 12, 16
	for len(in) > magicAt {
		length := int64(binary.BigEndian.Uint32(in[lengthAt:])) + head
		if in[magicAt] > 1 || length > int64(len(in)) {
			return false
		}
		in = in[length:]
	}
	return len(in) == 0
}

// decompress calls the decompressor, which may be the host's. The client calls it in a
// goroutine that fetches for all partitions of a broker, so that must neither panic nor end.
func (b *FetchBound) decompress(src []byte, codec kgo.CompressionCodecType) (out []byte, err error) {
	err = contain.Do(func() (err error) {
		defer func() {
			if v := recover(); v != nil {
				err = fmt.Errorf("decompressor: %w", contain.NewPanic(v))
			}
		}()
		out, err = b.each.Decompress(src, codec)
		return err
	})
	return out, err
}

// Reset notes that all is polled.
func (b *FetchBound) Reset() { b.used.Store(0) }
