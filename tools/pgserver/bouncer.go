package pgserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/proc"
)

// BouncerConfig says what a [Bouncer] stands in front of. URL is required.
type BouncerConfig struct {
	// URL is the address of a server, for pgx or libpq. Clients log in with its
	// user and password, and reach every database of the server.
	URL string

	// Log receives what PgBouncer prints. Nil discards it.
	Log io.Writer
}

// Bouncer is a running PgBouncer in transaction mode: each transaction of a client
// may run on another connection to the server, and the next one surely does if
// there is one, so that what relies on a session fails at once.
type Bouncer struct {
	cfg    BouncerConfig
	server *pgx.ConnConfig
	owner  *owner
	path   string // of the program
	port   int
	run    *place.Run
	proc   *proc.Process
	stop   sync.Once
}

const bouncerStop = 10 * time.Second

// StartBouncer starts the installed pgbouncer and waits until it answers, at most
// 60 s.
func StartBouncer(ctx context.Context, cfg BouncerConfig) (*Bouncer, error) {
	b, err := newBouncer(cfg)
	if err != nil {
		return nil, fmt.Errorf("pgbouncer: %w", err)
	}
	if err := b.start(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("pgbouncer: %w", err), b.run.Remove())
	}
	return b, nil
}

func newBouncer(cfg BouncerConfig) (*Bouncer, error) {
	server, err := pgx.ParseConfig(cfg.URL)
	if err != nil {
		return nil, fmt.Errorf("field URL: %w", err)
	}
	if strings.ContainsAny(server.User+server.Password, "\"\n") {
		return nil, errors.New("field URL: user and password must have no quotation mark and no line break")
	}
	path, err := findBouncer()
	if err != nil {
		return nil, err
	}
	owner, err := serverOwner()
	if err != nil {
		return nil, err
	}
	run, err := place.NewRun("pgbouncer")
	if err != nil {
		return nil, err
	}
	return &Bouncer{cfg: cfg, server: server, owner: owner, path: path, run: run}, nil
}

// findBouncer also looks where Debian puts it, which is not in everybody's PATH.
func findBouncer() (string, error) {
	path, err := exec.LookPath("pgbouncer")
	if err == nil {
		return filepath.Abs(path)
	}
	const packaged = "/usr/sbin/pgbouncer"
	if _, statErr := os.Stat(packaged); statErr == nil {
		return packaged, nil
	}
	return "", fmt.Errorf("it is not installed: %w", err)
}

func (b *Bouncer) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startTimeout, fmt.Errorf("no answer within %v", startTimeout))
	defer cancel()
	if err := b.owner.makeDir(b.home()); err != nil {
		return err
	}
	for try := 1; ; try++ {
		port, err := place.Port()
		if err != nil {
			return err
		}
		b.port = port
		err = b.launch(ctx)
		if err == nil || try == portTries || ctx.Err() != nil || place.Free(port) { // as in Server.start
			return err
		}
	}
}

// launch starts the process and waits until a statement gets through.
func (b *Bouncer) launch(ctx context.Context) error {
	for name, content := range map[string]string{"users": b.users(), "pgbouncer.ini": b.settings()} {
		if err := b.owner.writeFile(filepath.Join(b.home(), name), content); err != nil {
			return err
		}
	}
	p, err := proc.Start(proc.Command{
		Path: b.path, Args: []string{filepath.Join(b.home(), "pgbouncer.ini")}, Dir: b.home(), Env: b.owner.environ(b.home()),
		Credential: b.owner.credential, Log: b.cfg.Log, OnOrphan: syscall.SIGTERM,
	})
	if err != nil {
		return err
	}
	answers := func(ctx context.Context) error {
		_, err := Ping(ctx, b.URL())
		return err
	}
	if err := p.Await(ctx, "it", retryEvery, answers); err != nil {
		return errors.Join(err, p.Abort(syscall.SIGTERM))
	}
	b.proc = p
	return nil
}

// users is the file of those who may log in. The password is there as it is,
// because PgBouncer logs in to the server with it.
func (b *Bouncer) users() string {
	return fmt.Sprintf("\"%s\" \"%s\"\n", b.server.User, b.server.Password)
}

// settings are such that tests with many open transactions find a connection for
// each, and that a database which is dropped is not held open for long.
func (b *Bouncer) settings() string {
	auth := "scram-sha-256"
	if b.server.Password == "" {
		auth = "trust"
	}
	return fmt.Sprintf(`[databases]
* = host=%s port=%d
[pgbouncer]
listen_addr = %s
listen_port = %d
unix_socket_dir =
auth_type = %s
auth_file = %s
pool_mode = transaction
server_round_robin = 1
default_pool_size = 200
max_client_conn = 1000
server_idle_timeout = 10
log_connections = 0
log_disconnections = 0
log_stats = 0
`, b.server.Host, b.server.Port, place.Loopback, b.port, auth, filepath.Join(b.home(), "users"))
}

// home is where the process may write and no other user may look.
func (b *Bouncer) home() string { return filepath.Join(b.run.Path, "b") }

// URL returns the address for pgx, with what pgx needs to know: a statement that
// was prepared on one connection is unknown on the next. It has no "&", so that a
// shell can read it unquoted.
func (b *Bouncer) URL() string {
	address := url.URL{
		Scheme: "postgres", User: url.UserPassword(b.server.User, b.server.Password), Host: place.Address(b.port),
		Path: "/" + cmp.Or(b.server.Database, b.server.User), RawQuery: "default_query_exec_mode=cache_describe",
	}
	return address.String()
}

// Port returns the port on 127.0.0.1.
func (b *Bouncer) Port() int { return b.port }

// PID returns the id of the process.
func (b *Bouncer) PID() int { return b.proc.PID() }

// Done is closed when the process has ended, for whatever reason.
func (b *Bouncer) Done() <-chan struct{} { return b.proc.Done() }

// Tail returns the last lines of its log.
func (b *Bouncer) Tail() string { return b.proc.Tail() }

// Stop ends the process at once and cuts its connections. It takes at most 10 s;
// then, or when ctx ends, the process is killed and Stop says so. A second Stop
// does nothing.
func (b *Bouncer) Stop(ctx context.Context) (err error) {
	b.stop.Do(func() {
		ctx, cancel := context.WithTimeout(ctx, bouncerStop)
		defer cancel()
		err = errors.Join(b.proc.Stop(ctx, syscall.SIGTERM), b.run.Remove())
	})
	if err != nil {
		return fmt.Errorf("pgbouncer: %w", err)
	}
	return nil
}
