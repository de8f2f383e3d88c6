package contain

import (
	"context"
	"errors"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// A function that is next runs once, while the middleware does, and its error is returned.
func TestNext(t *testing.T) {
	t.Parallel()
	calls, bad := 0, errors.New("bad")
	n := NewNext(func(context.Context) error { calls++; return bad })
	require.ErrorIs(t, n.Call(t.Context()), bad)
	require.NoError(t, n.End(), "that the function fails is no misuse")

	n = NewNext(func(context.Context) error { calls++; return nil })
	require.NoError(t, n.End(), "nor is it not to call the function")
	require.ErrorIs(t, n.Call(t.Context()), errNextLate)
	require.Equal(t, 1, calls)

	n = NewNext(func(context.Context) error { calls++; return nil })
	require.NoError(t, n.Call(t.Context()))
	require.ErrorIs(t, n.Call(t.Context()), errNextTwice)
	require.ErrorIs(t, n.End(), errNextTwice)
	require.Equal(t, 2, calls)
}

// End waits for a function that runs in another goroutine, also if it ends that.
func TestNextInOtherGoroutine(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for name, f := range map[string]func(context.Context) error{
			"returns":            func(context.Context) error { time.Sleep(time.Second); return nil },
			"ends its goroutine": func(context.Context) error { time.Sleep(time.Second); runtime.Goexit(); return nil },
		} {
			n, began := NewNext(f), time.Now()
			go func() { _ = n.Call(t.Context()) }()
			synctest.Wait()
			require.ErrorIs(t, n.End(), errNextEarly, name)
			require.Equal(t, time.Second, time.Since(began), name)
		}
	})
}
