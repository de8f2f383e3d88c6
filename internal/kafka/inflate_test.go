package kafka_test

import (
	"bytes"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/kafka"
)

// sample returns data that is partly random and partly repeated, near and far.
func sample(size int) []byte {
	random := rand.New(rand.NewPCG(1, uint64(size)))
	var data []byte
	for len(data) < size {
		if n := len(data); n > 0 && random.IntN(3) > 0 {
			from := random.IntN(n)
			data = append(data, data[from:min(n, from+random.IntN(2_000))]...)
			continue
		}
		for range random.IntN(300) {
			data = append(data, byte(random.Uint32()))
		}
	}
	return data[:size]
}

// The stream has what the batch was made of, for each codec.
func TestInflate(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 1, 59, 60, 61, 70_000, 3 << 20} {
		data := sample(size)
		for name, codec := range map[string]kgo.CompressionCodec{
			"gzip": kgo.GzipCompression(), "snappy, framed": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
		} {
			compressor, err := kgo.DefaultCompressor(codec)
			require.NoError(t, err)
			packed, kind := compressor.Compress(new(bytes.Buffer), data)
			requireInflated(t, name, data, packed, kind)
		}
		requireInflated(t, "none", data, data, kgo.CodecNone)
		requireInflated(t, "snappy, in a block", data, s2.EncodeSnappy(nil, data), kgo.CodecSnappy)
		requireInflated(t, "snappy, in a better block", data, s2.EncodeSnappyBest(nil, data), kgo.CodecSnappy)
	}
	zeros := make([]byte, 100<<20)
	for _, at := range []int{0, 1 << 20, 50<<20 + 7, len(zeros) - 100_000} { // the same text, far apart
		copy(zeros[at:], sample(100_000))
	}
	packed := s2.EncodeSnappy(nil, zeros)
	requireInflated(t, "with references to anything before", zeros, packed, kgo.CodecSnappy)
}

func requireInflated(t *testing.T, name string, want, packed []byte, codec kgo.CompressionCodecType) {
	t.Helper()
	r, err := kafka.Inflate(packed, codec)
	require.NoError(t, err, name)
	got, err := io.ReadAll(r)
	require.NoError(t, err, name)
	require.True(t, bytes.Equal(want, got), name)
	require.NoError(t, r.Close())
}

// A snappy stream that is cut off or changed gives an error, or something else; it neither panics nor needs memory that
// its length claims.
func FuzzSnappy(f *testing.F) {
	for _, size := range []int{0, 10, 5_000} {
		f.Add(s2.EncodeSnappy(nil, sample(size)))
	}
	f.Add([]byte("\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x05\x04\x0cabcd"))
	f.Fuzz(func(t *testing.T, packed []byte) {
		r, err := kafka.Inflate(packed, kgo.CodecSnappy)
		require.NoError(t, err)
		got, err := io.ReadAll(io.LimitReader(r, 1<<20))
		if size, lerr := s2.DecodedLen(packed); lerr != nil || size >= 1<<20 || bytes.HasPrefix(packed, []byte("\x82SNAPPY\x00")) {
			return
		}
		if want, werr := s2.Decode(nil, packed); werr == nil && err == nil {
			require.True(t, bytes.Equal(want, got))
		}
	})
}
