package place

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

// lockName is the file in a run directory that its process keeps locked.
const lockName = "lock"

// Run is the directory of one server run.
type Run struct {
	Path string
	lock *os.File // held until Remove, or until we die
}

// NewRun makes a directory of the given kind in the temporary directory, and
// removes those of the same kind whose processes were killed before they could.
func NewRun(kind string) (*Run, error) {
	prefix := "outbox-" + kind + "-"
	sweep(prefix)
	dir, err := os.MkdirTemp(os.TempDir(), prefix)
	if err != nil {
		return nil, fmt.Errorf("make run directory: %w", err)
	}
	r := &Run{Path: dir}
	if err := r.claim(); err != nil {
		os.RemoveAll(dir)
		return nil, fmt.Errorf("claim run directory: %w", err)
	}
	return r, nil
}

// claim takes the lock that tells sweep to leave the directory alone. The file
// gets its name only once it is locked: otherwise another process could find it
// free in between.
func (r *Run) claim() error {
	if err := os.Chmod(r.Path, 0o755); err != nil { // an unprivileged server must get in
		return err
	}
	f, err := os.CreateTemp(r.Path, "claim-")
	if err != nil {
		return err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		return err
	}
	r.lock = f
	return os.Rename(f.Name(), filepath.Join(r.Path, lockName))
}

// Remove removes the directory and all that is in it.
func (r *Run) Remove() error {
	defer r.lock.Close()
	if err := os.RemoveAll(r.Path); err != nil {
		return fmt.Errorf("remove run directory: %w", err)
	}
	return nil
}

// sweep removes the run directories of dead processes. It is a courtesy: what
// it cannot remove stays.
func sweep(prefix string) {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), prefix+"*"))
	for _, dir := range dirs {
		if info, err := os.Lstat(dir); err == nil && info.IsDir() && ownerOf(info) == os.Geteuid() {
			sweepDir(dir, info.ModTime())
		}
	}
}

// sweepAge is when a directory without a lock was not made just now.
const sweepAge = time.Minute

func sweepDir(dir string, modified time.Time) {
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_RDWR|syscall.O_NOFOLLOW, 0)
	switch {
	case errors.Is(err, os.ErrNotExist):
		if time.Since(modified) > sweepAge { // its maker died before it had the lock
			os.RemoveAll(dir)
		}
		return
	case err != nil:
		return
	}
	defer lock.Close()
	if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return // in use
	}
	// The lock goes last. An orphaned server may still be ending and writing;
	// then the directory stays, and the next sweep must recognise it.
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if entry.Name() != lockName {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, entry.Name())))
		}
	}
	if err == nil {
		os.RemoveAll(dir)
	}
}

func ownerOf(info os.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Uid) }
