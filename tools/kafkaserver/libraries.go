package kafkaserver

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/proc"
	"github.com/outboxgo/outbox/tools/internal/progress"
)

// Version is the version of Apache Kafka that runs.
const Version = "4.1.0"

// copyLibraries is the Maven goal that resolves the pom and copies the result.
const copyLibraries = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

//go:embed pom.xml
var pom []byte

//go:embed log4j2.xml
var log4jConfig []byte

// ErrNoJava and ErrNoMaven say what [Libraries] and [Start] miss.
var (
	ErrNoJava = errors.New("no java command: install a Java runtime, version 17 or later, " +
		"or set JAVA_HOME; or name a running broker with OUTBOX_KAFKA_BROKERS")
	ErrNoMaven = errors.New("no mvn command: install Maven, to download Apache Kafka " + Version +
		" once; or name a running broker with OUTBOX_KAFKA_BROKERS")
)

// Available returns nil if this machine can run the server: it has Java, and
// either the libraries or Maven to download them.
func Available() error {
	if _, err := java(); err != nil {
		return err
	}
	if place.Cached(cacheName()) {
		return nil
	}
	if _, err := exec.LookPath("mvn"); err != nil {
		return ErrNoMaven
	}
	return nil
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

func cacheName() string {
	return fmt.Sprintf("kafka-%s-%.4x", Version, sha256.Sum256(pom))
}

func download(ctx context.Context, dir string, w io.Writer) error {
	maven, err := exec.LookPath("mvn")
	if err != nil {
		return ErrNoMaven
	}
	work, err := os.MkdirTemp(dir, "work-")
	if err != nil {
		return fmt.Errorf("make download directory: %w", err)
	}
	defer os.RemoveAll(work)
	if err := os.WriteFile(filepath.Join(work, "pom.xml"), pom, 0o644); err != nil {
		return fmt.Errorf("write pom: %w", err)
	}

	fmt.Fprintf(w, "downloading Apache Kafka %s with Maven (about 45 MB, once)\n", Version)
	start := time.Now()
	var files fileCounter
	stop := progress.Heartbeat(w, func() string {
		return fmt.Sprintf("still downloading Apache Kafka, %d files", files.Load())
	})
	defer stop()
	err = proc.Run(ctx, proc.Command{
		Path: maven,
		Args: []string{"--batch-mode", copyLibraries, "-DincludeScope=runtime", "-DoutputDirectory=" + dir},
		Dir:  work,
		Log:  &files,
	})
	if err != nil {
		return fmt.Errorf("download Apache Kafka: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "kafka_2.13-"+Version+".jar")); err != nil {
		return fmt.Errorf("download Apache Kafka: Maven ended well, but: %w", err)
	}
	fmt.Fprintf(w, "downloaded Apache Kafka %s in %.1f s\n", Version, time.Since(start).Seconds())
	return nil
}

// fileCounter counts the lines in Maven's output that tell of a file.
type fileCounter struct{ atomic.Int64 }

func (c *fileCounter) Write(b []byte) (int, error) {
	c.Add(int64(bytes.Count(b, []byte("Downloaded from"))))
	return len(b), nil
}

// java returns the path of the java command.
func java() (string, error) {
	if home := os.Getenv("JAVA_HOME"); home != "" {
		path := filepath.Join(home, "bin", "java")
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("find java in JAVA_HOME: %w", err)
		}
		return path, nil
	}
	path, err := exec.LookPath("java")
	if err != nil {
		return "", ErrNoJava
	}
	return path, nil
}
