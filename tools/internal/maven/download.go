// Package maven downloads files from a Maven repository over HTTPS.
//
//   - A file is kept only if it has the checksum that the caller knows.
//   - Several files are downloaded at once. One that breaks off goes on where it
//     stopped, a few times.
//   - [Repository] says which repository that is.
package maven

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/tools/internal/progress"
)

const (
	parallel = 4
	attempts = 5
	// stallTimeout is how long a server may send nothing.
	stallTimeout = 30 * time.Second
)

// firstPause is the wait before the second attempt. Each later one is twice as long.
var firstPause = 500 * time.Millisecond

// File is a file of a repository.
type File struct {
	Path   string // below the repository's address
	SHA256 string // in hexadecimal
}

// ParseList reads lines of a checksum and a path, as sha256sum writes them.
func ParseList(text string) ([]File, error) {
	var files []File
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 2 || len(fields[0]) != hex.EncodedLen(sha256.Size) {
			return nil, fmt.Errorf("line %q: want a SHA-256 and a path", strings.TrimSpace(line))
		}
		files = append(files, File{Path: fields[1], SHA256: fields[0]})
	}
	return files, nil
}

// Download puts the files into dir, under their base names, and writes lines on the
// progress of name to w. It returns the first error; files that are complete stay.
func Download(ctx context.Context, repository, dir, name string, files []File, w io.Writer) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer http.DefaultClient.CloseIdleConnections() // a test that runs this must leave no goroutine
	d := &download{repository: repository, dir: dir}
	stop := progress.Heartbeat(w, func() string {
		return fmt.Sprintf("still downloading %s, %d of %d files, %.1f MB", name, d.files.Load(), len(files), float64(d.bytes.Load())/1e6)
	})
	defer stop()
	queue := make(chan File)
	var workers sync.WaitGroup
	for range min(parallel, len(files)) {
		workers.Go(func() {
			for file := range queue {
				if err := d.fetch(ctx, file); err != nil {
					cancel(fmt.Errorf("download %s: %w", file.Path, err))
				}
			}
		})
	}
	for _, file := range files {
		select {
		case queue <- file:
		case <-ctx.Done():
		}
	}
	close(queue)
	workers.Wait()
	return context.Cause(ctx)
}

// download is a run of [Download].
type download struct {
	repository, dir string
	files, bytes    atomic.Int64 // complete files, and bytes received
}

// fetch downloads one file, in several attempts if need be.
func (d *download) fetch(ctx context.Context, file File) error {
	part := filepath.Join(d.dir, path.Base(file.Path)+".part")
	pause := firstPause
	for attempt := 1; ; attempt++ {
		err := d.attempt(ctx, file, part)
		if err == nil {
			d.files.Add(1)
			return os.Rename(part, strings.TrimSuffix(part, ".part"))
		}
		if permanent := (*permanentError)(nil); errors.As(err, &permanent) || attempt == attempts || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(pause):
			pause *= 2
		}
	}
}

// permanentError is one that another attempt would only repeat.
type permanentError struct{ error }

// attempt asks for what part lacks, and checks the whole.
func (d *download) attempt(ctx context.Context, file File, part string) (err error) {
	f, err := os.OpenFile(part, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return &permanentError{err}
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	received, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return &permanentError{err}
	}
	if err := d.receive(ctx, file, f, received); err != nil {
		return err
	}
	sum, err := checksum(f)
	if err != nil {
		return &permanentError{err}
	}
	if sum != file.SHA256 {
		return errors.Join(fmt.Errorf("its SHA-256 is %s instead of %s", sum, file.SHA256), f.Truncate(0))
	}
	return nil
}

// receive appends the rest of the file to f, or all of it if the server sends that.
func (d *download) receive(ctx context.Context, file File, f *os.File, received int64) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stalled := time.AfterFunc(stallTimeout, func() { cancel(fmt.Errorf("nothing received for %v", stallTimeout)) })
	defer stalled.Stop()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, d.repository+"/"+file.Path, http.NoBody)
	if err != nil {
		return &permanentError{err}
	}
	if received > 0 {
		request.Header.Set("Range", fmt.Sprintf("bytes=%d-", received))
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return firstCause(ctx, err)
	}
	defer func() { err = errors.Join(err, response.Body.Close()) }()
	switch code := response.StatusCode; {
	case code == http.StatusPartialContent:
	case code == http.StatusOK, code == http.StatusRequestedRangeNotSatisfiable: // from the beginning, now or next time
		if err := restart(f); err != nil {
			return &permanentError{err}
		}
		if code != http.StatusOK {
			return errors.New(response.Status)
		}
	case code >= 500, code == http.StatusRequestTimeout, code == http.StatusTooManyRequests:
		return errors.New(response.Status)
	default:
		return &permanentError{errors.New(response.Status)}
	}
	_, err = io.Copy(f, &countingReader{response.Body, &d.bytes, stalled})
	return firstCause(ctx, err)
}

// firstCause returns err, or why ctx ended if that made it.
func firstCause(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func restart(f *os.File) error {
	if err := f.Truncate(0); err != nil {
		return err
	}
	_, err := f.Seek(0, io.SeekStart)
	return err
}

func checksum(f *os.File) (string, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(hash.Sum(nil)), nil
}

// countingReader counts what is read, and puts off the timeout of a stalled server.
type countingReader struct {
	io.Reader
	bytes   *atomic.Int64
	stalled *time.Timer
}

func (r *countingReader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	r.bytes.Add(int64(n))
	if n > 0 {
		r.stalled.Reset(stallTimeout)
	}
	return n, err
}
