package pgserver

import (
	"context"
	_ "embed"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/outboxgo/outbox/tools/internal/maven"
)

// archives lists the archives of PostgreSQL with their SHA-256, for each version of
// [Versions] and each system that has one.
//
//go:embed archives.txt
var archives string

// pinnedRepository returns the address of a repository on this machine that has the archives of the
// list and nothing else. It downloads an archive into dir on request, and returns it once it has
// the checksum of the list. The library that asks compares an archive only with a checksum of the
// same server, which reveals no change that was made there.
func pinnedRepository(ctx context.Context, dir string, w io.Writer) (address string, stop func(), err error) {
	files, err := maven.ParseList(archives)
	if err != nil {
		return "", nil, fmt.Errorf("read archives.txt: %w", err)
	}
	repository, err := maven.Repository()
	if err != nil {
		return "", nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { //nolint:gosec // it serves this process
		i := slices.IndexFunc(files, func(f maven.File) bool { return "/"+f.Path == r.URL.Path })
		if i < 0 {
			if !strings.HasSuffix(r.URL.Path, ".sha256") {
				fmt.Fprintf(w, "archives.txt has no checksum of %s\n", r.URL.Path)
			}
			http.NotFound(rw, r)
			return
		}
		if err := maven.Download(ctx, repository, dir, "PostgreSQL", files[i:i+1], w); err != nil {
			fmt.Fprintln(w, err)
			http.Error(rw, err.Error(), http.StatusBadGateway)
			return
		}
		http.ServeFile(rw, r, filepath.Join(dir, filepath.Base(files[i].Path)))
	})}
	go func() { _ = server.Serve(listener) }() // until stop
	return "http://" + listener.Addr().String(), func() { _ = server.Close() }, nil
}
