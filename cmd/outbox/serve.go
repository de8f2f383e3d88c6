package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/outboxadmin"
)

var serveCommand = command{
	name:    "serve",
	summary: "serve the operators' page, of several databases too",
	about: `
Serves the page of --schema at /outbox/, or with --databases a page for each
line of FILE at /outbox/NAME/. A line without URL uses --database. It runs until
SIGTERM, relays nothing, and needs the role outbox_operator. Lag is shown if
--kafka is given. /livez answers 200 while the process runs.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		s := &pageServer{}
		fs.StringVar(&s.users, "page", "", "`FILE` lines ROLE NAME PASSWORD: operators' page /outbox/")
		fs.StringVar(&s.databases, "databases", "", "`FILE` lines NAME SCHEMA [URL]: a page each")
		fs.StringVar(&s.listen, "listen", defaultPageListen, "`HOST:PORT` of the pages ("+defaultPageListen+")")
		fs.DurationVar(&s.stale, "stale-after", 0, "`TIME` age at which a page reports waiting events (5m)")
		return s.run
	},
}

// defaultPageListen is reached from this host alone: the page has no TLS of its own.
const defaultPageListen = "127.0.0.1:9465"

// pageServer is a process that serves operators' pages.
type pageServer struct {
	users, databases, listen string
	stale                    time.Duration
}

// pageTarget is a schema with a page.
type pageTarget struct {
	name   string // in the path; empty for the only page
	schema string
	url    string // of the database; empty for --database
}

// Bounds of the connections of a process, for each page and for each database.
const (
	pageConns    = 4
	maxPageConns = 20
)

// run serves until ctx ends.
func (s *pageServer) run(ctx context.Context, e *env) error {
	switch {
	case s.users == "":
		return usagef("who may see the page? --page FILE")
	case s.stale < 0:
		return usagef("--stale-after %v: must not be negative", s.stale)
	}
	if _, err := userFile(s.users).read(); err != nil {
		return fmt.Errorf("--page: %w", err)
	}
	targets := []pageTarget{{schema: e.schema}}
	if s.databases != "" {
		var err error
		if targets, err = readTargets(s.databases); err != nil {
			return fmt.Errorf("--databases: %w", err)
		}
	}
	var kafka []kgo.Opt
	if e.brokers() != "" {
		var err error
		if kafka, err = e.kafkaAccess(); err != nil {
			return err
		}
		kafka = append(kafka, kgo.ClientID("outbox-serve"))
	}
	format := logText
	if e.json {
		format = logJSON
	}
	log := newLogger(e, format, slog.LevelInfo)
	pools, err := pagePools(ctx, e, targets)
	defer closePools(pools)
	if err != nil {
		return err
	}
	handler, err := s.handler(targets, pools, kafka, log)
	if err != nil {
		return err
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", s.listen)
	if err != nil {
		return fmt.Errorf("--listen %s: %w", s.listen, err)
	}
	server := startServer(listener, handler, log)
	defer server.stop()
	log.Info("outbox: serves the operators' page", "listen", server.address(), "pages", len(targets))
	<-ctx.Done()
	return nil
}

// pagePools returns a pool for each database, by URL. They connect when they are needed.
func pagePools(ctx context.Context, e *env, targets []pageTarget) (map[string]*pgxpool.Pool, error) {
	pools, pages := map[string]*pgxpool.Pool{}, map[string]int32{}
	for _, t := range targets {
		pages[t.url]++
	}
	given := e.database
	defer func() { e.database = given }()
	for url, n := range pages {
		if e.database = given; url != "" {
			e.database = url
		}
		cfg, err := e.parseDatabase("outbox-serve")
		if err != nil {
			return pools, err
		}
		cfg.MaxConns = min(pageConns*n, maxPageConns)
		if pools[url], err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
			return pools, fmt.Errorf("connect to %s: %w", e.databaseName(), err)
		}
	}
	return pools, nil
}

func closePools(pools map[string]*pgxpool.Pool) {
	for _, db := range pools {
		if db != nil {
			closePool(db)
		}
	}
}

// handler returns the HTTP handler of all pages.
func (s *pageServer) handler(targets []pageTarget, pools map[string]*pgxpool.Pool, kafka []kgo.Opt, log *slog.Logger) (http.Handler, error) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	var names []string
	var first http.Handler
	for _, t := range targets {
		if t.name != "" {
			names = append(names, t.name)
		}
	}
	for _, t := range targets {
		page, err := outboxadmin.New(pools[t.url], outboxadmin.Config{
			Authorize: userFile(s.users).authorize, Challenge: challenge, Schema: t.schema, AuditReads: true, Name: t.name, Names: names,
			MaxConns: pageConns, Kafka: kafka, StaleAfter: s.stale, Logger: log,
		})
		if err != nil {
			return nil, err
		}
		path := pagePath
		if t.name != "" {
			path += "/" + t.name
		}
		handler := http.StripPrefix(path, page)
		mux.Handle(path+"/", handler)
		if first == nil {
			first = handler
		}
	}
	if len(names) > 0 {
		// The first page answers, as if it were asked for without the slash behind its name: it redirects users that it
		// knows to itself, and logs others.
		mux.HandleFunc("GET "+pagePath+"/{$}", func(w http.ResponseWriter, r *http.Request) {
			r = r.Clone(r.Context())
			r.URL.Path = pagePath + "/" + names[0]
			r.RequestURI = r.URL.Path
			first.ServeHTTP(w, r)
		})
	}
	return mux, nil
}

// targetName is a name that a path and a link can have as it is.
var targetName = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,62}$`)

// readTargets returns the pages of a file. Errors do not show its words, because a URL has a password.
func readTargets(path string) (targets []pageTarget, err error) {
	err = eachLine(path, func(line string) error {
		target, err := readTarget(line)
		if err == nil && slices.ContainsFunc(targets, func(t pageTarget) bool { return t.name == target.name }) {
			err = errors.New("an earlier line has the name")
		}
		targets = append(targets, target)
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(targets) == 0 {
		return nil, fmt.Errorf("%s: it has no line NAME SCHEMA [URL]", path)
	}
	return targets, nil
}

// targetLine has a name, a schema, which is in quotes if it has blanks, and a URL.
var targetLine = regexp.MustCompile(`^(\S+)\s+("[^"]+"|[^\s"]+)(?:\s+(\S+))?$`)

// readTarget reads a line.
func readTarget(line string) (t pageTarget, err error) {
	words := targetLine.FindStringSubmatch(line)
	switch {
	case words == nil:
		return t, errors.New("want two or three words: a name, a schema and the URL of a database")
	case !targetName.MatchString(words[1]):
		return t, errors.New("the name is not of a-z, 0-9, - and _")
	}
	return pageTarget{name: words[1], schema: strings.Trim(words[2], `"`), url: words[3]}, nil
}
