// Package pgserver runs a real PostgreSQL server for development and tests.
//
//   - It listens on 127.0.0.1 only, on a free port, and is ready when
//     [Start] returns.
//   - It never runs as root: then an unprivileged user runs it.
//   - It can crash ([Server.Kill]) and come back ([Server.Restart]) at the same
//     address with the same data.
//   - It can have standbys that replicate it ([Config]) and take its place.
//   - Nothing of it remains after [Server.Stop]. On Linux the server also stops
//     when the program that started it dies.
//
// [Installed] and [Embedded] find the programs that it needs.
package pgserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/proc"
)

// User and Password belong to the superuser that [Start] creates.
const (
	User     = "postgres"
	Password = "postgres"
)

const (
	startTimeout = 60 * time.Second // crash recovery included
	stopTimeout  = 30 * time.Second
	portTries    = 3
)

// settingsFile holds our settings, in the data directory.
const settingsFile = "outbox-services.conf"

// Config says what to run. BinDir is required.
type Config struct {
	// BinDir is the directory of the programs initdb and postgres.
	BinDir string

	// DataDir is the data directory; an empty or missing one is initialised.
	// Empty means a temporary one, which [Server.Stop] removes.
	DataDir string

	// Settings are lines of postgresql.conf. They come after the defaults:
	// max_connections 300, max_prepared_transactions 64, wal_level replica, and
	// scram_iterations 1000 since version 16.
	// The port, listen_addresses and unix_socket_directories cannot be set.
	Settings map[string]string

	// Primary makes the server a standby that replicates another one of this
	// package, with the same programs. An empty DataDir becomes a copy of the
	// primary's data, and for that the primary is shut down and started again.
	// Replication is asynchronous until the primary is told otherwise, and ends
	// with pg_promote(). Nil means a server with data of its own.
	Primary *Server

	// Log receives what the server prints. Nil discards it.
	Log io.Writer
}

// Server is a running PostgreSQL server. Its methods may be called from
// several goroutines.
type Server struct {
	cfg   Config
	owner *owner
	port  int

	mu      sync.Mutex
	run     *place.Run    // for sockets, and for the data if no DataDir was given; nil once stopped
	proc    *proc.Process // the postmaster, or the last one that was
	crashed bool          // killed and not restarted
}

// Start initialises the data directory if need be, starts a server and waits
// until it answers, at most 60 s. If it does not, the error holds the last
// lines of its log, and nothing remains running.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	owner, err := serverOwner()
	if err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	run, err := place.NewRun("postgres")
	if err != nil {
		return nil, fmt.Errorf("postgres: %w", err)
	}
	cfg.DataDir = cmp.Or(cfg.DataDir, filepath.Join(run.Path, "data"))
	s := &Server{cfg: cfg, owner: owner, run: run}
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("postgres: %w", err), run.Remove())
	}
	return s, nil
}

func (c Config) validate() error {
	var errs []error
	for _, name := range []string{"initdb", "postgres"} {
		if _, err := os.Stat(filepath.Join(c.BinDir, name)); err != nil {
			errs = append(errs, fmt.Errorf("find the programs in BinDir: %w", err))
		}
	}
	for _, name := range []string{"port", "listen_addresses", "unix_socket_directories"} {
		if _, ok := c.Settings[name]; ok {
			errs = append(errs, fmt.Errorf("setting %s cannot be changed", name))
		}
	}
	for name := range c.Settings {
		if name == "" || strings.ContainsAny(name, " \t\r\n='#") {
			errs = append(errs, fmt.Errorf("setting %q: not a name", name))
		}
	}
	return errors.Join(errs...)
}

func (s *Server) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("no answer within %v", startTimeout))
	defer cancel()
	if err := s.prepare(ctx); err != nil {
		return err
	}
	for try := 1; ; try++ {
		port, err := place.Port()
		if err != nil {
			return err
		}
		s.port = port
		err = s.launch(ctx)
		// Another process can take the port before our server does. That is
		// seen by looking, not by reading the log.
		if err == nil || try == portTries || ctx.Err() != nil || place.Free(port) {
			return err
		}
	}
}

