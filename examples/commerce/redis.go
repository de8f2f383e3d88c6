package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/redis/go-redis/v9"
)

// startRedis returns the address of a Redis: the given one, or else that of a redis-server
// that it starts, or of a small one in this process where there is no redis-server.
func startRedis(ctx context.Context, given string) (url, what string, stop func(), err error) {
	if given != "" {
		return given, "the one of REDIS_URL", func() {}, nil
	}
	program, err := exec.LookPath("redis-server")
	if err != nil {
		server, err := miniredis.Run()
		if err != nil {
			return "", "", nil, fmt.Errorf("start Redis: %w", err)
		}
		return "redis://" + server.Addr(), "a small one in this process; there is no redis-server here", server.Close, nil
	}
	address, err := freeAddress(ctx)
	if err != nil {
		return "", "", nil, err
	}
	url = "redis://" + address
	stop, err = runRedis(ctx, program, address)
	return url, program, stop, err
}

// untilInputEnds starts a program and ends it when its own input does, hence also when this
// process is killed.
const untilInputEnds = `"$@" </dev/null >&2 & read -r _; kill $!; wait $!`

// runRedis starts a redis-server that keeps nothing on the disk, and waits until it answers.
func runRedis(ctx context.Context, program, address string) (stop func(), err error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "sh", "-c", untilInputEnds, "sh",
		program, "--bind", host, "--port", port, "--save", "", "--appendonly", "no", "--loglevel", "warning")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C in a terminal is for this process alone
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start Redis: %w", err)
	}
	stop = func() {
		_ = stdin.Close()
		_ = cmd.Wait() // by a signal
	}
	if err := awaitRedis(ctx, address); err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

func awaitRedis(ctx context.Context, address string) error {
	client := redis.NewClient(&redis.Options{Addr: address, MaxRetries: -1})
	defer func() { _ = client.Close() }()
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); {
		if client.Ping(ctx).Err() == nil {
			return nil
		}
		if !show.Pause(ctx, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
	return errors.New("start Redis: it does not answer")
}

// freeAddress returns a free address of this machine.
func freeAddress(ctx context.Context) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer func() { _ = listener.Close() }()
	return listener.Addr().String(), nil
}
