package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/outboxgo/outbox/internal/lease"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// standBy waits for the lease. It returns nil when ctx is cancelled first.
func (r *Relay) standBy(ctx context.Context) (*lease.Lease, error) {
	answered := outage.Announce(r.log, "PostgreSQL, or for a connection of its pool", r.rules.Lease, pg.Address(r.leases.DB)...)
	defer answered()
	waited, again := false, false
	for ctx.Err() == nil {
		r.health.Progressed()
		bounded, cancel := context.WithTimeout(ctx, r.rules.Lease)
		l, err := r.acquire(bounded)
		answered()
		if errors.Is(err, lease.ErrHeld) && waited {
			l, err = r.acquireFromGone(bounded)
		}
		cancel()
		pause := r.rules.PollInterval
		switch {
		case err == nil:
			r.postgresOutage.Report(nil)
			r.logTaken(ctx, l, waited)
			return l, nil
		case errors.Is(err, pg.ErrEncoding):
			return nil, err
		case pg.IsUndefined(err):
			return nil, pg.NotMigrated(r.rules.Schema, err)
		case errors.Is(err, lease.ErrHeld):
			r.postgresOutage.Report(nil)
			if again = r.leases.Other.Holder == "" && !again; again { // it was taken or released since it was read
				continue
			}
			if r.leases.Other.Holder == "" { // twice: perhaps a pooler reads it from a standby that is behind
				r.sawNoLease(ctx)
				break
			}
			r.sawLease(ctx)
			if !waited {
				waited = true
				r.logStandby()
			}
			r.reportClock()
		case ctx.Err() == nil:
			r.postgresOutage.Report(err)
			pause = r.postgresOutage.Backoff()
		}
		wait.Sleep(ctx, pause)
	}
	return nil, nil
}

// sawLease records the lease of another process, and what it says of Kafka.
func (r *Relay) sawLease(ctx context.Context) {
	other := &r.leases.Other
	ended := ""
	if to, yes := other.Ended(); yes {
		ended = fmt.Sprintf("relay %s has ended by a cut to %s, nothing of it is sent", r.rules.Name, to)
	}
	r.health.sawLease(other.Lasts, ended)
	r.health.heardElsewhere(other.Kafka)
	answered := r.contact.LastAnswer()
	if other.Unreached && r.kafkaOutage.Current() == nil && time.Since(answered) < saidElsewhereWithin && answered.After(r.saidElsewhere) {
		r.saidElsewhere = answered
		if err := r.leases.SayElsewhere(ctx, answered); err != nil {
			r.log.Debug("outbox: the process that leads is not told that Kafka answers here", "error", err)
		}
	}
}

const (
	// saidElsewhereWithin is how old an answer of Kafka may be that a standby tells a leader which Kafka does not
	// answer. A standby has an answer each 10 s, see [kafka.Contact].
	saidElsewhereWithin = 10 * time.Second
	// waitsEvery is how often it asks whether events wait, while no process leads.
	waitsEvery   = 10 * time.Second
	waitsTimeout = 2 * time.Second
)

// sawNoLease records that no process is seen to lead, and logs it once if events wait.
func (r *Relay) sawNoLease(ctx context.Context) {
	if time.Since(r.askedWaits) > waitsEvery {
		ctx, cancel := context.WithTimeout(ctx, waitsTimeout)
		defer cancel()
		waits, err := tables.Waits(ctx, r.leases.DB, pg.InSchema(tables.SQLPositions, r.rules.Schema), r.rules.Name)
		r.askedWaits = time.Now()
		if err != nil {
			r.log.Debug("outbox: whether events wait is not known", "error", err)
		}
		if waits && !r.waits {
			r.log.Warn("outbox: no process leads, and events wait; the lease is free and cannot be taken")
		}
		r.waits = waits
	}
	r.health.sawNoLease(r.waits)
}

// acquire takes the lease, or returns ErrHeld. The first statement of a Run checks the sessions.
func (r *Relay) acquire(ctx context.Context) (*lease.Lease, error) {
	if !r.checked {
		if err := pg.CheckSessions(ctx, r.leases.DB); err != nil {
			return nil, err
		}
		r.checked = true
	}
	return r.leases.Acquire(ctx)
}

// acquireFromGone takes the lease of a process that is gone, or returns ErrHeld.
func (r *Relay) acquireFromGone(ctx context.Context) (*lease.Lease, error) {
	l, err := r.leases.AcquireFromGone(ctx)
	if errors.Is(err, lease.ErrHeld) {
		return nil, err
	}
	r.lockOutage.Report(err)
	if err != nil {
		return nil, lease.ErrHeld
	}
	return l, nil
}

// logStandby logs once what a standby waits for. If the process that leads was killed, and this process is its
// restart, the lease has to expire first.
func (r *Relay) logStandby() {
	other := r.leases.Other
	if to, ended := other.Ended(); ended {
		r.log.Warn("outbox: standing by for a relay that has ended by a cut, nothing of it is sent", "to", to)
		return
	}
	if other.Lasts == 0 {
		r.log.Info("outbox: standing by, another process holds a lease that does not expire", "holder", other.Holder)
		return
	}
	r.log.Info("outbox: standing by, another process holds the lease; if that one is gone, this one takes over within at_most",
		"holder", other.Holder, "at_most", (other.Lasts + r.rules.PollInterval).Round(time.Millisecond))
}

// logBlocked logs who keeps the row of an expired lease locked.
func (r *Relay) logBlocked(h pg.Holder, err error) {
	switch {
	case err != nil:
		r.log.Debug("outbox: who keeps the lease locked is not known", "error", err)
	case h.Ended:
		r.log.Warn("outbox: a session was ended, because it had an expired lease locked: its process is frozen or cut off", h.Attrs()...)
	default:
		r.log.Warn("outbox: the lease has expired, and cannot be taken while another session has it locked", h.Attrs()...)
	}
}

// logTaken logs that this process leads now: at INFO if it has logged that it stands by.
func (r *Relay) logTaken(ctx context.Context, l *lease.Lease, waited bool) {
	level := slog.LevelDebug
	if waited {
		level = slog.LevelInfo
	}
	r.log.Log(ctx, level, "outbox: lease taken, this process relays", "holder", l.Holder, "epoch", l.Epoch)
	if shared := time.Until(l.ExclusiveAt); shared > 0 {
		r.log.Info("outbox: a process that relayed before was taken for gone, and its lease has not expired: until then nothing that failed is tried again, and nothing dies",
			"for", shared.Round(time.Millisecond))
	}
}

// reportClock logs once that the clock of the database was set back while another process holds the lease. By that
// clock the lease of a process that is gone lasts longer.
func (r *Relay) reportClock() {
	late := r.leases.Other.SetBack > time.Second
	if late && !r.clockReported {
		r.log.Warn("outbox: the clock of PostgreSQL was set back; if the relay that leads is gone with its host, taking over takes so much longer",
			"set_back", r.leases.Other.SetBack.Round(time.Millisecond))
	}
	r.clockReported = late
}
