package main

import (
	"context"
	"fmt"
	"io"

	"github.com/outboxgo/outbox/examples/internal/show"
	"golang.org/x/sync/errgroup"
)

// workersName is the name of a process that runs the workers.
func workersName(n int) string { return fmt.Sprintf("workers %d", n+1) }

// work is what such a process does: it runs the workers until its input ends.
func (a *app) work(ctx context.Context, stdin io.Reader) error {
	workers, err := a.workers()
	if err != nil {
		return err
	}
	ctx, stop := show.UntilEnd(ctx, stdin)
	defer stop()
	a.running = workers
	g, ctx := errgroup.WithContext(ctx)
	for _, w := range workers {
		g.Go(func() error { return w.Run(ctx) })
	}
	return g.Wait()
}

// wake has the workers of this process look now for what was committed.
func (a *app) wake() {
	for _, w := range a.running {
		w.Waker().Wake()
	}
}
