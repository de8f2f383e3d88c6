package contain

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// play is a callback whose log can be read.
type play struct {
	*Callback
	mu  sync.Mutex
	log bytes.Buffer
}

func newPlay(limits Limits) *play {
	p := &play{}
	p.Callback = NewCallback("Hooks.Sent", slog.New(slog.NewTextHandler(p, nil)), limits)
	return p
}

func (p *play) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.log.Write(b)
}

func (p *play) lines(with string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for line := range strings.Lines(p.log.String()) {
		if strings.Contains(line, with) {
			n++
		}
	}
	return n
}

// call returns the error of a call of f, and how long it took.
func (p *play) call(ctx context.Context, f func() error) (time.Duration, error) {
	start := time.Now()
	err := p.Call(ctx, f)
	return time.Since(start), err
}

func nothing() error { return nil }

type wrapped struct{ err error }

func (w *wrapped) Error() string { return w.err.Error() }

// An error whose methods panic is a panic of the function that returned it.
func TestCallbackReturnsNilPointer(t *testing.T) {
	t.Parallel()
	p := newPlay(HookLimits)
	var panicked *Panic
	require.ErrorAs(t, p.Call(t.Context(), func() error { var err *wrapped; return err }), &panicked)
	require.Equal(t, 1, p.lines("has panicked"))
}

// What a function returns is returned, and nothing is logged.
func TestCallbackReturns(t *testing.T) {
	t.Parallel()
	p, bad := newPlay(HookLimits), errors.New("bad")
	require.NoError(t, p.Call(t.Context(), nothing))
	require.ErrorIs(t, p.Call(t.Context(), func() error { return bad }), bad)
	require.Empty(t, p.log.String())
}

// A panic is an error, logged with its stack, and not again for each of the next calls.
func TestCallbackPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlay(HookLimits)
		for range 5 {
			err := p.Call(t.Context(), func() error { panic("no such metric") })
			require.EqualError(t, err, "panic: no such metric")
		}
		require.Equal(t, 1, p.lines(`level=ERROR msg="outbox: Hooks.Sent has panicked"`), p.log.String())
		require.Contains(t, p.log.String(), "TestCallbackPanics", "the stack")
		require.NoError(t, p.Call(t.Context(), nothing))
		time.Sleep(2 * quietFor)
		require.Error(t, p.Call(t.Context(), func() error { panic("no such metric") }))
		require.Equal(t, 1, p.lines("times=5"), "those that were not logged")

		end := newPlay(HookLimits)
		require.ErrorIs(t, end.Call(t.Context(), func() error { runtime.Goexit(); return nil }), ErrGoexit)
		require.Equal(t, 1, end.lines("level=ERROR"))
	})
}

// A call in the goroutine of the caller that panics is logged in the same way.
func TestCallbackInline(t *testing.T) {
	t.Parallel()
	p, called := newPlay(HookLimits), false
	p.Inline(func() { called = true })
	require.True(t, called)
	require.Empty(t, p.log.String())
	for range 5 {
		p.Inline(func() { panic("no such metric") })
	}
	require.Equal(t, 1, p.lines(`level=ERROR msg="outbox: Hooks.Sent has panicked"`), p.log.String())
	require.Contains(t, p.log.String(), "TestCallbackInline", "the stack")

	end := newPlay(HookLimits)
	end.Alone(runtime.Goexit)
	require.Equal(t, 1, end.lines("level=ERROR"), end.log.String())
}

// A call that does not return is abandoned once. Until it returns no other is made.
func TestCallbackHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, release := newPlay(HookLimits), make(chan struct{})
		hang := func() error { <-release; return nil }
		took, err := p.call(t.Context(), hang)
		require.ErrorIs(t, err, ErrAbandoned)
		require.Equal(t, HookLimits.Patience, took)
		for range 3 {
			took, err = p.call(t.Context(), func() error { panic("it is called") })
			require.ErrorIs(t, err, ErrOmitted)
			require.Zero(t, took)
		}
		require.Equal(t, 1, p.lines(`level=ERROR msg="outbox: Hooks.Sent does not return`), p.log.String())
		close(release)
		synctest.Wait()
		require.Equal(t, 1, p.lines("calls_left_out=3"), p.log.String())
		require.NoError(t, p.Call(t.Context(), nothing))
	})
}

