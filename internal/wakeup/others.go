package wakeup

import (
	"context"
	"errors"
	"time"

	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/wait"
)

// others is whether other processes listen to a channel, and until when that is taken for granted.
type others struct {
	listen bool
	until  time.Time
}

const (
	// aloneFor is short, because the events of this time wait for it.
	aloneFor = time.Second
	// othersFor may be long: a notification that no process hears costs little.
	othersFor = 10 * time.Second
	// unknownFor is how long it takes until the session is asked again that is not connected yet.
	unknownFor = 100 * time.Millisecond
	// lookTimeout bounds the statement, for which notifications wait.
	lookTimeout = time.Second
)

// ask asks for a notification if other processes listen. It never blocks.
func (s *sender) ask(channel string) {
	s.mu.Lock()
	listen := s.others[channel].listen && time.Now().Before(s.others[channel].until)
	known := listen || s.asked[channel]
	if !listen {
		s.asked[channel] = true
	}
	s.mu.Unlock()
	if listen {
		s.want(channel)
	}
	if !known {
		wait.Signal(s.more)
	}
}

// look finds out for which of the asked channels other processes listen, and wants notifications of those. It returns
// how long it takes until the next one is to be looked for; 0 if there is none.
func (s *sender) look(ctx context.Context) (pause time.Duration) {
	channels, pause := s.takeAsked(time.Now())
	if len(channels) == 0 {
		return pause
	}
	elsewhere, known := s.listened(ctx, channels)
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, channel := range channels {
		if !known {
			s.asked[channel] = true
			s.others[channel] = others{until: now.Add(unknownFor)}
			pause = earlier(pause, unknownFor)
			continue
		}
		s.others[channel] = others{until: now.Add(aloneFor)}
	}
	for _, channel := range elsewhere {
		s.others[channel] = others{listen: true, until: now.Add(othersFor)}
		s.wanted[channel] = true
	}
	return pause
}

// takeAsked returns the channels to look for now, or how long it takes until there is one; 0 if there is none.
func (s *sender) takeAsked(now time.Time) (channels []string, pause time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for channel := range s.asked {
		if left := s.others[channel].until.Sub(now); left > 0 && !s.others[channel].listen {
			pause = earlier(pause, left)
			continue
		}
		channels = append(channels, channel)
		delete(s.asked, channel)
	}
	return channels, pause
}

// listened returns the channels that other processes listen to, if that is known. Behind a pooler it is not, and
// listeners without the pooler may exist. The session reports its outages.
func (s *sender) listened(ctx context.Context, channels []string) (elsewhere []string, known bool) {
	db := s.db()
	if db == nil {
		return nil, true
	}
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	session := pgsession.Of(db)
	elsewhere, err := session.ListenedElsewhere(ctx, channels)
	if errors.Is(err, pgsession.ErrUnavailable) && session.State() == pgsession.Pooled {
		return channels, true
	}
	return elsewhere, err == nil
}

// earlier returns the shorter of two pauses. A pause of 0 has no end.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}
