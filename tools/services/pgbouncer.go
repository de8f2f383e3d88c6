package main

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/pgserver"
)

// directEnv is set only where there is a PgBouncer: the address without it.
const directEnv = "OUTBOX_POSTGRES_DIRECT_URL"

// startBounced starts PostgreSQL, and PgBouncer in front of it if that is wanted.
func startBounced(ctx context.Context, o *options, docker *docker, say func(string) teller) ([]*service, error) {
	postgres, err := startPostgres(ctx, o, docker, say("postgres"))
	if postgres == nil || err != nil {
		return nil, err
	}
	if !o.pgbouncer {
		return []*service{postgres}, nil
	}
	bouncer, err := startBouncer(ctx, postgres, say("pgbouncer"))
	if err != nil {
		if postgres.stop != nil {
			err = errors.Join(err, postgres.stop(context.WithoutCancel(ctx)))
		}
		return nil, err
	}
	return []*service{postgres, bouncer}, nil
}

// startBouncer takes the place of postgres in its variables.
func startBouncer(ctx context.Context, postgres *service, say teller) (*service, error) {
	began := time.Now()
	direct := strings.TrimPrefix(postgres.env[0], postgresEnv+"=")
	b, err := pgserver.StartBouncer(ctx, pgserver.BouncerConfig{URL: direct, Log: say.log()})
	if err != nil {
		return nil, err
	}
	postgres.env = []string{directEnv + "=" + direct}
	say.step("transaction mode, %s, ready in %.1f s", place.Address(b.Port()), time.Since(began).Seconds())
	return &service{name: "pgbouncer", env: postgresVariables(b.URL()), stop: b.Stop, server: b}, nil
}