// A function that is always too slow costs the full patience only once.
func TestCallbackIsSlow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlay(HookLimits)
		slow := func(d time.Duration) func() error { return func() error { time.Sleep(d); return nil } }
		for _, patience := range []time.Duration{HookLimits.Patience, shortPatience, shortPatience} {
			took, err := p.call(t.Context(), slow(11*time.Second))
			require.ErrorIs(t, err, ErrAbandoned)
			require.Equal(t, patience, took)
			time.Sleep(time.Minute)
		}
		require.NoError(t, p.Call(t.Context(), slow(shortPatience/2)))
		require.NoError(t, p.Call(t.Context(), slow(time.Second)), "it is quick again")
	})
}

// After the end of the context all calls have the grace together; under the next context
// they have it again.
func TestCallbackAtTheEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlay(HookLimits)
		slow := func() error { time.Sleep(100 * time.Millisecond); return nil }
		ended, end := context.WithCancel(t.Context())
		end()
		start := time.Now()
		for range 100 {
			_ = p.Call(ended, slow)
		}
		require.Equal(t, HookLimits.Grace, time.Since(start))
		time.Sleep(time.Second)
		require.NoError(t, p.Call(t.Context(), nothing))
		require.NoError(t, p.Call(ended, slow))
	})
}

// Without patience, only the context ends the wait.
func TestCallbackWithoutPatience(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := newPlay(Limits{Grace: time.Second})
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		took, err := p.call(ctx, func() error { time.Sleep(2 * time.Hour); return nil })
		require.ErrorIs(t, err, ErrAbandoned)
		require.Equal(t, time.Hour+time.Second, took)
		time.Sleep(time.Hour)
		require.NoError(t, p.Call(t.Context(), func() error { time.Sleep(time.Hour); return nil }), "also after that call")
	})
}

// The panic of a goroutine of a group reaches the goroutine that waits, after all others
// have ended.
func TestGroup(t *testing.T) {
	t.Parallel()
	ctx, end := context.WithCancelCause(t.Context())
	g, ended := NewGroup(func(p *Panic) { end(p) }), false
	bad := errors.New("bad")
	g.Go(func() { <-ctx.Done(); ended = true })
	g.Go(func() { panic(bad) })
	defer func() {
		err, ok := recover().(error)
		require.True(t, ok)
		require.ErrorIs(t, err, bad)
		require.ErrorIs(t, context.Cause(ctx), bad)
		require.Contains(t, err.Error(), "contain_test.go", "where it panicked")
		require.True(t, ended)
	}()
	g.Wait()
}

// Do returns what a function returns, also if that ends its goroutine, and passes a panic on.
func TestDo(t *testing.T) {
	t.Parallel()
	bad := errors.New("bad")
	require.ErrorIs(t, Do(func() error { return bad }), bad)
	deferred := false
	require.ErrorIs(t, Do(func() error {
		defer func() { deferred = true }()
		runtime.Goexit()
		return nil
	}), ErrGoexit)
	require.True(t, deferred)
	defer func() {
		err, ok := recover().(error)
		require.True(t, ok)
		require.ErrorIs(t, err, bad)
	}()
	_ = Do(func() error { panic(bad) })
}

func BenchmarkDo(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		_ = Do(nothing)
	}
}

func BenchmarkCallback(b *testing.B) {
	c := NewCallback("Hooks.Sent", slog.Default(), HookLimits)
	b.ReportAllocs()
	for b.Loop() {
		_ = c.Call(b.Context(), nothing)
	}
}
