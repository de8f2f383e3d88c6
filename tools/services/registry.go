package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/outboxgo/outbox/tools/internal/progress"
	"github.com/outboxgo/outbox/tools/registryserver"
)

const registryEnv = "OUTBOX_SCHEMA_REGISTRY_URL"

// startRegistry returns nil if no schema registry is wanted.
func startRegistry(ctx context.Context, o *options, say teller) (*service, error) {
	if !o.registry {
		return nil, nil
	}
	if url := os.Getenv(registryEnv); url != "" {
		ctx, cancel := context.WithTimeout(ctx, givenTimeout)
		defer cancel()
		if err := registryserver.Ping(ctx, url); err != nil {
			return nil, fmt.Errorf("registry: use the address in %s: %w", registryEnv, err)
		}
		say.step("the environment's, %s", url)
		return &service{name: "registry", env: []string{registryEnv + "=" + url}}, nil
	}
	began := time.Now()
	stop := progress.Heartbeat(say.steps(), func() string { return "still starting" })
	server, err := registryserver.Start(ctx, registryserver.Config{Log: say.log(), Progress: say.steps()})
	stop()
	if err != nil {
		return nil, err
	}
	say.step("Apicurio %s, %s, ready in %.1f s", registryserver.Version, server.URL(), time.Since(began).Seconds())
	return &service{name: "registry", env: []string{registryEnv + "=" + server.URL()}, stop: server.Stop, server: server}, nil
}
