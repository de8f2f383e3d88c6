package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/outboxgo/outbox/bench/internal/stats"
	"github.com/outboxgo/outbox/tools/connectserver"
)

// fact is something that the figures depend on.
type fact struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// describe notes the machine and the versions of everything.
func (b *bench) describe(ctx context.Context) error {
	sync, err := syncTime(os.TempDir())
	if err != nil {
		return fmt.Errorf("measure the disk: %w", err)
	}
	commit, err := b.commitTime(ctx)
	if err != nil {
		return fmt.Errorf("measure a commit: %w", err)
	}
	b.machine = []fact{
		{"processor", fmt.Sprintf("%s, %d cores", firstOf("/proc/cpuinfo", "model name"), runtime.NumCPU())},
		{"memory", firstOf("/proc/meminfo", "MemTotal")},
		{"fsync of 8 KiB", fmt.Sprintf("%.2f ms, the median of %d", sync, syncs)},
		{"commit of a row", fmt.Sprintf("%.2f ms, the median of %d, one after the other", commit, syncs)},
	}
	var postgres, level string
	if err := b.DB.QueryRow(ctx, `SELECT current_setting('server_version'), current_setting('wal_level')`).Scan(&postgres, &level); err != nil {
		return err
	}
	brokers, err := b.Admin.ApiVersions(ctx)
	if err != nil {
		return fmt.Errorf("read Kafka's version: %w", err)
	}
	kafka := "unknown"
	for _, v := range brokers.Sorted() {
		kafka = v.VersionGuess()
	}
	b.machine = append(b.machine,
		fact{"PostgreSQL", fmt.Sprintf("%s, wal_level %s, fsync and synchronous_commit on, else its defaults", postgres, level)},
		fact{"Kafka", fmt.Sprintf("%s, one broker, a topic of %d partitions", kafka, b.cfg.partitions)},
		fact{"Debezium", fmt.Sprintf("%s in Kafka Connect %s", connectserver.DebeziumVersion, connectserver.KafkaVersion)},
		fact{"Go", runtime.Version()},
	)
	for _, m := range []struct{ name, path string }{
		{"River", "github.com/riverqueue/river"}, {"watermill-sql", "github.com/ThreeDotsLabs/watermill-sql/v4"},
		{"watermill-kafka", "github.com/ThreeDotsLabs/watermill-kafka/v3"}, {"Watermill", "github.com/ThreeDotsLabs/watermill"},
		{"franz-go", "github.com/twmb/franz-go"}, {"pgx", "github.com/jackc/pgx/v5"},
	} {
		b.machine = append(b.machine, fact{m.name, versionOf(m.path)})
	}
	for _, f := range b.machine {
		b.report.Note("%s: %s", f.Name, f.Value)
	}
	return nil
}

// versionOf returns the version of a module that this program links.
func versionOf(path string) string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, m := range info.Deps {
		if m.Path == path {
			return m.Version
		}
	}
	return "unknown"
}

// firstOf returns the value of the first line of a file of "name : value" lines, or "unknown".
func firstOf(file, name string) string {
	for line := range strings.Lines(contentOf(file)) {
		key, value, ok := strings.Cut(line, ":")
		if ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return "unknown"
}

func contentOf(file string) string {
	content, err := os.ReadFile(file)
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(content))
}

// syncs is how often the disk is measured.
const syncs = 100

// syncTime returns how long a write of 8 KiB and its fsync take in a folder, in milliseconds.
func syncTime(dir string) (ms float64, err error) {
	f, err := os.CreateTemp(dir, "bench-peers-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), os.Remove(filepath.Clean(f.Name()))) }()
	page, times := make([]byte, 8192), make(stats.Series, syncs)
	for i := range times {
		start := time.Now()
		if _, err := f.Write(page); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
		times[i] = time.Since(start).Seconds() * 1000
	}
	return times.Median(), nil
}

// commitTime returns how long a transaction of one row takes, in milliseconds.
func (b *bench) commitTime(ctx context.Context) (ms float64, err error) {
	i, err := b.newFloor(ctx)
	if err != nil {
		return 0, err
	}
	times := make(stats.Series, syncs)
	for n := range times {
		start := time.Now()
		if _, err := b.DB.Exec(ctx, i.order, "nobody"); err != nil {
			return 0, err
		}
		times[n] = time.Since(start).Seconds() * 1000
	}
	return times.Median(), nil
}
