package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/outboxgo/outbox/bench/internal/command"
)

// childArg is the hidden argument that makes this program do one job.
const childArg = "child"

// childPatience is what a child gets to end by itself before it is killed.
const childPatience = 20 * time.Second

// job is what a child does. Its CPU and its allocations are of nothing else.
type job struct {
	Work     string // a key of works
	Postgres string
	Brokers  []string
	Topic    string
	Schema   string
	Schemas  []string // of tenants
	Relay    string
	Events   int
	Batch    int  // rows in one SELECT, not for the relay
	Prefetch bool // read on while the batch is on its way, not for the relay
	Outage   time.Duration
	Profile  string

	ExactlyOnce string // topic of a relay's cursor; "" for at least once

	// Of consumers alone.
	Group, EventType string
	MaxPoll          int
	InBatch          bool
	NoTx             bool // the handler does nothing

	// Of workers and of River alone.
	After    time.Duration // when measuring begins, after the first call of a handler
	Measured int           // events that are measured; 0 means all
	River    riverTuning

	orders <-chan order // that come while the job is done
}

// works are the jobs. Each prepares, measures and returns what Events events
// have cost, from being ready to the last acknowledgement.
var works = map[string]func(context.Context, job) (used, error){
	"read":     readAlone,
	"produce":  produceAlone,
	"pipe":     pipe,
	"relay":    relayAll,
	"stand by": standBy,
	"outage":   relayThroughOutage,
	"count":    countAll,
	"river":    workRiver,
	"workers":  workBus,
	"tenants":  relayTenants,
	"idle":     idleService,
}

// childMain does the job on its standard input and writes what it cost to its standard output.
func childMain(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) int {
	return command.Serve(ctx, name, stdin, stderr, func(ctx context.Context, j job, orders <-chan order) error {
		j.orders = orders
		u, err := works[j.Work](ctx, j)
		if err != nil {
			return fmt.Errorf("%s: %w", j.Work, err)
		}
		return json.NewEncoder(stdout).Encode(u)
	})
}

// runChild does a job in a process of its own and returns what it cost. Then
// the topic must hold as many records more as there were events to produce. Transactions have markers beside.
func (b *bench) runChild(ctx context.Context, j job, s *stock) (u used, err error) {
	j = b.prepare(j, s)
	before, err := b.Produced(ctx)
	if err != nil {
		return u, err
	}
	if err := spawn(ctx, j, b.stderr, &u, nil); err != nil {
		return u, fmt.Errorf("%s: %w", j.Work, err)
	}
	after, err := b.Produced(ctx)
	made := after - before
	if err == nil && j.Work != "read" && (made < int64(j.Events) || made > int64(j.Events) && j.ExactlyOnce == "") {
		err = fmt.Errorf("%s: %d events made %d records", j.Work, j.Events, made)
	}
	return u, errors.Join(err, b.EmptyTopic(ctx))
}

// prepare completes a job on the events of a stock.
func (b *bench) prepare(j job, s *stock) job {
	j.Topic, j.Schema, j.Events = b.Topic, s.schema, s.events
	return b.connect(j)
}

// connect tells a job where the services are, and where its profile goes.
func (b *bench) connect(j job) job {
	j.Postgres, j.Brokers = b.cfg.Postgres, b.cfg.Brokers
	if b.cfg.profile != "" {
		b.children++
		j.Profile = filepath.Join(b.cfg.profile, fmt.Sprintf("%02d-%s", b.children, j.Work))
	}
	return j
}

// childName is what children call themselves in PostgreSQL.
func childName() string { return fmt.Sprintf("bench-child-%d", os.Getpid()) }

// spawn starts this program again, waits for it and decodes what it writes. What
// it needs orders meanwhile, talk sends them; talk may be nil.
func spawn(ctx context.Context, j job, stderr io.Writer, result any, talk func(send func(order) error) error) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, self, childArg)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = childPatience
	cmd.Env = append(cmd.Environ(), "PGAPPNAME="+childName())
	cmd.Stderr = stderr
	stdin, err := cmd.StdinPipe() // stays open until Wait
	if err != nil {
		return err
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	input := json.NewEncoder(stdin)
	err = input.Encode(j)
	if err == nil && talk != nil {
		err = talk(func(o order) error { return input.Encode(o) })
	}
	if err != nil {
		_ = stdin.Close() // the child ends
		return errors.Join(err, cmd.Wait())
	}
	err = json.NewDecoder(stdout).Decode(result)
	if werr := cmd.Wait(); werr != nil {
		return werr // why there was nothing to decode
	}
	return err
}
