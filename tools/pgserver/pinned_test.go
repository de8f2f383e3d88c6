package pgserver_test

import (
	"bytes"
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/tools/internal/long"
	"github.com/outboxgo/outbox/tools/pgserver"
)

// A repository that serves a changed archive is detected, before anything of it runs.
func TestChangedArchiveIsRefused(t *testing.T) {
	long.Test(t)
	var asked []string
	changed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Path)
		_, _ = w.Write([]byte("something else"))
	}))
	defer changed.Close()
	cache := t.TempDir()
	t.Setenv("OUTBOX_SERVICES_CACHE", cache)
	t.Setenv("OUTBOX_MAVEN_REPOSITORY", changed.URL)
	log := &exclusive{t: t}
	_, err := pgserver.Embedded(t.Context(), "", log)
	log.ended.Store(true)
	require.Error(t, err)
	require.Contains(t, log.String(), "its SHA-256 is")
	for _, path := range asked {
		require.False(t, strings.HasSuffix(path, ".sha256"), "a checksum of the same server proves nothing")
	}
	entries, err := os.ReadDir(cache)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing but the lock")
}

// A download goes on in the background when its context ends, and says nothing any more.
func TestNothingIsWrittenAfterTheEnd(t *testing.T) {
	others := goleak.IgnoreCurrent()
	ctx, cancel := context.WithCancel(t.Context())
	slow := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
	}))
	t.Setenv("OUTBOX_SERVICES_CACHE", t.TempDir())
	t.Setenv("OUTBOX_MAVEN_REPOSITORY", slow.URL)
	log := &exclusive{t: t}
	_, err := pgserver.Embedded(ctx, "", log)
	log.ended.Store(true)
	require.ErrorIs(t, err, context.Canceled)
	slow.Close()
	require.NoError(t, goleak.Find(others), "the download has ended")
}

// exclusive fails the test if two goroutines write at once, or one after the end.
type exclusive struct {
	t     *testing.T
	busy  atomic.Bool
	ended atomic.Bool
	bytes.Buffer
}

func (e *exclusive) Write(b []byte) (int, error) {
	if !e.busy.CompareAndSwap(false, true) {
		e.t.Errorf("written while another writes: %s", b)
		return len(b), nil
	}
	defer e.busy.Store(false)
	time.Sleep(300 * time.Millisecond) // two heartbeats that began together meet here
	if e.ended.Load() {
		e.t.Errorf("written after the end: %s", b)
	}
	return e.Buffer.Write(b)
}

// Each version has an archive for Linux.
func TestListedArchives(t *testing.T) {
	list, err := os.ReadFile("archives.txt")
	require.NoError(t, err)
	for _, version := range pgserver.Versions() {
		require.Contains(t, string(list), "-linux-amd64-"+version+".")
	}
}
