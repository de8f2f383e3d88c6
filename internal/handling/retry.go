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

// RetryPolicy says how a failed action on an event is tried again. The package outbox documents it as its own
// RetryPolicy. A zero field takes the value of the policy below, see [RetryPolicy.Over].
type RetryPolicy struct {
	MaxRetries   int
	RetriesFor   func(error) int
	RetryWait    time.Duration
	MaxRetryWait time.Duration
	MaxOutage    time.Duration
}

// Over returns the policy, with the zero fields set from base.
func (p RetryPolicy) Over(base RetryPolicy) RetryPolicy {
	if p.RetriesFor == nil && p.MaxRetries == 0 {
		p.RetriesFor = base.RetriesFor
	}
	return RetryPolicy{
		MaxRetries: cmp.Or(p.MaxRetries, base.MaxRetries), RetriesFor: p.RetriesFor,
		RetryWait: cmp.Or(p.RetryWait, base.RetryWait), MaxRetryWait: cmp.Or(p.MaxRetryWait, base.MaxRetryWait),
		MaxOutage: cmp.Or(p.MaxOutage, base.MaxOutage),
	}
}

// Wait returns the wait after a failed attempt, numbered from 1, without its random part. The wait is exact, without a
// random part, if err is one of [RetryAfter].
func (p RetryPolicy) Wait(attempt int, err error) (d time.Duration, exact bool) {
	if d, ok := WaitOf(err); ok {
		return d, true
	}
	return wait.Exponential(p.RetryWait, max(p.RetryWait, p.MaxRetryWait), attempt-1), false
}

// Next returns the wait after a failed attempt with its random part: up to a fifth more or less.
func (p RetryPolicy) Next(attempt int, err error) time.Duration {
	d, exact := p.Wait(attempt, err)
	if exact {
		return d
	}
	return jittered(d)
}

// jittered returns a wait that is up to a fifth shorter or longer.
func jittered(d time.Duration) time.Duration {
	const jitter = 5
	const longest = math.MaxInt64 / 2 // a fifth more does not overflow
	d = min(d, longest)
	return d - d/jitter + rand.N(2*(d/jitter)+1)
}

// NextInOutage returns the wait after a failed attempt that uses up none, of an event that has been failing for a time.
// Waiting as long again doubles the wait, up to [RetryPolicy.mostOutageWait].
func (p RetryPolicy) NextInOutage(failing time.Duration, err error) time.Duration {
	if d, exact := WaitOf(err); exact {
		return d
	}
	return jittered(max(p.RetryWait, min(failing, p.mostOutageWait())))
}

// mostOutageWait returns the longest wait before an event is tried again in an outage.
func (p RetryPolicy) mostOutageWait() time.Duration {
	return max(p.RetryWait, min(p.MaxRetryWait, mostOpenFor))
}

// waitsInOutage reports whether failures of an event may still use up no attempt, given when it failed first.
func (p RetryPolicy) waitsInOutage(first time.Time) bool {
	return p.MaxOutage > 0 && (first.IsZero() || time.Since(first) < p.MaxOutage)
}

// Validate returns an error that names every bad field.
func (p RetryPolicy) Validate() error {
	return errors.Join(check.NotNegative("RetryWait", p.RetryWait), check.NotNegative("MaxRetryWait", p.MaxRetryWait))
}

// Permanent marks an error that a retry cannot change.
func Permanent(err error) error { return &permanentError{err} }

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }

// IsPermanent reports whether an error is marked by [Permanent].
func IsPermanent(err error) bool {
	var p *permanentError
	return errors.As(err, &p)
}

// RetryAfter marks an error with the wait d until the event is tried again.
func RetryAfter(err error, d time.Duration) error { return &retryAfterError{err, max(0, d)} }

type retryAfterError struct {
	err  error
	wait time.Duration
}

func (e *retryAfterError) Error() string { return e.err.Error() }
func (e *retryAfterError) Unwrap() error { return e.err }

// WaitOf returns the wait of an error that is marked by [RetryAfter].
func WaitOf(err error) (wait time.Duration, ok bool) {
	later, ok := errors.AsType[*retryAfterError](err)
	if !ok {
		return 0, false
	}
	return later.wait, true
}

// Unavailable marks an error that says that something is away that this event needs.
func Unavailable(err error) error { return &unavailableError{err} }

type unavailableError struct{ err error }

func (e *unavailableError) Error() string { return e.err.Error() }
func (e *unavailableError) Unwrap() error { return e.err }

// IsUnavailable reports whether an error is marked by [Unavailable].
func IsUnavailable(err error) bool {
	_, is := errors.AsType[*unavailableError](err)
	return is
}

// Guard calls f and returns a panic as a [*PanicError]. If the methods of the error of f panic, it returns an error
// that says so, because callers call these methods.
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

// PanicError is the error of a panic in a function of the host. The package outbox shows it as its own PanicError.
type PanicError struct {
	Value any
	Stack []byte
}

// Error implements error, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// As lets [errors.As] find it as the PanicError of the package outbox.
func (e *PanicError) As(target any) bool { return check.AsSame(e, target) }

// IsConflict reports whether PostgreSQL has rolled back a transaction that may succeed the next time: after a deadlock
// or a serialization failure. It is false if the handler has marked the error by [Permanent], [RetryAfter] or
// [Unavailable].
func IsConflict(err error) bool {
	_, later := WaitOf(err)
	return pg.IsTransient(err) && !IsPermanent(err) && !later && !IsUnavailable(err)
}

// MostConflicts is how many conflicts of a task are repeated, over all its attempts in this process. It takes a second
// or two. The next conflict counts as any other failure.
const MostConflicts = 10

// ConflictWait returns the wait before a transaction is repeated for the n-th time, from 1.
func ConflictWait(n int) time.Duration {
	const first, longest = 2 * time.Millisecond, time.Second
	d := min(first<<(n-1), longest)
	return d - rand.N(d/2)
}

// ErrorClass returns the class of a handler's error, as it is stored and shown: "postgres_23505", for example.
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
	case IsUnavailable(err):
		return "unavailable"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "handler"
}