// prepare makes the directories, the data and the settings.
func (s *Server) prepare(ctx context.Context) error {
	for _, dir := range []string{s.sockets(), s.cfg.DataDir} {
		if err := s.owner.makeDir(dir); err != nil {
			return err
		}
	}
	if err := s.owner.mayEnter(s.cfg.DataDir, s.cfg.BinDir); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(s.cfg.DataDir, "PG_VERSION")); errors.Is(err, os.ErrNotExist) {
		if err := s.makeData(ctx); err != nil {
			return err
		}
	}
	if err := s.writeSettings(); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

// makeData fills an empty data directory.
func (s *Server) makeData(ctx context.Context) error {
	if s.cfg.Primary != nil {
		if err := s.copyPrimary(ctx); err != nil {
			return fmt.Errorf("copy the primary's data: %w", err)
		}
		return nil
	}
	if err := s.initData(ctx); err != nil {
		return fmt.Errorf("initialise data: %w", err)
	}
	return nil
}

func (s *Server) initData(ctx context.Context) error {
	password := filepath.Join(s.sockets(), "password")
	if err := s.owner.writeFile(password, Password); err != nil {
		return err
	}
	defer os.Remove(password)
	args := []string{
		"--pgdata=" + s.cfg.DataDir, "--username=" + User, "--pwfile=" + password, "--auth=scram-sha-256",
		"--encoding=UTF8", "--locale=C", "--no-sync",
	}
	major, err := s.major(ctx)
	if err != nil {
		return err
	}
	// By default a client hashes its password 4,096 times for each connection: 13 ms under the race detector, and tests
	// make thousands of connections. lib/pq wants four digits. Before 16 there is neither the setting nor -c.
	if major >= 16 {
		args = append(args, "-c", "scram_iterations=1000")
	}
	return proc.Run(ctx, s.command("initdb", args...))
}

// major returns the major version of the server's programs.
func (s *Server) major(ctx context.Context) (major int, err error) {
	line, err := exec.CommandContext(ctx, filepath.Join(s.cfg.BinDir, "initdb"), "--version").Output()
	if err == nil {
		_, err = fmt.Sscanf(string(line), "initdb (PostgreSQL) %d", &major)
	}
	if err != nil {
		return 0, fmt.Errorf("version of initdb: %w", err)
	}
	return major, nil
}

