package wakeup

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/perpool"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/wait"
)

// Interval is how long a process waits after a notification before it sends another one on the same
// channel, while it has more wake-ups than each is notified. A process that receives one polls often for longer than
// that, see [PollSchedule].
const Interval = 250 * time.Millisecond

const (
	// completeMost is up to how many wake-ups of a process in [Interval] are notified each. Their notifications
	// cost less than looking often does.
	completeMost = 100
	// batchWait is how long notifications wait after one, to be sent together.
	batchWait = time.Millisecond
	// farewellTimeout is how long a notification may take that is still wanted at the end.
	farewellTimeout = time.Second
)

// sender sends the notifications of all hubs on a pool, while one of them has a user. It is safe for concurrent use.
type sender struct {
	db      func() *pgxpool.Pool // nil once the pool is unreachable
	more    chan struct{}        // holds a request to read wanted
	failing *outage.Log          // of the first user; only run

	users perpool.Users

	mu     sync.Mutex
	wanted map[string]bool      // channels
	sent   map[string]time.Time // when incomplete ones were, by channel, within the last Interval
	since  time.Time            // the beginning of the Interval in which these are counted:
	wakes  int                  // that have been asked for
	rest   int                  // notifications that may still be complete
	asked  map[string]bool      // channels to notify if other processes listen to them
	others map[string]others    // what is known of these, by channel
}

var senders perpool.Registry[*sender]

func senderOf(db *pgxpool.Pool) *sender {
	return senders.Get(db, "", func(db func() *pgxpool.Pool) *sender {
		return &sender{db: db, more: make(chan struct{}, 1), wanted: map[string]bool{}, sent: map[string]time.Time{}, asked: map[string]bool{}, others: map[string]others{}}
	})
}

// want asks for a notification. It never blocks.
func (s *sender) want(channel string) {
	s.mu.Lock()
	known := s.wanted[channel]
	s.wanted[channel] = true
	s.wakes++
	s.mu.Unlock()
	if !known {
		wait.Signal(s.more)
	}
}

// join has notifications sent until done is called.
func (s *sender) join(log *slog.Logger) (done func()) {
	s.users.Add(func(ctx context.Context) { s.run(ctx, log) })
	return s.users.Remove
}

func (s *sender) run(ctx context.Context, log *slog.Logger) {
	if s.failing == nil { // an outage may last for longer than a use
		s.failing = outage.NewLog(log, "waking other processes up")
	}
	for ctx.Err() == nil {
		next := s.look(ctx)
		channels, complete, pause := s.take(time.Now())
		if len(channels) > 0 {
			pause = batchWait
			if !s.notify(ctx, complete, channels) {
				s.putBack(channels)
				pause = max(Interval, s.failing.Backoff())
			}
			wait.Sleep(ctx, pause)
			continue
		}
		s.await(ctx, earlier(pause, next))
	}
}

// take returns the channels that are due and whether their notifications are complete, or how long it takes until a
// channel is due; 0 if there is none.
func (s *sender) take(now time.Time) (channels []string, complete bool, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now.Sub(s.since) >= Interval {
		few := s.wakes <= completeMost || now.Sub(s.since) >= 2*Interval
		if s.since, s.wakes, s.rest = now, 0, 0; few {
			s.rest = completeMost
		}
	}
	complete = len(s.wanted) <= s.rest
	for channel, at := range s.sent {
		if now.Sub(at) >= Interval {
			delete(s.sent, channel)
		}
	}
	for channel := range s.wanted {
		if at, sent := s.sent[channel]; sent {
			left := Interval - now.Sub(at)
			if pause == 0 || left < pause {
				pause = left
			}
			continue
		}
		channels = append(channels, channel)
		delete(s.wanted, channel)
		if !complete {
			s.sent[channel] = now
		}
	}
	if complete {
		s.rest -= len(channels)
	}
	return channels, complete, pause
}

// await waits until something may be due. A pause of 0 has no end.
func (s *sender) await(ctx context.Context, pause time.Duration) {
	var due <-chan time.Time
	if pause > 0 {
		timer := time.NewTimer(pause)
		defer timer.Stop()
		due = timer.C
	}
	select {
	case <-s.more:
	case <-due:
	case <-ctx.Done():
	}
}

// notify reports whether the notifications were sent.
func (s *sender) notify(ctx context.Context, complete bool, channels []string) bool {
	db := s.db()
	if db == nil {
		return true
	}
	err := pgsession.Of(db).Notify(ctx, complete, channels...)
	if err == nil || ctx.Err() == nil {
		s.failing.Report(err)
	}
	return err == nil
}

func (s *sender) putBack(channels []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, channel := range channels {
		s.wanted[channel] = true
		delete(s.sent, channel)
	}
}

// farewell sends a notification that is still wanted when its channel has no sender left.
func (s *sender) farewell(channel string, log *slog.Logger) {
	s.mu.Lock()
	wanted := s.wanted[channel] || s.asked[channel]
	delete(s.wanted, channel)
	delete(s.asked, channel)
	s.mu.Unlock()
	db := s.db()
	if !wanted || db == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), farewellTimeout)
	defer cancel()
	if err := pgsession.Of(db).Notify(ctx, false, channel); err != nil {
		log.Warn("outbox: last wake-up of other processes was not sent, they find the events at their next poll", "error", err)
	}
}
