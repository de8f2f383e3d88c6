package kafka

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/s2"
	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Inflate returns a stream of what a batch decompresses to. It needs memory for the window of the codec, and not for
// the batch. The caller closes it.
func Inflate(src []byte, codec kgo.CompressionCodecType) (io.ReadCloser, error) {
	switch codec {
	case kgo.CodecNone:
		return io.NopCloser(bytes.NewReader(src)), nil
	case kgo.CodecGzip:
		return gzip.NewReader(bytes.NewReader(src))
	case kgo.CodecSnappy:
		return io.NopCloser(newSnappyReader(src)), nil
	case kgo.CodecLz4:
		return io.NopCloser(lz4.NewReader(bytes.NewReader(src))), nil
	case kgo.CodecZstd:
		d, err := zstd.NewReader(bytes.NewReader(src), zstd.WithDecoderLowmem(true), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstdWindow),
			zstd.WithDecoderMaxMemory(maxZstdWindow))
		if err != nil {
			return nil, err
		}
		return d.IOReadCloser(), nil
	}
	return nil, fmt.Errorf("unknown compression codec %d", codec)
}

// maxZstdWindow is the largest window that a broker accepts: zstd's own limit for streams.
const maxZstdWindow = 128 << 20

// IsTooFar reports whether a batch is compressed in a way that takes too much memory to decompress also as a stream.
func IsTooFar(err error) bool {
	return errors.Is(err, errFar) || errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded)
}

var (
	errSnappy = errors.New("snappy: corrupt input")
	errFar    = errors.New("snappy: a copy of data that is too far back")
)

// xerialPrefix begins the snappy framing of the Java client, which has blocks with their lengths behind it.
const (
	xerialPrefix = "\x82SNAPPY\x00"
	xerialHeader = 16
)

const (
	// snappyWindow is how much of the last output is kept as it is. Most encoders refer to the last 64 KiB.
	snappyWindow = 16 * snappyChunk
	// snappyChunk is the size of the chunks of earlier output, which are kept compressed: some encoders refer to
	// anything in their block.
	snappyChunk = 64 << 10
	// snappyEarlier is how much is kept of these chunks.
	snappyEarlier = 64 << 20
)

// snappyReader decompresses snappy blocks as a stream. The decoder of s2 needs room for a whole block.
type snappyReader struct {
	src     []byte // what remains of the input
	framed  bool   // blocks have their lengths in front
	block   []byte // what remains of the current block
	left    uint64 // bytes that the block still decompresses to
	out     []byte // the last output of the block
	read    int    // of out
	literal int    // bytes that remain of the current literal
	copies  int    // bytes that remain of the current copy
	offset  int    // of the copy

	earlier [][]byte // compressed chunks of the output before out; nil for those that are kept no longer
	kept    int      // bytes in earlier
	dropped int      // chunks of earlier
	cached  [16]struct {
		chunk int // and 1
		data  []byte
	}
}

func newSnappyReader(src []byte) *snappyReader {
	if len(src) > xerialHeader && bytes.HasPrefix(src, []byte(xerialPrefix)) {
		return &snappyReader{src: src[xerialHeader:], framed: true}
	}
	return &snappyReader{src: src}
}

func (s *snappyReader) Read(p []byte) (n int, err error) {
	for s.read == len(s.out) {
		if err := s.fill(); err != nil {
			return 0, err
		}
	}
	n = copy(p, s.out[s.read:])
	s.read += n
	return n, nil
}

// fill appends some output, or begins a block.
func (s *snappyReader) fill() error {
	if s.left == 0 {
		if len(s.block) > 0 {
			return errSnappy
		}
		return s.nextBlock()
	}
	s.shift()
	const step = 64 << 10
	for end := len(s.out) + step; len(s.out) < end && s.left > 0; {
		if s.literal == 0 && s.copies == 0 {
			if err := s.nextElement(); err != nil {
				return err
			}
		}
		if n := min(s.literal, step); n > 0 {
			s.out = append(s.out, s.block[:n]...)
			s.block, s.literal, s.left = s.block[n:], s.literal-n, s.left-uint64(n)
			continue
		}
		if s.offset <= len(s.out) {
			s.repeat()
			continue
		}
		from, err := s.back()
		if err != nil {
			return err
		}
		n := min(s.copies, len(from))
		s.out = append(s.out, from[:n]...)
		s.copies, s.left = s.copies-n, s.left-uint64(n)
	}
	return nil
}

