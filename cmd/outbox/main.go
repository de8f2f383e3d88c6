// Command outbox operates a transactional outbox:
//
//   - It makes the tables and the topics.
//   - It relays events.
//   - It shows the state of relays, and failures.
//   - It retries or resolves failures, and sends dead letters back.
//   - It looks for problems.
//
// `outbox help` lists the commands.
//
// It exits with 0 if all went well, 1 for an error, 2 for wrong usage, and 3 if it was asked for problems
// and found some. A second signal ends it at once, with 128 and its number, unless
// it comes together with the first: GNU timeout sends one to the process and one to its group.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-signals
		cancel()
		const oneSignal = 500 * time.Millisecond
		first := time.Now()
		// The default action would not do for the second: the first process of a container
		// survives it.
		for s := range signals {
			if number, ok := s.(syscall.Signal); ok && time.Since(first) >= oneSignal {
				os.Exit(exitSignal + int(number))
			}
		}
	}()
	os.Exit(run(ctx, os.Args[1:], newEnv()))
}
