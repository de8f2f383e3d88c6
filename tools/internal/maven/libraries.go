package maven

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"time"

	"github.com/outboxgo/outbox/tools/internal/place"
)

// Libraries are the files of one version of a program.
type Libraries struct {
	Name  string // of the program
	About string // its version, and what comes along
	Cache string // name and version in the cache
	List  string // lines for ParseList
}

// Get returns the directory with the files. They are downloaded into the cache if they are not
// there, with lines on progress (nil: none). Several processes may call it at once: one
// downloads, the others wait. Each version of the list is downloaded.
func (l Libraries) Get(ctx context.Context, progress io.Writer) (dir string, err error) {
	if progress == nil {
		progress = io.Discard
	}
	name := fmt.Sprintf("%s-%.4x", l.Cache, sha256.Sum256([]byte(l.List)))
	return place.Fetch(ctx, name, progress, func(dir string) error { return l.download(ctx, dir, progress) })
}

func (l Libraries) download(ctx context.Context, dir string, w io.Writer) error {
	files, err := ParseList(l.List)
	if err != nil {
		return fmt.Errorf("read the list of %s %s: %w", l.Name, l.About, err)
	}
	repository, err := Repository()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "downloading %s %s (%d files, about 45 MB, once)\n", l.Name, l.About, len(files))
	start := time.Now()
	if err := Download(ctx, repository, dir, l.Name, files, w); err != nil {
		return err
	}
	fmt.Fprintf(w, "downloaded %s %s in %.1f s\n", l.Name, l.About, time.Since(start).Seconds())
	return nil
}
