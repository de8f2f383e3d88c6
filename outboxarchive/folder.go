package outboxarchive

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/outboxgo/outbox"
)

// Folder is a folder of a file system as a [Store], and the files in it as a [Source]. It is
// safe for concurrent use, and any number of processes may write to it.
type Folder struct {
	path  string
	sweep sync.Once
}

// OpenFolder returns the folder at a path, which must exist.
func OpenFolder(path string) (*Folder, error) {
	info, err := os.Stat(path)
	if err == nil && !info.IsDir() {
		err = fmt.Errorf("%s is no folder", path)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: archive folder: %w", err)
	}
	return &Folder{path: path}, nil
}

const (
	tempPrefix = ".outbox-tmp-" // of a file that is being written
	tempAge    = time.Hour      // a temporary file of this age belongs to a process that has ended
)

// Put implements [Store]. It writes to a temporary name, syncs the file, renames the file, and syncs the
// folder. Only the user of the process may read the file, because events may be personal data.
func (f *Folder) Put(ctx context.Context, name string, content []byte) error {
	f.sweep.Do(f.removeLeft)
	if err := context.Cause(ctx); err != nil {
		return err
	}
	if name == "" || name != filepath.Base(name) || strings.HasPrefix(name, ".") {
		return fmt.Errorf("file name %q %w", name, outbox.ErrMalformed)
	}
	temp, err := os.CreateTemp(f.path, tempPrefix)
	if err != nil {
		return err
	}
	err = writeDurably(temp, content)
	if err == nil {
		err = context.Cause(ctx)
	}
	if err == nil {
		err = os.Rename(temp.Name(), filepath.Join(f.path, name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(temp.Name()))
	}
	return f.sync()
}

func writeDurably(file *os.File, content []byte) error {
	_, err := file.Write(content)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// sync waits until the names of the files are on disk.
func (f *Folder) sync() error {
	dir, err := os.Open(f.path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// removeLeft removes old temporary files of killed processes. Nothing reads these files, so errors are
// ignored.
func (f *Folder) removeLeft() {
	left, _ := filepath.Glob(filepath.Join(f.path, tempPrefix+"*"))
	for _, name := range left {
		if info, err := os.Stat(name); err == nil && time.Since(info.ModTime()) > tempAge {
			_ = os.Remove(name)
		}
	}
}

// Events implements [Source].
func (f *Folder) Events(ctx context.Context, filter Filter) iter.Seq2[outbox.ArchivedEvent, error] {
	return FromFS(os.DirFS(f.path)).Events(ctx, filter)
}
