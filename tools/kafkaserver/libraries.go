package kafkaserver

import (
	"context"
	_ "embed"
	"fmt"
	"io"

	"github.com/outboxgo/outbox/tools/internal/java"
	"github.com/outboxgo/outbox/tools/internal/maven"
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
	kafka := maven.Libraries{Name: "Apache Kafka", About: Version, Cache: "kafka-" + Version, List: jars}
	if dir, err = kafka.Get(ctx, progress); err != nil {
		return "", fmt.Errorf("kafka: %w", err)
	}
	return dir, nil
}
