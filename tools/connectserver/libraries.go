package connectserver

import (
	"context"
	_ "embed"
	"fmt"
	"io"

	"github.com/outboxgo/outbox/tools/internal/maven"
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
	debezium := maven.Libraries{
		Name: "Debezium", About: DebeziumVersion + " with Kafka Connect " + KafkaVersion, Cache: "debezium-" + DebeziumVersion, List: jars,
	}
	if dir, err = debezium.Get(ctx, progress); err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	return dir, nil
}
