package kafka_test

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

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
	out, err := decompress(func() ([]byte, error) { return []byte("decompressed"), nil })
	require.NoError(t, err)
	require.Equal(t, "decompressed", string(out))
}
