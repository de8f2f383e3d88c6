package place_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/place"
)

func TestFetchFillsOnce(t *testing.T) {
	t.Setenv(place.CacheEnv, t.TempDir())
	var fills atomic.Int32
	var wg sync.WaitGroup
	for range 5 {
		wg.Go(func() {
			dir, err := place.Fetch(t.Context(), "x", io.Discard, func(dir string) error {
				fills.Add(1)
				return os.WriteFile(filepath.Join(dir, "file"), nil, 0o600)
			})
			if err != nil {
				t.Error(err)
				return
			}
			info, err := os.Stat(filepath.Join(dir, "file"))
			if err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("want a file for everybody, got %v, %v", info, err)
			}
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, fills.Load())
	require.True(t, place.Cached("x"))
}

func TestFailedFetchLeavesNothing(t *testing.T) {
	t.Setenv(place.CacheEnv, t.TempDir())
	failed := errors.New("no network")
	_, err := place.Fetch(t.Context(), "x", io.Discard, func(string) error { return failed })
	require.ErrorIs(t, err, failed)
	require.False(t, place.Cached("x"))
}

func TestFetchStopsWaiting(t *testing.T) {
	t.Setenv(place.CacheEnv, t.TempDir())
	_, err := place.Fetch(t.Context(), "x", io.Discard, func(string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		defer cancel()
		_, err := place.Fetch(ctx, "x", io.Discard, nil)
		return err
	})
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestNewRunSweepsTheDead(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	live, err := place.NewRun("x")
	require.NoError(t, err)
	mkdir := func(name string, modified time.Time) string {
		dir := filepath.Join(tmp, name)
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, os.Chtimes(dir, modified, modified))
		return dir
	}
	dead := mkdir("outbox-x-dead", time.Now())
	require.NoError(t, os.WriteFile(filepath.Join(dead, "lock"), nil, 0o600))
	old, young := mkdir("outbox-x-old", time.Now().Add(-time.Hour)), mkdir("outbox-x-young", time.Now())
	other := mkdir("outbox-y-old", time.Now().Add(-time.Hour))

	next, err := place.NewRun("x")
	require.NoError(t, err)
	require.NoDirExists(t, dead)
	require.NoDirExists(t, old)
	require.DirExists(t, live.Path)
	require.DirExists(t, young, "its maker may be about to lock it")
	require.DirExists(t, other)
	require.NoError(t, live.Remove())
	require.NoError(t, next.Remove())
	require.NoDirExists(t, live.Path)
}

func TestPortIsFree(t *testing.T) {
	port, err := place.Port()
	require.NoError(t, err)
	require.True(t, place.Free(port))
}
