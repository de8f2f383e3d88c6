package kafka_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/kafka"
)

// The client gets a compressed batch only if it is a sequence of records, all of which the client reads, within the
// bound of memory. A stream of it has the same bytes. Both hold for bytes that no producer has compressed, too.
func FuzzBatch(f *testing.F) {
	const most = 1 << 20
	for codec := range uint8(5) {
		f.Add([]byte{12, 0, 0, 0, 1, 1, 0, 20, 0, 0, 2, 2, 'k', 2, 'v', 2, 2, 'h', 0}, codec, false)
		f.Add(bytes.Repeat([]byte{12, 0, 0, 0, 1, 1, 0}, 9_000), codec, false)
		f.Add((&kmsg.MessageV1{MessageSize: 22, Magic: 1}).AppendTo(nil), codec, false)
		f.Add([]byte{14, 0, 0, 0, 1, 1, 0xfe, 0xff, 0xff, 0xff, 0x0f}, codec, false)
		f.Add([]byte("\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x05\x04\x0cabcd"), codec, true)
	}
	f.Add([]byte{0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x00, 0x00, 0x00}, uint8(kgo.CodecZstd), true) // a large window
	bound, err := kafka.NewFetchBound([]kgo.Opt{kgo.MaxDecompressBatchBytes(most)})
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, data []byte, codecNumber uint8, isPacked bool) {
		codec, packed := kgo.CompressionCodecType(codecNumber%5), data
		if !isPacked && codec != kgo.CodecNone {
			codecs := map[kgo.CompressionCodecType]kgo.CompressionCodec{kgo.CodecGzip: kgo.GzipCompression(), kgo.CodecSnappy: kgo.SnappyCompression(),
				kgo.CodecLz4: kgo.Lz4Compression(), kgo.CodecZstd: kgo.ZstdCompression()}
			compressor, err := kgo.DefaultCompressor(codecs[codec])
			require.NoError(t, err)
			packed, _ = compressor.Compress(new(bytes.Buffer), data)
			packed = bytes.Clone(packed)
		}
		bound.Reset()
		out, err := bound.Decompress(packed, codec)
		if err == nil && codec != kgo.CodecNone {
			require.LessOrEqual(t, len(out), most)
			requireRecords(t, out)
		}
		if !isPacked {
			require.True(t, err == nil || errors.Is(err, kafka.ErrNeedsStream), "%v", err)
		}
		stream, serr := kafka.Inflate(packed, codec)
		if serr == nil {
			var read []byte
			read, serr = io.ReadAll(io.LimitReader(stream, 2*most))
			require.NoError(t, stream.Close())
			if err == nil && serr == nil {
				require.True(t, bytes.Equal(out, read))
			}
			if !isPacked && len(data) < most {
				require.True(t, bytes.Equal(data, read))
			}
		}
		require.False(t, !isPacked && serr != nil, "%v", serr)
	})
}

// requireRecords requires that the client reads each record of a batch, and needs no more memory for them than is
// counted. Messages of Kafka 0.10 are no such records.
func requireRecords(t *testing.T, batch []byte) {
	t.Helper()
	counted, records, headers := len(batch), 0, 0
	for in := batch; len(in) > 0; {
		length, n := binary.Varint(in)
		end := int64(n) + length
		var r kmsg.Record
		if n <= 0 || length < 0 || end > int64(len(in)) || r.ReadFrom(in[:end]) != nil {
			require.Contains(t, []byte{0, 1}, batch[16], "a message has its format there")
			return
		}
		in, records, headers = in[end:], records+1, headers+len(r.Headers)
	}
	require.False(t, kafka.IsLarge(nil, kgo.CodecGzip, counted, records, headers, 1<<20))
}
