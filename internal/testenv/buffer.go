package testenv

import (
	"bytes"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Buffer is a log that can be read while it is written.
type Buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write appends to the log.
func (b *Buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

// String returns the whole log.
func (b *Buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Kept is a list that one goroutine writes while another reads it.
type Kept[T any] struct {
	mu  sync.Mutex
	all []T
}

// Add appends a value.
func (k *Kept[T]) Add(one T) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.all = append(k.all, one)
}

// All returns the values in the order in which they were added.
func (k *Kept[T]) All() []T {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.all)
}

// Await waits for a value that meets a condition, and returns the first such value.
func (k *Kept[T]) Await(t testing.TB, met func(T) bool, what string) (found T) {
	t.Helper()
	require.Eventually(t, func() bool {
		i := slices.IndexFunc(k.All(), met)
		if i >= 0 {
			found = k.All()[i]
		}
		return i >= 0
	}, Patience, 10*time.Millisecond, what)
	return found
}
