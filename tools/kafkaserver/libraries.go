package kafkaserver

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"io"
	"time"

	"github.com/outboxgo/outbox/tools/internal/java"
	"github.com/outboxgo/outbox/tools/internal/maven"
	"github.com/outboxgo/outbox/tools/internal/place"
)

// Version is the version of Apache Kafka that runs.
const Version = "4.1.0"

// jars lists the Java archives of that version; jars.sh writes it.
//
//go:embed jars.txt
var jars string

//go:embed log4j2.xml
var log4jConfig []byte

// ErrNoJava says what [Start] misses.
var ErrNoJava = java.ErrNone

// Available returns nil if this machine can run the server: it has Java.
func Available() error {
	_, err := java.Path()
	return err
}

// Libraries returns the directory with Kafka's Java archives. They are
// downloaded into the cache if they are not there, with lines on progress (nil:
// none). Several processes may call it at once: one downloads, the others wait.
func Libraries(ctx context.Context, progress io.Writer) (dir string, err error) {
	if progress == nil {
		progress = io.Discard
	}
	dir, err = place.Fetch(ctx, cacheName(), progress, func(dir string) error {
		return download(ctx, dir, progress)
	})
	if err != nil {
		return "", fmt.Errorf("kafka: %w", err)
	}
	return dir, nil
}

// cacheName changes with the list, so that each version of it is downloaded.
func cacheName() string {
	return fmt.Sprintf("kafka-%s-%.4x", Version, sha256.Sum256([]byte(jars)))
}

func download(ctx context.Context, dir string, w io.Writer) error {
	files, err := maven.ParseList(jars)
	if err != nil {
		return fmt.Errorf("read jars.txt: %w", err)
	}
	repository, err := maven.Repository()
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "downloading Apache Kafka %s (%d files, about 45 MB, once)\n", Version, len(files))
	start := time.Now()
	if err := maven.Download(ctx, repository, dir, "Apache Kafka", files, w); err != nil {
		return err
	}
	fmt.Fprintf(w, "downloaded Apache Kafka %s in %.1f s\n", Version, time.Since(start).Seconds())
	return nil
}