// shift compresses output that is not the last.
func (s *snappyReader) shift() {
	if len(s.out) < 2*snappyWindow {
		return
	}
	done := 0
	for ; len(s.out)-done > snappyWindow+snappyChunk; done += snappyChunk {
		chunk := s2.Encode(nil, s.out[done:done+snappyChunk])
		s.earlier = append(s.earlier, bytes.Clone(chunk))
		s.kept += len(chunk)
	}
	for ; s.kept > snappyEarlier; s.dropped++ {
		s.kept -= len(s.earlier[s.dropped])
		s.earlier[s.dropped] = nil
	}
	n := copy(s.out, s.out[done:])
	s.out, s.read = s.out[:n], n
}

// repeat makes a copy of the last output. The copy may overlap with what it makes: then each step copies twice as much.
func (s *snappyReader) repeat() {
	for from := len(s.out) - s.offset; s.copies > 0; {
		n := min(s.copies, len(s.out)-from)
		s.out = append(s.out, s.out[from:from+n]...)
		s.copies, s.left = s.copies-n, s.left-uint64(n)
	}
}

// back returns the earlier output that a copy refers to, from its offset on.
func (s *snappyReader) back() ([]byte, error) {
	at := len(s.earlier)*snappyChunk + len(s.out) - s.offset
	number := at / snappyChunk
	if number < s.dropped {
		return nil, errFar
	}
	cached := &s.cached[number%len(s.cached)]
	if cached.chunk != number+1 {
		data, err := s2.Decode(cached.data[:0], s.earlier[number])
		if err != nil {
			return nil, err
		}
		cached.chunk, cached.data = number+1, data
	}
	return cached.data[at%snappyChunk:], nil
}

// nextBlock begins the next block, or returns io.EOF.
func (s *snappyReader) nextBlock() error {
	if len(s.src) == 0 {
		return io.EOF
	}
	size := len(s.src)
	if s.framed {
		if size < 4 || uint64(binary.BigEndian.Uint32(s.src)) > uint64(size-4) {
			return errSnappy
		}
		size, s.src = int(binary.BigEndian.Uint32(s.src)), s.src[4:]
	}
	s.block, s.src = s.src[:size], s.src[size:]
	left, n := binary.Uvarint(s.block)
	if n <= 0 || left > 1<<32-1 {
		return errSnappy
	}
	s.block, s.left, s.out, s.read = s.block[n:], left, s.out[:0], 0
	s.earlier, s.kept, s.dropped = nil, 0, 0
	for i := range s.cached {
		s.cached[i].chunk = 0
	}
	return nil
}

// nextElement reads the beginning of the next element of a block: a literal, which follows, or a copy of earlier
// output.
func (s *snappyReader) nextElement() error {
	if len(s.block) == 0 {
		return errSnappy
	}
	tag := s.block[0]
	extra := [...]int{0, 1, 2, 4}[tag&3]
	if tag&3 == 0 {
		extra = max(int(tag>>2)-59, 0) // a length of 60 and more is in as many bytes as it says
	}
	if len(s.block) <= extra {
		return errSnappy
	}
	var bytes [4]byte
	copy(bytes[:], s.block[1:1+extra])
	number := int(binary.LittleEndian.Uint32(bytes[:]))
	s.block = s.block[1+extra:]
	switch {
	case tag&3 == 0 && extra > 0:
		s.literal = number + 1
	case tag&3 == 0:
		s.literal = int(tag>>2) + 1
	case tag&3 == 1:
		s.copies, s.offset = 4+int(tag>>2&7), number|int(tag>>5)<<8
	default:
		s.copies, s.offset = 1+int(tag>>2), number
	}
	if s.literal > len(s.block) || uint64(s.literal+s.copies) > s.left || s.copies > 0 && (s.offset <= 0 || s.offset > len(s.earlier)*snappyChunk+len(s.out)) {
		return errSnappy
	}
	return nil
}
