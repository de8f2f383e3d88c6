// Package wakeup wakes what polls for new events: in this process at once, and in other processes by notifications
// of PostgreSQL.
//
// A wake-up signals the relays and workers of this process. If not all of them lead, or if other processes listen
// too, a notification goes to other processes: after the commit, on a connection of the pool, together with those
// of the pool's other schemas, and none while PostgreSQL's queue of notifications fills up. While this process has
// few wake-ups, see [completeMost], each is notified. Otherwise a notification asks listeners to look often, and is
// sent once in [Interval]. Inside a business transaction a notification would make the commit wait for a lock of
// the whole server. The process that leads listens on the session of package pgsession. All listeners of a schema
// share an advisory lock. So a process finds out whether it is the only one, at most once a second and only after a
// wake-up.
//
// A [PollSchedule] polls every 2 ms for 350 ms after such a notification. A relay probes every millisecond instead,
// and polls when the probe finds something. All relays of a pool that probe at the same time share one statement,
// see [Probes].
//
// A wake-up that is lost costs no event: the next poll finds it.
package wakeup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/perpool"
	"github.com/outboxgo/outbox/internal/pgsession"
	"github.com/outboxgo/outbox/internal/wait"
)

// Hub connects, within a process, what records events in a schema and what polls for them. It is safe for concurrent
// use.
type Hub struct {
	db      func() *pgxpool.Pool // nil once the pool is no longer used
	channel string
	sender  *sender

	users perpool.Users // members and writers

	mu      sync.Mutex
	members map[*Member]bool
	writers int       // whose wake-ups go to other processes in any case
	used    bool      // there has been a user
	first   time.Time // the first wake-up without one
	said    bool      // that there is none
}

// unusedAfter is how long wake-ups come before a hub that has had no user counts as forgotten.
const unusedAfter = 5 * time.Second

var hubs perpool.Registry[*Hub]

// Of returns the hub of a schema in the database of a pool.
func Of(db *pgxpool.Pool, schema string) *Hub {
	sender := senderOf(db)
	return hubs.Get(db, schema, func(db func() *pgxpool.Pool) *Hub {
		return &Hub{db: db, channel: Channel(schema), sender: sender, members: map[*Member]bool{}}
	})
}

// Channel returns the channel of a schema. Names of channels are short, those of schemas need not be.
func Channel(schema string) string {
	sum := sha256.Sum256([]byte(schema))
	const enough = 8
	return "outbox_" + hex.EncodeToString(sum[:enough])
}

// Wake wakes the members in this process. It notifies other processes if one of the members does not lead, and
// otherwise if other processes listen, which it finds out at most once in [aloneFor].
func (h *Hub) Wake() {
	h.mu.Lock()
	others := h.writers > 0 || !h.users.Any()
	for m := range h.members {
		wait.Signal(m.wake)
		others = others || m.ear == nil
	}
	h.mu.Unlock()
	if others {
		h.sender.want(h.channel)
	} else {
		h.sender.ask(h.channel)
	}
}

// Unused reports, at a wake-up and once, that the hub has never had a user: other processes are not notified.
func (h *Hub) Unused() bool { return h.unusedAt(time.Now()) }

func (h *Hub) unusedAt(now time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.used || h.said:
	case h.first.IsZero():
		h.first = now
	case now.Sub(h.first) > unusedAfter:
		h.said = true
		return true
	}
	return false
}

// Member is a relay or a worker that polls for events.
type Member struct {
	hub         *Hub
	wake, heard chan<- struct{}
	log         *slog.Logger

	mu   sync.Mutex
	ear  *pgsession.Ear // nil unless it leads; also under the lock of the hub
	stop func()         // the use of the session
}

// Join has wake signalled by [Hub.Wake], and heard by notifications while the member leads, until the member is closed.
func (h *Hub) Join(wake, heard chan<- struct{}, log *slog.Logger) *Member {
	m := &Member{hub: h, wake: wake, heard: heard, log: log}
	h.mu.Lock()
	h.members[m] = true
	h.mu.Unlock()
	h.use(log)
	return m
}

// Lead says whether the member is the one that polls for events, of all processes. Then it hears notifications, too.
func (m *Member) Lead(leads bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if leads == (m.ear != nil) {
		return
	}
	db := m.hub.db()
	if leads && db == nil {
		return
	}
	var ear *pgsession.Ear
	if leads {
		s := pgsession.Of(db)
		m.stop = s.Use(m.log)
		ear = s.Listen(m.hub.channel, m.heard, m.wake)
	} else {
		m.ear.Close()
		m.stop()
	}
	m.hub.mu.Lock()
	m.ear = ear
	m.hub.mu.Unlock()
}

// Close ends it.
func (m *Member) Close() {
	m.Lead(false)
	m.hub.mu.Lock()
	delete(m.hub.members, m)
	m.hub.mu.Unlock()
	m.hub.users.Remove()
}

// Serve sends notifications for this process until ctx ends, and then one that is still wanted.
func (h *Hub) Serve(ctx context.Context, log *slog.Logger) {
	h.mu.Lock()
	h.writers++
	h.mu.Unlock()
	h.use(log)
	<-ctx.Done()
	h.mu.Lock()
	h.writers--
	h.mu.Unlock()
	h.users.Remove()
}

// use has notifications sent until the user is removed. The log of the first user gets what there is to say.
func (h *Hub) use(log *slog.Logger) {
	h.mu.Lock()
	h.used = true
	h.mu.Unlock()
	h.users.Add(func(ctx context.Context) {
		done := h.sender.join(log)
		<-ctx.Done()
		done()
		h.sender.farewell(h.channel, log)
	})
}
