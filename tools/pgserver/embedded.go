package pgserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	embedded "github.com/fergusstrange/embedded-postgres"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/progress"
)

// DefaultVersion is the PostgreSQL that [Embedded] fetches by default.
const DefaultVersion = "18"

var releases = map[string]embedded.PostgresVersion{
	"14": embedded.V14,
	"15": embedded.V15,
	"16": embedded.V16,
	"17": embedded.V17,
	"18": embedded.V18,
}

// Embedded returns the directory of the programs of PostgreSQL version, "14" to
// "18"; empty means [DefaultVersion]. They are downloaded into the cache if
// they are not there, with lines on w (nil: none), one at a time and none after
// it returned. Several processes may call it at once: one downloads, the others
// wait.
//
// A download cannot be broken off. When ctx ends Embedded returns at once, and
// the download goes on in the background as long as the process lives.
func Embedded(ctx context.Context, version string, w io.Writer) (binDir string, err error) {
	version = cmp.Or(version, DefaultVersion)
	release, ok := releases[version]
	if !ok {
		return "", fmt.Errorf("postgres: version %q is not one of 14, 15, 16, 17, 18", version)
	}
	if w == nil {
		w = io.Discard
	}
	w, end := progress.Shared(w) // a download and the repository that it asks write both
	defer end()
	dir, err := place.Fetch(ctx, cacheName(release), w, func(dir string) error {
		return download(ctx, release, dir, w)
	})
	if err != nil {
		return "", fmt.Errorf("postgres: %w", err)
	}
	return filepath.Join(dir, "server", "bin"), nil
}

func cacheName(release embedded.PostgresVersion) string { return "postgresql-" + string(release) }

// Versions returns the versions that [Embedded] knows, lowest first.
func Versions() []string {
	return []string{"14", "15", "16", "17", "18"}
}

func download(ctx context.Context, release embedded.PostgresVersion, dir string, w io.Writer) error {
	fmt.Fprintf(w, "downloading PostgreSQL %s (about 30 MB, once)\n", release)
	start := time.Now()
	stop := progress.Heartbeat(w, func() string { return "still downloading PostgreSQL " + string(release) })
	defer stop()
	fetched := make(chan error, 1)
	go func() { fetched <- fetch(ctx, release, dir, w) }()
	select {
	case err := <-fetched:
		if err != nil {
			return fmt.Errorf("download PostgreSQL %s: %w", release, err)
		}
	case <-ctx.Done():
		return fmt.Errorf("download PostgreSQL %s: %w", release, context.Cause(ctx))
	}
	fmt.Fprintf(w, "downloaded PostgreSQL %s in %.1f s\n", release, time.Since(start).Seconds())
	return nil
}

// fetch downloads and unpacks a release into dir/server. It writes nothing
// outside dir, which is removed if this process is killed meanwhile.
//
// The library can only do that as the first step of starting a server, and
// refuses to start one as root. So it is given a data directory that claims to
// be initialised and is empty: it unpacks the programs, its server ends at once
// because there is no configuration, for root and for everybody else, and what
// counts is not its error but whether the programs run.
func fetch(ctx context.Context, release embedded.PostgresVersion, dir string, w io.Writer) error {
	server, work := filepath.Join(dir, "server"), filepath.Join(dir, "work")
	defer os.RemoveAll(work)
	data := filepath.Join(work, "data")
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte(majorOf(release)+"\n"), 0o600); err != nil {
		return err
	}
	port, err := place.Port()
	if err != nil {
		return err
	}
	repository, stop, err := pinnedRepository(ctx, filepath.Join(work, "jars"), w)
	if err != nil {
		return err
	}
	defer stop()
	database := embedded.NewDatabase(embedded.DefaultConfig().
		Version(release).Port(uint32(port)).Logger(io.Discard).BinaryRepositoryURL(repository).
		CachePath(filepath.Join(work, "archive")).RuntimePath(filepath.Join(work, "runtime")).
		DataPath(data).BinariesPath(server))
	startErr := database.Start()
	http.DefaultClient.CloseIdleConnections() // the library downloads with it; a test that runs this must leave no goroutine
	if startErr == nil {
		return errors.Join(errors.New("a server without configuration started"), database.Stop())
	}
	for _, name := range []string{"initdb", "postgres"} {
		out, err := exec.Command(filepath.Join(server, "bin", name), "--version").CombinedOutput()
		if errors.Is(err, os.ErrNotExist) {
			return startErr // it did not come so far
		}
		if err != nil {
			return fmt.Errorf("try %s: %w\n%s", name, err, out)
		}
	}
	return nil
}

func majorOf(release embedded.PostgresVersion) string {
	major, _, _ := strings.Cut(string(release), ".")
	return major
}
