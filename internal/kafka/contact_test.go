package kafka

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// questions are those of a contact, and what they are answered with.
type questions struct {
	mu      sync.Mutex
	began   time.Time
	answer  error
	asked   []int // seconds since began
	reports []error
}

func (q *questions) ask(context.Context, *kgo.Client, bool) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.asked = append(q.asked, int(time.Since(q.began).Seconds()))
	return q.answer
}

func (q *questions) report(_ time.Time, err error, _ ...any) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.reports = append(q.reports, err)
}

// after lets time pass, and returns what was asked and reported meanwhile. The next questions get another answer.
func (q *questions) after(d time.Duration, answer error) (asked []int, reports []error) {
	time.Sleep(d)
	synctest.Wait()
	q.mu.Lock()
	defer q.mu.Unlock()
	asked, reports = q.asked, q.reports
	q.asked, q.reports, q.answer = nil, nil, answer
	return asked, reports
}

// A contact asks at once, then after 1, 2, 4, 5, 5 … s until the first answer, and then each 10 s, unless something
// else has had an answer, or it is told to ask. An outage that sends have begun is ended by a send.
func TestContactAsks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := &questions{began: time.Now(), answer: errors.New("no route")}
		c := NewContact([]kgo.Opt{kgo.SeedBrokers("127.0.0.1:1")}, true, q.report)
		c.ask = q.ask
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			c.Run(ctx)
		}()
		asked, reports := q.after(20*time.Second+time.Millisecond, kerr.SaslAuthenticationFailed)
		require.Equal(t, []int{0, 1, 3, 7, 12, 17}, asked)
		require.Len(t, reports, len(asked))
		require.False(t, c.Answered())

		q.after(5*time.Second, nil)
		require.ErrorIs(t, c.Rejected(), kerr.SaslAuthenticationFailed)
		asked, reports = q.after(30*time.Second, nil)
		require.Equal(t, []int{27, 37, 47}, asked)
		require.True(t, c.Answered())
		require.NoError(t, c.Rejected())
		require.Equal(t, []error{nil, nil, nil}, reports)

		for range 30 {
			asked, _ = q.after(time.Second, nil)
			require.Empty(t, asked, "sends have answers")
			c.Heard(nil)
		}
		c.AskAgain()
		asked, _ = q.after(5*time.Second, nil)
		require.Len(t, asked, 1)
		c.Heard(errors.New("a send has failed"))
		asked, reports = q.after(11*time.Second, nil)
		require.LessOrEqual(t, len(asked), 3)
		require.NotEmpty(t, asked)
		require.Empty(t, reports, "only a send ends the outage")
		c.StopSending()
		_, reports = q.after(11*time.Second, nil)
		require.NotEmpty(t, reports, "this process sends no more")
		cancel()
		<-ended
	})
}
