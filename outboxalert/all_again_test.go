package outboxalert_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxalert"
)

// phone is a receiver that notes begins, and ends with a !. Do is what it does before.
type phone struct {
	mu   sync.Mutex
	got  []string
	do   func(ctx context.Context) error
	fail error
}

func (p *phone) Alert(ctx context.Context, a outbox.Alert) error {
	if p.do != nil {
		if err := p.do(ctx); err != nil {
			return err
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail == nil {
		p.got = append(p.got, string(a.Kind)+map[bool]string{true: "!"}[a.Over])
	}
	return p.fail
}

// take returns what has come since the last call.
func (p *phone) take() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	got := strings.Join(p.got, " ")
	p.got = nil
	return got
}

// resolvingPhone also gets ends of what other processes may have begun, which it notes with a ?.
type resolvingPhone struct{ phone }

func (p *resolvingPhone) Resolve(_ context.Context, a outbox.Alert) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail == nil {
		p.got = append(p.got, string(a.Kind)+"?")
	}
	return p.fail
}

var errNoPhone = errors.New("no line today")

// try makes an alert about a breaker at a minute.
func try(minute int, over bool) outbox.Alert {
	return outbox.Alert{Kind: outbox.AlertBreaker, Relay: "default", Over: over, FirstAt: time.Date(2026, 11, 27, 12, minute, 0, 0, time.UTC)}
}

// When an alert is over that only some have got, these get its end, with or without a method Resolve. The next
// occurrence goes to all.
func TestAllForgetsWhatIsOver(t *testing.T) {
	t.Parallel()
	mail, pager, fails := &phone{}, &resolvingPhone{}, &phone{fail: errNoPhone}
	onlyMail := &phone{}
	all := outboxalert.All(mail, pager, outboxalert.Only(onlyMail, outbox.AlertBreaker), fails).(interface {
		outbox.Alerter
		Resolve(ctx context.Context, a outbox.Alert) error
	})
	gets := func(want string) {
		t.Helper()
		for _, got := range []string{mail.take(), pager.take(), onlyMail.take()} {
			require.Equal(t, want, got)
		}
	}
	begin, end := outbox.Alert{Kind: outbox.AlertBreaker, Relay: "default"}, outbox.Alert{Kind: outbox.AlertBreaker, Relay: "default", Over: true}
	for range 2 {
		require.ErrorIs(t, all.Alert(t.Context(), begin), errNoPhone)
		gets("breaker_open")
		require.ErrorIs(t, all.Alert(t.Context(), begin), errNoPhone)
		gets("")
		require.NoError(t, all.Resolve(t.Context(), end))
		gets("breaker_open!")
	}
	require.NoError(t, all.Resolve(t.Context(), end))
	require.Equal(t, "breaker_open?", pager.take(), "what another process may have begun")
	gets("")

	require.ErrorIs(t, all.Alert(t.Context(), begin), errNoPhone)
	gets("breaker_open")
	mail.fail = errNoPhone
	require.ErrorIs(t, all.Resolve(t.Context(), end), errNoPhone)
	require.Equal(t, "breaker_open!", onlyMail.take())
	mail.fail = nil
	require.NoError(t, all.Resolve(t.Context(), end))
	require.Equal(t, "breaker_open!", mail.take(), "which did not get it before")
	require.Empty(t, onlyMail.take())
	require.Empty(t, fails.take())
}

// Those that have an alert get the next one of its name: a new occurrence, or one that is worse.
func TestAllPassesOnTheNextOccurrence(t *testing.T) {
	t.Parallel()
	works, fails := &phone{}, &phone{fail: errNoPhone}
	all := outboxalert.All(works, fails)
	for _, step := range []struct {
		minute int
		over   bool
		want   string
	}{
		{1, false, "breaker_open"}, {1, false, ""}, {2, false, "breaker_open"}, {2, false, ""},
		{3, true, "breaker_open!"}, {3, true, ""}, {4, false, "breaker_open"}, {4, false, ""},
	} {
		require.ErrorIs(t, all.Alert(t.Context(), try(step.minute, step.over)), errNoPhone)
		require.Equal(t, step.want, works.take(), step)
	}
}

// A receiver that hangs, ignores the end of its time, or panics keeps no alert from the others. When it returns it
// gets what it has missed, once.
func TestAllContainsReceivers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		works, hangs := &phone{}, &phone{do: func(context.Context) error { <-release; return nil }}
		panics := &phone{do: func(context.Context) error { panic("no line today") }}
		all := outboxalert.All(works, hangs, panics)
		call := func(a outbox.Alert) (time.Duration, error) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			began := time.Now()
			err := all.Alert(ctx, a)
			return time.Since(began), err
		}
		took, err := call(try(1, false))
		require.Error(t, err)
		require.Less(t, took, 10*time.Second+200*time.Millisecond)
		require.Equal(t, "breaker_open", works.take())
		stale := outbox.Alert{Kind: outbox.AlertStale, Relay: "default"}
		took, err = call(stale)
		require.Error(t, err)
		require.Zero(t, took)
		require.Equal(t, "stale_events", works.take())

		close(release)
		panics.do = nil
		synctest.Wait()
		require.Equal(t, "breaker_open", hangs.take())
		for _, a := range []outbox.Alert{try(1, false), stale} {
			_, err = call(a)
			require.NoError(t, err)
		}
		require.Empty(t, works.take())
		require.Equal(t, "stale_events", hangs.take())
		require.Equal(t, "breaker_open stale_events", panics.take())
	})
}

// A call for an earlier occurrence that returns late does not count as the next one.
func TestAllIgnoresLateSuccess(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		late := &phone{do: func(context.Context) error { <-release; return nil }}
		all := outboxalert.All(late)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		require.Error(t, all.Alert(ctx, try(1, false)))
		require.Error(t, all.Alert(t.Context(), try(2, false)))
		close(release)
		synctest.Wait()
		require.NoError(t, all.Alert(t.Context(), try(2, false)))
		require.Equal(t, "breaker_open breaker_open", late.take())
	})
}
