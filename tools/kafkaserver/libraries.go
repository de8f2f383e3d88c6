package kafkaserver

import (
	"cmp"
	"context"
	"embed"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"

	"github.com/outboxgo/outbox/tools/internal/java"
	"github.com/outboxgo/outbox/tools/internal/maven"
)

// Version is the version of Apache Kafka that runs by default.
const Version = "4.1.0"

// jars has the list of Java archives of each version, VERSION.txt; jars.sh writes it.
//
//go:embed jars
var jars embed.FS

//go:embed log4j2.xml
var log4jConfig []byte

// ErrNoJava says what [Start] misses.
var ErrNoJava = java.ErrNone

// Available returns nil if this machine can run the server: it has Java.
func Available() error {
	_, err := java.Path()
	return err
}

// Versions returns the versions of Apache Kafka that can run, in the order of their names.
func Versions() (versions []string) {
	lists, _ := fs.Glob(jars, "jars/*.txt") // the pattern is valid
	for _, list := range lists {
		versions = append(versions, strings.TrimSuffix(path.Base(list), ".txt"))
	}
	return versions
}

// Libraries returns the directory with the Java archives of one of the [Versions]; empty
// means [Version]. They are downloaded into the cache if they are not there, with lines on
// progress (nil: none). Several processes may call it at once: one downloads, the others wait.
func Libraries(ctx context.Context, version string, progress io.Writer) (dir string, err error) {
	version = cmp.Or(version, Version)
	if !slices.Contains(Versions(), version) {
		return "", fmt.Errorf("kafka: version %q is not one of %s", version, strings.Join(Versions(), ", "))
	}
	list, err := jars.ReadFile("jars/" + version + ".txt")
	if err != nil {
		return "", fmt.Errorf("kafka: %w", err)
	}
	kafka := maven.Libraries{Name: "Apache Kafka", About: version, Cache: "kafka-" + version, List: string(list)}
	if dir, err = kafka.Get(ctx, progress); err != nil {
		return "", fmt.Errorf("kafka: %w", err)
	}
	return dir, nil
}
