package handling

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

// RetryPolicy says how an action on an event that failed is tried again. What is zero is as in the policy below it.
type RetryPolicy struct {
	MaxRetries   int
	RetriesFor   func(error) int
	RetryWait    time.Duration
	MaxRetryWait time.Duration
}

// Over returns the policy with another one below it, which says what this one leaves open.
func (p RetryPolicy) Over(base RetryPolicy) RetryPolicy {
	if p.RetriesFor == nil && p.MaxRetries == 0 {
		p.RetriesFor = base.RetriesFor
	}
	return RetryPolicy{
		MaxRetries: cmp.Or(p.MaxRetries, base.MaxRetries), RetriesFor: p.RetriesFor,
		RetryWait: cmp.Or(p.RetryWait, base.RetryWait), MaxRetryWait: cmp.Or(p.MaxRetryWait, base.MaxRetryWait),
	}
}

// Wait returns the wait after an attempt, from 1, that failed with err, without its random part. It has none, and is
// exact, if the error says how long it is.
func (p RetryPolicy) Wait(attempt int, err error) (d time.Duration, exact bool) {
	if d, ok := WaitOf(err); ok {
		return d, true
	}
	return wait.Exponential(p.RetryWait, max(p.RetryWait, p.MaxRetryWait), attempt-1), false
}

// Next is wait with its random part: a fifth more or less.
func (p RetryPolicy) Next(attempt int, err error) time.Duration {
	const jitter = 5
	const longest = math.MaxInt64 / 2 // so that a fifth more is no overflow
	d, exact := p.Wait(attempt, err)
	if exact {
		return d
	}
	d = min(d, longest)
	return d - d/jitter + rand.N(2*(d/jitter)+1)
}

func (p RetryPolicy) Validate() error {
	return errors.Join(check.NotNegative("RetryWait", p.RetryWait), check.NotNegative("MaxRetryWait", p.MaxRetryWait))
}

// Permanent marks an error that no retry would change.
func Permanent(err error) error { return &permanentError{err} }

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// RetryAfter marks an error after which the event is tried again when d has passed.
func RetryAfter(err error, d time.Duration) error { return &retryAfterError{err, max(0, d)} }

type retryAfterError struct {
	err  error
	wait time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// WaitOf returns the wait that an error says, if it says one.
func WaitOf(err error) (wait time.Duration, ok bool) {
	later, ok := errors.AsType[*retryAfterError](err)
	if !ok {
		return 0, false
	}
	return later.wait, true
}

// Guard calls f and turns a panic into an error. It returns another error for one whose
// methods panic, because these are called outside of it.
func Guard(f func() error) error {
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
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return f()
}

// PanicError is what a panic in a function of the host becomes. The package outbox shows it as its own PanicError.
type PanicError struct {
	Value any
	Stack []byte
}

// Error implements error, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// As has errors.As find it as the PanicError of the package outbox.
func (e *PanicError) As(target any) bool { return check.AsSame(e, target) }

// IsConflict reports whether PostgreSQL has rolled back a transaction that may work the next
// time. A handler may know better, or when.
func IsConflict(err error) bool {
	_, later := WaitOf(err)
	return pg.IsTransient(err) && !IsPermanent(err) && !later
}

// What PostgreSQL rolls back for a deadlock or a serialization failure is repeated: mostly it
// works the next time. One that goes on failing, for 10 times in a second or two, counts as any
// other failure.
const MostConflicts = 10

// ConflictWait returns the wait before a transaction is repeated for the n-th time, from 1.
func ConflictWait(n int) time.Duration {
	const first, longest = 2 * time.Millisecond, time.Second
	d := min(first<<(n-1), longest)
	return d - rand.N(d/2)
}

// ErrorClass names the kind of a handler's error.
func ErrorClass(err error) string {
	var panicked *PanicError
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
	case IsPermanent(err):
		return "permanent"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "handler"
}
