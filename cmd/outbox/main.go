// Command outbox looks after a transactional outbox: it makes its tables, relays events, shows
// the state of its relays and what failed, retries or resolves that, sends dead letters back,
// makes topics, and says what is wrong. `outbox help` lists the commands.
//
// It exits with 0 if all went well, 1 for an error, 2 for wrong usage, and 3 if it was
// asked for problems and found some. A second signal ends it at once, with 128 and its number.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		cancel()
		// The default action would not do for the second: the first process of a container
		// survives it.
		if s, ok := (<-signals).(syscall.Signal); ok {
			os.Exit(exitSignal + int(s))
		}
	}()
	os.Exit(run(ctx, os.Args[1:], newEnv()))
}
