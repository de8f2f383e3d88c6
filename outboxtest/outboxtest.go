// Package outboxtest helps to test services that use outbox.
//
//   - [RequireRecorded], [RequireNotRecorded] and [Recorded] look at the events
//     that a transaction recorded, before it commits or after; those of database/sql,
//     and so of GORM, ent, Bun, sqlx and sqlc, by [SQL].
//   - [Deliver] and [DeliverTwice] pass an event to the handlers of a consumer,
//     without Kafka.
//   - [Play] passes the events of a transaction to the handlers of a worker, with all retries and
//     without waiting for them. [DrainWorker] runs a worker until all is handled.
//   - [RequireAllRegistered] finds the event types that the registry lacks.
//   - [Kafka] is a broker inside the test, [Drain] relays what is committed, and
//     [Records] reads what arrived.
//
// It is a module of its own, because it links what a service should not: a fake
// broker and Go's package loader.
package outboxtest

import (
	"context"
	"time"
)

// T is what the helpers need of a test: [testing.T], [testing.B] and [testing.F]
// have it, and so have most of their likes. Fatalf reports a failure and ends the
// test.
type T interface {
	Helper()
	Fatalf(format string, args ...any)
}

// CleanupT is what helpers need that leave something behind until the test ends.
type CleanupT interface {
	T
	Cleanup(func())
}

// patience is how long helpers wait under a context without a deadline.
const patience = 30 * time.Second

// patiently gives a context a deadline if it has none.
func patiently(ctx context.Context) (context.Context, context.CancelFunc) {
	if _, ok := ctx.Deadline(); ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, patience)
}

// pause waits a little for what is under way, and reports whether ctx goes on.
func pause(ctx context.Context) bool {
	timer := time.NewTimer(10 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	return ctx.Err() == nil
}
