package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// retryPolicy says how an action on an event that failed is tried again. What is zero is as in the policy below it.
type retryPolicy struct {
	MaxRetries   int
	RetriesFor   func(error) int
	RetryWait    time.Duration
	MaxRetryWait time.Duration
}

// over returns the policy with another one below it, which says what this one leaves open.
func (p retryPolicy) over(base retryPolicy) retryPolicy {
	if p.RetriesFor == nil && p.MaxRetries == 0 {
		p.RetriesFor = base.RetriesFor
	}
	return retryPolicy{
		MaxRetries: cmp.Or(p.MaxRetries, base.MaxRetries), RetriesFor: p.RetriesFor,
		RetryWait: cmp.Or(p.RetryWait, base.RetryWait), MaxRetryWait: cmp.Or(p.MaxRetryWait, base.MaxRetryWait),
	}
}

// wait returns the wait after an attempt, from 1, that failed with err, without its random part. It has none, and is
// exact, if the error says how long it is.
func (p retryPolicy) wait(attempt int, err error) (d time.Duration, exact bool) {
	if d, ok := retryAfter(err); ok {
		return d, true
	}
	return wait.Exponential(p.RetryWait, max(p.RetryWait, p.MaxRetryWait), attempt-1), false
}

// next is wait with its random part: a fifth more or less.
func (p retryPolicy) next(attempt int, err error) time.Duration {
	const jitter = 5
	const longest = math.MaxInt64 / 2 // so that a fifth more is no overflow
	d, exact := p.wait(attempt, err)
	if exact {
		return d
	}
	d = min(d, longest)
	return d - d/jitter + rand.N(2*(d/jitter)+1)
}

func (p retryPolicy) validate() error {
	return errors.Join(check.NotNegative("RetryWait", p.RetryWait), check.NotNegative("MaxRetryWait", p.MaxRetryWait))
}

// permanent marks an error that no retry would change.
func permanent(err error) error { return &permanentError{err} }

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

func isPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// retryAfterWait marks an error after which the event is tried again when d has passed.
func retryAfterWait(err error, d time.Duration) error { return &retryAfterError{err, max(0, d)} }

type retryAfterError struct {
	err  error
	wait time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// retryAfter returns the wait that an error says, if it says one.
func retryAfter(err error) (wait time.Duration, ok bool) {
	later, ok := errors.AsType[*retryAfterError](err)
	if !ok {
		return 0, false
	}
	return later.wait, true
}

// guard calls f and turns a panic into an error. It returns another error for one whose
// methods panic, because these are called outside of it.
func guard(f func() error) error {
	err := recovered(f)
	if err == nil {
		return nil
	}
	if panicked := recovered(func() error { contain.CallMethods(err); return nil }); panicked != nil {
		return fmt.Errorf("error of type %T, which may be a nil pointer: %w", err, panicked)
	}
	return err
}

func recovered(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &panicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// panicError is what a panic in a function of the host becomes. The package outbox shows it as its own PanicError.
type panicError struct {
	Value any
	Stack []byte
}

// Error implements error, without the stack.
func (e *panicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// As has errors.As find it as the PanicError of the package outbox.
func (e *panicError) As(target any) bool { return check.AsSame(e, target) }

// isConflict reports whether PostgreSQL has rolled back a transaction that may work the next
// time. A handler may know better, or when.
func isConflict(err error) bool {
	_, later := retryAfter(err)
	return pg.IsTransient(err) && !isPermanent(err) && !later
}

// What PostgreSQL rolls back for a deadlock or a serialization failure is repeated: mostly it
// works the next time. One that goes on failing, for 10 times in a second or two, counts as any
// other failure.
const mostConflicts = 10

// conflictWait returns the wait before a transaction is repeated for the n-th time, from 1.
func conflictWait(n int) time.Duration {
	const first, longest = 2 * time.Millisecond, time.Second
	d := min(first<<(n-1), longest)
	return d - rand.N(d/2)
}

// errorClass names the kind of a handler's error.
func errorClass(err error) string {
	var panicked *panicError
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &panicked):
		return "panic"
	case errors.Is(err, contain.ErrGoexit):
		return "goexit"
	case errors.Is(err, guardtx.ErrEnded):
		return "transaction_ended"
	case errors.As(err, &pgErr):
		return "postgres_" + pgErr.Code
	case isPermanent(err):
		return "permanent"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "handler"
}
