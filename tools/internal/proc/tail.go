package proc

import (
	"bytes"
	"strings"
	"sync"
)

// tailSize is how much of a process's output an error may hold, in bytes.
const tailSize = 4 << 10

// tail is a writer that keeps the end of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
	cut bool // buf lost its beginning
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	if over := len(t.buf) - tailSize; over > 0 {
		t.buf = append(t.buf[:0], t.buf[over:]...)
		t.cut = true
	}
	return len(b), nil
}

// String returns whole lines only.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	b := t.buf
	if i := bytes.IndexByte(b, '\n'); t.cut && i >= 0 {
		b = b[i+1:]
	}
	return strings.TrimSpace(string(b))
}
