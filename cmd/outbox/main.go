// Command outbox looks after a transactional outbox: it makes its tables, shows the state of
// its relays and what failed, retries or resolves that, sends dead letters back, makes
// topics, and says what is wrong. `outbox help` lists the commands.
//
// It exits with 0 if all went well, 1 for an error, 2 for wrong usage, and 3 if it was
// asked for problems and found some.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once
	os.Exit(run(ctx, os.Args[1:], newEnv()))
}
