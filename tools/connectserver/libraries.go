package connectserver

import (
	"context"
	"crypto/sha256"
	_ "embed"
	"fmt"
	"io"
	"time"

	"github.com/outboxgo/outbox/tools/internal/maven"
	"github.com/outboxgo/outbox/tools/internal/place"
)

// Versions of what runs. That of Kafka Connect is the broker's in package kafkaserver.
const (
	KafkaVersion    = "4.1.0"
	DebeziumVersion = "3.7.0.Final"
)

// jars lists the Java archives of those versions; jars.sh writes it.
//
//go:embed jars.txt
var jars string

//go:embed log4j2.xml
var log4jConfig []byte

// Libraries returns the directory with the Java archives. They are downloaded into the
// cache if they are not there, with lines on progress (nil: none). Several processes may
// call it at once: one downloads, the others wait.
func Libraries(ctx context.Context, progress io.Writer) (dir string, err error) {
	if progress == nil {
		progress = io.Discard
	}
	name := fmt.Sprintf("debezium-%s-%.4x", DebeziumVersion, sha256.Sum256([]byte(jars)))
	dir, err = place.Fetch(ctx, name, progress, func(dir string) error { return download(ctx, dir, progress) })
	if err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	return dir, nil
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
	fmt.Fprintf(w, "downloading Debezium %s with Kafka Connect %s (%d files, about 45 MB, once)\n", DebeziumVersion, KafkaVersion, len(files))
	start := time.Now()
	if err := maven.Download(ctx, repository, dir, "Debezium", files, w); err != nil {
		return err
	}
	fmt.Fprintf(w, "downloaded Debezium %s in %.1f s\n", DebeziumVersion, time.Since(start).Seconds())
	return nil
}