// writeSettings uses a file of its own, so that a data directory can be used
// again with other settings.
func (s *Server) writeSettings() error {
	settings := map[string]string{
		"max_connections":           "300",
		"max_prepared_transactions": "64",
		"wal_level":                 "replica",
	}
	if s.cfg.Primary != nil {
		settings["primary_conninfo"] = s.cfg.Primary.URL()
	}
	for name, value := range s.cfg.Settings {
		settings[strings.ToLower(name)] = value
	}
	var lines []string
	for name, value := range settings {
		// In quotes a backslash starts an escape, and a line is a line.
		quoted := strings.NewReplacer(`\`, `\\`, `'`, `''`, "\n", `\n`).Replace(value)
		lines = append(lines, fmt.Sprintf("%s = '%s'\n", name, quoted))
	}
	slices.Sort(lines)
	if err := s.owner.writeFile(filepath.Join(s.cfg.DataDir, settingsFile), strings.Join(lines, "")); err != nil {
		return err
	}
	return includeSettings(filepath.Join(s.cfg.DataDir, "postgresql.conf"))
}

// includeSettings appends the include line to postgresql.conf once.
func includeSettings(path string) error {
	const line = "include_if_exists '" + settingsFile + "'\n"
	conf, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(conf), line) {
		return err
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("\n" + line)
	return errors.Join(err, f.Close())
}

// launch starts the server and waits until it answers.
func (s *Server) launch(ctx context.Context) error {
	p, err := proc.Start(s.command("postgres", "-D", s.cfg.DataDir, "-p", strconv.Itoa(s.port),
		"-c", "listen_addresses="+place.Loopback, "-c", "unix_socket_directories="+s.sockets()))
	if err != nil {
		return err
	}
	if err := p.Await(ctx, "the server", retryEvery, s.answers); err != nil {
		return errors.Join(err, p.Abort(syscall.SIGQUIT)) // SIGKILL would leave shared memory behind
	}
	s.proc, s.crashed = p, false
	return nil
}

func (s *Server) command(program string, args ...string) proc.Command {
	return proc.Command{
		Path:       filepath.Join(s.cfg.BinDir, program),
		Args:       args,
		Dir:        s.sockets(), // the present one may be closed to the owner
		Env:        s.owner.environ(s.sockets()),
		Credential: s.owner.credential,
		Log:        s.cfg.Log,
		OnOrphan:   syscall.SIGQUIT, // stops at once, its children too
	}
}

// sockets is the directory for what the server keeps outside its data. The
// name is short because the path of a socket may have about 100 bytes.
func (s *Server) sockets() string { return filepath.Join(s.run.Path, "s") }

// URL returns the address of the database postgres, for pgx or libpq.
func (s *Server) URL() string {
	return fmt.Sprintf("postgres://%s:%s@%s/postgres?sslmode=disable", User, Password, place.Address(s.port))
}

// Port returns the port on 127.0.0.1. It never changes.
func (s *Server) Port() int { return s.port }

// BinDir returns the directory of the server's programs.
func (s *Server) BinDir() string { return s.cfg.BinDir }

// PID returns the id of the server's main process, the postmaster.
func (s *Server) PID() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.PID()
}

// Done is closed when the server that runs now has ended, for whatever reason.
func (s *Server) Done() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.Done()
}

// Tail returns the last lines of the server's log.
func (s *Server) Tail() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc.Tail()
}

// ErrStopped is returned for a server that [Server.Stop] has ended.
var ErrStopped = errors.New("postgres: server is stopped")

// Stop shuts the server down: sessions are cut, committed data is kept. It
// takes at most 30 s; then, or when ctx ends, the server is killed and Stop
// says so. Directories that [Start] made are removed. A second Stop does
// nothing.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	if s.crashed {
		// A killed server leaves shared memory behind, which the next one on
		// the same data frees. If that fails there is nothing else to do.
		_ = s.launch(ctx)
	}
	err := s.proc.Stop(ctx, syscall.SIGINT)
	err = errors.Join(err, s.run.Remove())
	s.run = nil
	if err != nil {
		return fmt.Errorf("postgres: %w", err)
	}
	return nil
}

// Kill ends the server and all its children with SIGKILL, as a crash does, and
// returns when they are gone. [Server.Restart] brings it back.
func (s *Server) Kill() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil {
		return ErrStopped
	}
	s.crashed = true
	if err := s.proc.Kill(); err != nil {
		return fmt.Errorf("postgres: %w", err)
	}
	return nil
}

// Restart starts the server again with the same data and address, and waits
// until it answers. One that still runs is shut down first.
func (s *Server) Restart(ctx context.Context) error {
	return s.restart(ctx, func() error { return nil })
}

// restart does something while the server is down. The server comes back also
// when that fails.
func (s *Server) restart(ctx context.Context, meanwhile func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil {
		return ErrStopped
	}
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("no answer within %v", startTimeout))
	defer cancel()
	if err := s.proc.Stop(ctx, syscall.SIGINT); err != nil {
		return fmt.Errorf("postgres: restart: %w", err)
	}
	if err := errors.Join(meanwhile(), s.launch(ctx)); err != nil {
		return fmt.Errorf("postgres: restart: %w", err)
	}
	return nil
}
