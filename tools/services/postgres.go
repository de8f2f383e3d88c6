package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/pgserver"
)

// The variables of an address. databaseEnv is that of most programs, the command outbox among them; it
// is only written: one that is set already may be that of a database in use.
const (
	postgresEnv = "OUTBOX_POSTGRES_URL"
	databaseEnv = "DATABASE_URL"
)

func postgresVariables(url string) []string {
	return []string{postgresEnv + "=" + url, databaseEnv + "=" + url}
}

// givenTimeout is how long an address from the environment may take to answer.
const givenTimeout = 10 * time.Second

// startPostgres returns nil if none is wanted.
func startPostgres(ctx context.Context, o *options, docker *docker, say teller) (*service, error) {
	p := &postgresStarter{set: o.pgSet, docker: docker, say: say, began: time.Now()}
	switch o.postgres {
	case "none":
		return nil, nil
	case "auto":
		return p.auto(ctx)
	case "docker":
		return p.container(ctx)
	case "installed":
		return p.installed(ctx)
	case "embedded":
		return p.embedded(ctx, pgserver.DefaultVersion)
	default:
		return p.embedded(ctx, o.postgres)
	}
}

type postgresStarter struct {
	set    settings
	docker *docker
	say    teller
	began  time.Time
}

func (p *postgresStarter) auto(ctx context.Context) (*service, error) {
	if url := os.Getenv(postgresEnv); url != "" {
		return p.given(ctx, url)
	}
	if p.docker.answers(ctx) == nil {
		s, err := p.container(ctx)
		if err == nil || ctx.Err() != nil {
			return s, err
		}
		p.say.step("no container, a local server instead: %s", oneLine(err))
	}
	binDir, err := pgserver.Embedded(ctx, pgserver.DefaultVersion, p.say.steps())
	if err == nil {
		return p.local(ctx, binDir, "downloaded programs")
	}
	if _, ok := pgserver.Installed(); !ok || ctx.Err() != nil {
		return nil, err
	}
	p.say.step("an installed server instead: %s", oneLine(err))
	return p.installed(ctx)
}

// given uses a server that runs already.
func (p *postgresStarter) given(ctx context.Context, url string) (*service, error) {
	ctx, cancel := context.WithTimeout(ctx, givenTimeout)
	defer cancel()
	version, err := pgserver.Ping(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("use the address in %s: %w", postgresEnv, err)
	}
	address := "?"
	if config, err := pgx.ParseConfig(url); err == nil { // without the password
		address = fmt.Sprintf("%s:%d", config.Host, config.Port)
	}
	p.ready(version, "the environment", address)
	return &service{name: "postgres", env: postgresVariables(url)}, nil
}

func (p *postgresStarter) embedded(ctx context.Context, version string) (*service, error) {
	binDir, err := pgserver.Embedded(ctx, version, p.say.steps())
	if err != nil {
		return nil, err
	}
	return p.local(ctx, binDir, "downloaded programs")
}

func (p *postgresStarter) installed(ctx context.Context) (*service, error) {
	binDir, ok := pgserver.Installed()
	if !ok {
		return nil, errors.New("postgres: no installed server found: " +
			"its programs initdb and postgres must be in PATH or where pg_config says")
	}
	return p.local(ctx, binDir, binDir)
}

// local runs the programs of binDir.
func (p *postgresStarter) local(ctx context.Context, binDir, origin string) (*service, error) {
	p.began = time.Now()
	server, err := pgserver.Start(ctx, pgserver.Config{BinDir: binDir, Settings: p.set, Log: p.say.log()})
	if err != nil {
		return nil, err
	}
	version, err := pgserver.Ping(ctx, server.URL())
	if err != nil {
		return nil, errors.Join(err, server.Stop(context.WithoutCancel(ctx)))
	}
	p.ready(version, origin, place.Address(server.Port()))
	return &service{
		name:   "postgres",
		env:    postgresVariables(server.URL()),
		stop:   server.Stop,
		server: server,
	}, nil
}

func (p *postgresStarter) container(ctx context.Context) (*service, error) {
	image := cmp.Or(os.Getenv("OUTBOX_POSTGRES_IMAGE"), postgresImage)
	p.say.step("starting a container of %s", image)
	p.began = time.Now()
	container, err := p.docker.postgres(ctx, image, p.set, p.say)
	if err != nil {
		return nil, fmt.Errorf("postgres: container of %s: %w", image, err)
	}
	version, err := pgserver.Ping(ctx, container.url)
	if err != nil {
		return nil, errors.Join(err, container.stop(context.WithoutCancel(ctx)))
	}
	p.ready(version, "image "+image, place.Address(container.port))
	return &service{name: "postgres", env: postgresVariables(container.url), stop: container.stop}, nil
}

func (p *postgresStarter) ready(version, origin, address string) {
	p.say.step("%s from %s, %s, ready in %.1f s", version, origin, address, time.Since(p.began).Seconds())
}
