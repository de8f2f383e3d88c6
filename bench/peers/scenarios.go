package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/processors"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/outboxgo/outbox/tools/connectserver"
)

// scenario is one thing to measure, chosen by its name.
type scenario struct {
	name, what string
	run        func(*bench, context.Context) error
}

// scenarios run in this order. They lead back to this list, hence init.
var scenarios []scenario

func init() {
	scenarios = []scenario{
		{"latency", "from commit to arrival at a reader, and the processors' time of a transaction, at each rate", (*bench).latency},
		{"drain", "events per second while a backlog is relayed, from the first arrival to the last", (*bench).drain},
		{"wal", "bytes of WAL that an event costs, with what its relay writes", (*bench).wal},
	}
}

// bench is one run of the program.
type bench struct {
	*services.Services
	cfg    config
	stderr io.Writer
	report *report.Report
	rounds processors.Rounds

	reader    *laps.Reader
	connect   *connectserver.Server // nil until the first instance of Debezium
	next      int                   // number of the next event
	instances int                   // made so far, for their names
	machine   []fact                // where the run takes place
}

// close ends what belongs to the run, and removes what it has made.
func (b *bench) close() error {
	if b.reader != nil {
		b.reader.Client.Close()
	}
	var err error
	if b.connect != nil {
		err = b.connect.Stop(context.Background())
	}
	return errors.Join(err, b.Close())
}

// say tells how far the run is.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.stderr, format+"\n", args...)
}

// chosen returns the peers of this run. Ours is the first.
func (b *bench) chosen() []peer {
	return slices.DeleteFunc(slices.Clone(peers), func(p peer) bool {
		return p.name != ours && !slices.Contains(b.cfg.peers, p.name)
	})
}

func (b *bench) measure(ctx context.Context) error {
	ends, err := b.Ends(ctx)
	if err != nil {
		return err
	}
	if b.reader, err = laps.ReadFrom(b.cfg.Brokers, b.Topic, ends); err != nil {
		return err
	}
	if err := b.warmUp(ctx); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	for _, s := range scenarios {
		if !b.cfg.which.MatchString(s.name) {
			continue
		}
		start := time.Now()
		b.say("%s: %s", s.name, s.what)
		if err := s.run(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		b.say("%s: done in %.0f s", s.name, time.Since(start).Seconds())
	}
	return nil
}

// racer is an instance of a peer that takes turns with others.
type racer struct {
	peer
	instance
}

// open makes an instance of each chosen peer, and returns how to remove them all.
func (b *bench) open(ctx context.Context) (all []*racer, closeAll func() error, err error) {
	closeAll = func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		var errs []error
		for _, r := range all {
			errs = append(errs, r.close(ctx))
		}
		return errors.Join(errs...)
	}
	for _, p := range b.chosen() {
		i, err := p.open(ctx, b)
		if err != nil {
			return nil, nil, errors.Join(fmt.Errorf("open %s: %w", p.name, err), closeAll())
		}
		all = append(all, &racer{p, i})
	}
	return all, closeAll, nil
}

// closeTimeout bounds the removal of instances.
const closeTimeout = time.Minute
