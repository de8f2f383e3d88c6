package kafka_test

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/kafka"
)

type decompressor func() ([]byte, error)

func (f decompressor) Decompress([]byte, kgo.CompressionCodecType) ([]byte, error) { return f() }

// A decompressor of the host that panics, or ends its goroutine, ends neither the process nor
// the client's fetching.
func TestDecompressorOfHost(t *testing.T) {
	t.Parallel()
	decompress := func(f decompressor) ([]byte, error) {
		bound, err := kafka.NewFetchBound([]kgo.Opt{kgo.WithDecompressor(f)})
		require.NoError(t, err)
		return bound.Decompress([]byte("x"), kgo.CodecZstd)
	}
	_, err := decompress(func() ([]byte, error) { panic("no such codec") })
	require.ErrorContains(t, err, "panic: no such codec")
	_, err = decompress(func() ([]byte, error) { runtime.Goexit(); return nil, nil })
	require.ErrorIs(t, err, contain.ErrGoexit)
	out, err := decompress(func() ([]byte, error) { return []byte{12, 0, 0, 0, 1, 1, 0}, nil })
	require.NoError(t, err)
	require.Equal(t, []byte{12, 0, 0, 0, 1, 1, 0}, out)
}

// A batch of records without anything, or of a record with a million headers, needs many times its size as records. It
// is too large for the client then, although it is not when it is decompressed.
func TestSmallRecordsAreLarge(t *testing.T) {
	t.Parallel()
	headers := append([]byte{0, 0, 0, 1, 1}, binary.AppendVarint(nil, 4<<20)...)
	headers = append(headers, bytes.Repeat([]byte{0, 1}, 4<<20)...)
	for name, tt := range map[string]struct {
		batch []byte
		want  error
	}{
		"records without anything":    {bytes.Repeat([]byte{12, 0, 0, 0, 1, 1, 0}, 1<<20), kafka.ErrNeedsStream},
		"a record with many headers":  {append(binary.AppendVarint(nil, int64(len(headers))), headers...), kafka.ErrNeedsStream},
		"a record with a large value": {append(binary.AppendVarint(nil, 4+4+8<<20+1), append(append([]byte{0, 0, 0, 1}, binary.AppendVarint(nil, 8<<20)...), make([]byte, 8<<20+1)...)...), nil},
		"more than the client takes":  {make([]byte, kafka.MaxDecompressed+1), kafka.ErrNeedsStream},
		"no records":                  {bytes.Repeat([]byte{0xff}, 10<<20), kafka.ErrNeedsStream},
		"few bytes, no records":       {bytes.Repeat([]byte{0xff}, 10), kafka.ErrNeedsStream},
		"a record":                    {[]byte{12, 0, 0, 0, 1, 1, 0}, nil},
		"a record cut off":            {[]byte{12, 0, 0, 0, 1, 1, 0, 12, 0, 0}, kafka.ErrNeedsStream},
		"a record with a wrong key":   {[]byte{12, 0, 0, 0, 100, 1, 0}, kafka.ErrNeedsStream},
		"messages of Kafka 0.10":      {bytes.Repeat((&kmsg.MessageV1{MessageSize: 22, Magic: 1}).AppendTo(nil), 3), nil},
		"a message cut off":           {(&kmsg.MessageV1{MessageSize: 22, Magic: 1}).AppendTo(nil)[:30], kafka.ErrNeedsStream},
	} {
		bound, err := kafka.NewFetchBound(nil)
		require.NoError(t, err)
		compressor, err := kgo.DefaultCompressor(kgo.ZstdCompression())
		require.NoError(t, err)
		packed, codec := compressor.Compress(new(bytes.Buffer), tt.batch)
		out, err := bound.Decompress(packed, codec)
		require.ErrorIs(t, err, tt.want, name)
		if err == nil {
			require.Equal(t, len(tt.batch), len(out), name)
		}
	}
}
