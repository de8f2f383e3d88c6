package kafka

import (
	"errors"
	"fmt"
	"sync/atomic"

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
	used atomic.Int64
}

// ErrFetchFull is an error of a partition of a fetch that is left out. It is in the next
// fetch again.
var ErrFetchFull = errors.New("the fetch has enough records of other partitions")

// NewFetchBound returns the decompressor for clients with the host's options.
func NewFetchBound(host []kgo.Opt) (*FetchBound, error) {
	b := &FetchBound{}
	err := CheckOpts(Bounded(host), func(o HostOpts) { b.each = DecompressorOf(o.Client) })
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
	b.used.Add(int64(len(out)))
	return out, err
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
