package command

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
)

// maxOrders is how many orders may wait for a child.
const maxOrders = 2

// Serve is a [Command]'s Child: it reads a job from stdin and does it. What follows on
// stdin are orders. The context ends with stdin, so that a child does not outlive the
// program that started it, however that ends.
func Serve[J, O any](ctx context.Context, name string, stdin io.Reader, stderr io.Writer, work func(ctx context.Context, j J, orders <-chan O) error) (exitCode int) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	input := json.NewDecoder(stdin)
	var j J
	if err := input.Decode(&j); err != nil {
		fmt.Fprintf(stderr, "%s: child: read job: %v\n", name, err)
		return ExitUsage
	}
	orders := make(chan O, maxOrders)
	go func() {
		defer cancel()
		var o O
		for input.Decode(&o) == nil {
			orders <- o
		}
	}()
	if err := work(ctx, j, orders); err != nil {
		fmt.Fprintf(stderr, "%s: child: %v\n", name, err)
		return ExitFailed
	}
	return ExitDone
}
