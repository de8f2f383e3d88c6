// Package connectserver runs a standalone worker of Kafka Connect with Debezium's
// connector for PostgreSQL, for benchmarks.
//
//   - Its REST interface listens on 127.0.0.1 only, on a free port, and answers when
//     [Start] returns.
//   - Offsets of connectors are kept in a file of the run.
//   - Nothing of it remains after [Server.Stop]. On Linux the worker also ends when the
//     program that started it dies.
//
// It needs Java 17. [Libraries] downloads the rest.
package connectserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/outboxgo/outbox/tools/internal/java"
	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/proc"
)

const (
	startTimeout = 90 * time.Second
	stopTimeout  = 30 * time.Second
	lookEvery    = 100 * time.Millisecond
)

// Config says what to run. Brokers is required.
type Config struct {
	// Brokers are the addresses of Kafka, host:port.
	Brokers []string

	// Settings are lines of the worker's properties. They override the defaults: keys and
	// values are strings. The REST listener, the brokers and the file of the offsets
	// cannot be set.
	Settings map[string]string

	// Heap is the largest heap of the worker, as -Xmx wants it. Empty means 512m.
	Heap string

	// Log receives what the worker prints, warnings and errors. Nil discards it.
	Log io.Writer

	// Progress receives lines about a download. Nil discards them.
	Progress io.Writer
}

// Server is a running worker. Its methods may be called from several goroutines, but for
// Stop.
type Server struct {
	port int
	run  *place.Run // nil once stopped
	proc *proc.Process
}

// fixed are the settings that make the worker ours to find.
var fixed = []string{"bootstrap.servers", "listeners", "offset.storage.file.filename"}

// Start starts a worker without connectors and waits until it answers, at most 90 s. If
// that fails, the error holds the last lines of its log, and nothing remains running.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	path, err := java.Path()
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	libraries, err := Libraries(ctx, cfg.Progress)
	if err != nil {
		return nil, err
	}
	run, err := place.NewRun("connect")
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	s := &Server{run: run}
	if err := s.start(ctx, cfg, path, libraries); err != nil {
		return nil, errors.Join(fmt.Errorf("connect: %w", err), run.Remove())
	}
	return s, nil
}

func (c Config) validate() error {
	var errs []error
	if len(c.Brokers) == 0 {
		errs = append(errs, errors.New("no address in Brokers"))
	}
	return errors.Join(append(errs, java.CheckSettings(c.Settings, fixed))...)
}

func (s *Server) start(ctx context.Context, cfg Config, java, libraries string) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("no answer within %v", startTimeout))
	defer cancel()
	if s.port, err = place.Port(); err != nil {
		return err
	}
	for name, content := range map[string][]byte{"worker.properties": s.properties(cfg), "log4j2.xml": log4jConfig} {
		if err := os.WriteFile(s.path(name), content, 0o600); err != nil {
			return fmt.Errorf("write configuration: %w", err)
		}
	}
	heap := cfg.Heap
	if heap == "" {
		heap = "512m"
	}
	s.proc, err = proc.Start(proc.Command{
		Path: java,
		Args: []string{
			"-Xmx" + heap, "-Djava.io.tmpdir=" + s.run.Path, "-XX:-UsePerfData", // leave nothing elsewhere
			"-Dlog4j2.configurationFile=" + s.path("log4j2.xml"),
			"-cp", filepath.Join(libraries, "*"), "org.apache.kafka.connect.cli.ConnectStandalone", s.path("worker.properties"),
		},
		Dir: s.run.Path,
		Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	if err := s.proc.Await(ctx, "the worker", lookEvery, s.answers); err != nil {
		return errors.Join(err, s.proc.Kill())
	}
	return nil
}

func (s *Server) properties(cfg Config) []byte {
	settings := map[string]string{
		"key.converter":    "org.apache.kafka.connect.storage.StringConverter",
		"value.converter":  "org.apache.kafka.connect.storage.StringConverter",
		"plugin.discovery": "service_load", // all plugins are in the class path
	}
	maps.Copy(settings, cfg.Settings)
	settings["bootstrap.servers"] = strings.Join(cfg.Brokers, ",")
	settings["listeners"] = s.URL()
	settings["offset.storage.file.filename"] = s.path("offsets")
	return java.Properties(settings)
}

// answers returns nil if the REST interface answers.
func (s *Server) answers(ctx context.Context) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.URL()+"/connectors", http.NoBody)
	if err != nil {
		return err
	}
	response, err := client.Do(request)
	if err != nil {
		return err
	}
	if err := response.Body.Close(); err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("its REST interface answers %s", response.Status)
	}
	return nil
}

func (s *Server) path(name string) string { return filepath.Join(s.run.Path, name) }

// URL returns the address of the REST interface, without a slash at the end.
func (s *Server) URL() string { return "http://" + place.Address(s.port) }

// PID returns the id of the worker's process.
func (s *Server) PID() int { return s.proc.PID() }

// Done is closed when the worker has ended, for whatever reason.
func (s *Server) Done() <-chan struct{} { return s.proc.Done() }

// Tail returns the last lines of the worker's log.
func (s *Server) Tail() string { return s.proc.Tail() }

// Stop shuts the worker down and removes its directory. It takes at most 30 s; then, or
// when ctx ends, the worker is killed and Stop says so. A second Stop does nothing.
func (s *Server) Stop(ctx context.Context) error {
	if s.run == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	err := errors.Join(s.proc.Stop(ctx, syscall.SIGTERM), s.run.Remove())
	s.run = nil
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	return nil
}
