// Package place finds room for servers: a cache for what was downloaded,
// directories for one run, and free ports.
package place

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// CacheEnv names the environment variable that chooses the cache directory.
const CacheEnv = "OUTBOX_SERVICES_CACHE"

// Cache returns the directory for downloads, and makes it if need be: that of
// [CacheEnv], else outbox-services in the user's cache directory (for root in
// /var/cache, because root's own is closed to the user that runs PostgreSQL),
// else in the temporary directory.
func Cache() (string, error) {
	if dir := os.Getenv(CacheEnv); dir != "" {
		return dir, makeShared(dir)
	}
	base, err := os.UserCacheDir()
	if os.Geteuid() == 0 {
		base, err = "/var/cache", nil
	}
	if err == nil {
		dir := filepath.Join(base, "outbox-services")
		if makeShared(dir) == nil {
			return dir, nil
		}
	}
	dir := filepath.Join(os.TempDir(), "outbox-services-"+strconv.Itoa(os.Geteuid()))
	return dir, makeShared(dir)
}

// makeShared makes dir readable by all and checks that only we may write it:
// we are going to run programs from there, and anybody can make a directory of
// that name in the temporary directory.
func makeShared(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make cache: %w", err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		return fmt.Errorf("check cache: %w", err)
	}
	if ownerOf(info) != os.Geteuid() {
		return fmt.Errorf("check cache: %s belongs to another user; choose a directory with %s", dir, CacheEnv)
	}
	if info.Mode().Perm() == 0o755 {
		return nil
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		return fmt.Errorf("make cache: %w", err)
	}
	return nil
}

// Fetch returns the directory name in the cache, and has fill make it first if
// it is not there. It appears complete or not at all. While another process
// fetches the same name, Fetch waits for it and says so on progress.
func Fetch(ctx context.Context, name string, progress io.Writer, fill func(dir string) error) (string, error) {
	cache, err := Cache()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, name)
	if exists(dir) {
		return dir, nil
	}
	unlock, err := lock(ctx, dir+".lock", progress)
	if err != nil {
		return "", err
	}
	defer unlock()
	if exists(dir) {
		return dir, nil // the process that had the lock fetched it
	}
	part := dir + ".part" // ours while we hold the lock; may be left from a crash
	if err := os.RemoveAll(part); err != nil {
		return "", fmt.Errorf("clean up an earlier download: %w", err)
	}
	defer os.RemoveAll(part)
	if err := os.Mkdir(part, 0o755); err != nil {
		return "", fmt.Errorf("make cache entry: %w", err)
	}
	if err := fill(part); err != nil {
		return "", err
	}
	if err := openToAll(part); err != nil {
		return "", fmt.Errorf("make cache entry readable: %w", err)
	}
	if err := os.Rename(part, dir); err != nil {
		return "", fmt.Errorf("keep cache entry: %w", err)
	}
	return dir, nil
}

// Cached reports whether the directory name is in the cache.
func Cached(name string) bool {
	cache, err := Cache()
	return err == nil && exists(filepath.Join(cache, name))
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// openToAll lets everybody read dir, whatever the umask was.
func openToAll(dir string) error {
	return filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.Type()&fs.ModeSymlink != 0 {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm() | 0o444
		if mode&0o100 != 0 { // a directory or a program
			mode |= 0o111
		}
		return os.Chmod(path, mode)
	})
}

// lock waits for the exclusive lock on path. The kernel frees it when the
// process ends.
func lock(ctx context.Context, path string, progress io.Writer) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	for reported := false; ; reported = true {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		if !reported {
			fmt.Fprintln(progress, "waiting for another process that downloads the same")
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("wait for lock %s: %w", path, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}
