package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/user"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/outboxops"
)

// env is all that commands know of the world.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	// outTTY and errTTY say whether stdout and stderr are terminals.
	outTTY, errTTY bool
	width          int // of the terminal
	getenv         func(string) string
	environ        func() []string // all variables as name=value; nil for none
	now            func() time.Time
	user           func() string // who calls

	globals
	args   []string // without flags
	db     *pgxpool.Pool
	theirs pg.Clock // of db
	warned bool     // of a login in clear text

	mu      sync.Mutex // the Kafka client reads tokens while other goroutines write errors
	secrets []string   // under mu
}

// newEnv returns the environment of the process.
func newEnv() *env {
	return &env{
		stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, outTTY: isTerminal(os.Stdout), errTTY: isTerminal(os.Stderr),
		width: columns(os.Getenv("COLUMNS")), getenv: os.Getenv, environ: os.Environ, now: time.Now, user: osUser, globals: globals{timeout: defaultTimeout},
	}
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

const usualWidth = 80

func columns(text string) int {
	if n, err := strconv.Atoi(text); err == nil && n >= 40 {
		return n
	}
	return usualWidth
}

func osUser() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return os.Getenv("USER")
}

func (e *env) checkGlobals() error {
	if e.timeout < 0 {
		return usagef("--timeout %v: must not be negative", e.timeout)
	}
	e.schema = cmp.Or(e.schema, e.getenv(schemaVariable))
	if text := e.getenv("KAFKA_TLS"); text != "" && !e.kafkaTLS {
		var err error
		if e.kafkaTLS, err = strconv.ParseBool(text); err != nil {
			return usagef("$KAFKA_TLS %q: want true or false", text)
		}
	}
	return nil
}

func (e *env) close() {
	if e.db != nil {
		e.db.Close()
		e.db = nil
	}
}

// mask removes passwords from a text that is shown. It removes known passwords, and text that looks like a
// password, for example in a URL that was given in the wrong place.
func (e *env) mask(text string) string { return e.maskFrom(text, 1) }

// maskFrom leaves short passwords as they are: in a text that shows none anyway, they would be parts of
// words.
func (e *env) maskFrom(text string, least int) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, secret := range e.secrets {
		if len(secret) >= least {
			text = strings.ReplaceAll(text, secret, "xxxxx")
		}
	}
	text = passwordInURL.ReplaceAllString(text, "${1}xxxxx@")
	return passwordInList.ReplaceAllString(text, "${1}xxxxx")
}

var (
	passwordInURL  = regexp.MustCompile(`(://[^:/@\s]*:)[^\s]*@`) // up to the last @: a password may have one
	passwordInList = regexp.MustCompile(`(?i)((?:password|passwd|secret|token)=)('(?:[^'\\]|\\.)*'|[^\s&'"]+)`)
)

// secret notes a password. It ignores a password that is equal to a name that is shown anyway.
func (e *env) secret(text string, names ...string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if text != "" && !slices.Contains(names, text) && !slices.Contains(e.secrets, text) {
		e.secrets = append(e.secrets, text)
	}
}

// setting returns the value of a flag, or of a variable if the flag is empty. It also returns the name of
// the flag or the variable.
func (e *env) setting(value, name, variable string) (text, given string) {
	if value != "" {
		return value, name
	}
	return e.getenv(variable), "$" + variable
}

// namesDatabase reports whether a flag or variable names the database. Otherwise pgx would try the local
// database with the name of the user.
func (e *env) namesDatabase() bool {
	return e.database != "" || slices.ContainsFunc([]string{"DATABASE_URL", "PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"},
		func(name string) bool { return e.getenv(name) != "" })
}

// databaseConfig returns the config of the pool for a short command.
func (e *env) databaseConfig() (*pgxpool.Config, error) {
	cfg, err := e.parseDatabase("outbox-cli")
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = 4
	// PgBouncer may be in between, and statements are not run often enough to gain by
	// being prepared.
	if c := cfg.ConnConfig; c.DefaultQueryExecMode == pgx.QueryExecModeCacheStatement {
		c.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	return cfg, nil
}

// parseDatabase reads the URL, or libpq's variables.
func (e *env) parseDatabase(application string) (*pgxpool.Config, error) {
	if !e.namesDatabase() {
		return nil, usagef("which database? --database URL, or $DATABASE_URL")
	}
	url, given := e.setting(e.database, "--database", "DATABASE_URL")
	if url == "" {
		given = "$PGHOST, $PGPORT …"
	}
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		// The error of pgx shows the invalid text, which may contain a password.
		return nil, usagef("%s: that is no URL of PostgreSQL, nor a list of name=value (postgres://user:password@host:5432/database)", given)
	}
	c := cfg.ConnConfig
	e.secret(c.Password, c.User, c.Database, c.Host)
	if c.RuntimeParams["application_name"] == "" {
		c.RuntimeParams["application_name"] = application
	}
	cfg.AfterConnect = pg.SafeSession
	return cfg, nil
}

// connect opens the database. It may be called again.
func (e *env) connect(ctx context.Context) (*pgxpool.Pool, error) {
	if e.db != nil {
		return e.db, nil
	}
	cfg, err := e.databaseConfig()
	if err != nil {
		return nil, err
	}
	ctx, cancel := e.step(ctx)
	defer cancel()
	db, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", e.databaseName(), err)
	}
	if e.theirs, err = pg.ReadClock(ctx, db); err != nil {
		db.Close()
		return nil, fmt.Errorf("connect to %s: %w", e.databaseName(), err)
	}
	e.db = db
	return db, nil
}

// dbNow returns the time of the database, by which ages of rows are told. Before connect it is that of this host.
func (e *env) dbNow() time.Time {
	if e.theirs.IsRead() {
		return e.theirs.Now()
	}
	return e.now()
}

// nowFor returns the time from which flags that choose rows count back. It connects if one of them does.
func (e *env) nowFor(ctx context.Context, flags ...when) (time.Time, error) {
	if slices.ContainsFunc(flags, func(w when) bool { return w.ago > 0 }) {
		if _, err := e.connect(ctx); err != nil {
			return time.Time{}, err
		}
	}
	return e.dbNow(), nil
}

// step bounds one part of a command that may take longer as a whole.
func (e *env) step(ctx context.Context) (context.Context, context.CancelFunc) {
	if e.timeout > 0 {
		return context.WithTimeout(ctx, e.timeout)
	}
	return context.WithCancel(ctx)
}

// databaseName returns the name of the database, without the password.
func (e *env) databaseName() string {
	cfg, err := e.databaseConfig()
	if err != nil {
		return "the database"
	}
	c := cfg.ConnConfig
	return fmt.Sprintf("%s@%s:%d/%s", c.User, c.Host, c.Port, c.Database)
}

func (e *env) inspector(ctx context.Context) (*outboxops.Inspector, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewInspector(db, outboxops.InspectorConfig{Schema: e.schema})
}

func (e *env) failures(ctx context.Context) (*outboxops.Failures, error) {
	return e.failuresUpTo(ctx, 0)
}

// failuresUpTo is failures with a limit for edited payloads; 0: the usual one.
func (e *env) failuresUpTo(ctx context.Context, maxPayload int) (*outboxops.Failures, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewFailures(db, outboxops.FailuresConfig{Schema: e.schema, MaxPayload: maxPayload})
}

func (e *env) schemaName() string { return cmp.Or(e.schema, "public") }
