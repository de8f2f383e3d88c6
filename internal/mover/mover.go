// Package mover moves delayed events from outbox_delayed to outbox when they are due.
//
// Each process that leads a relay or a group of workers runs a [Mover], and so does outbox events move. The function
// outbox_move_due lets one of them work at a time, because two of them would change the order of a key. Events of a key
// are moved in the order of their due times, and then in that in which they were recorded. Due is what the clock of the
// database says.
//
// A round of a mover has one or more looks, each of which moves up to 1,000 events in a transaction:
//
//   - An event that another transaction has locked, a cancellation for example, blocks its key, and so does one that
//     outbox does not take for a reason that may pass. The next looks of the round pass the key, so other keys are not
//     delayed, however many events of the key are due.
//   - While an old snapshot is open, index entries of moved events stay, and a look from the beginning of the index
//     becomes slow. Then most looks begin at a floor: a time below which the last look has left nothing. A full look
//     follows when 20 times the duration of the last one has passed. It finds events that are due below the floor and
//     were committed late. A look from the floor still moves earlier events of the same keys first.
//
// The floor is in the memory of the mover. Between two rounds the mover sleeps until the next event is due, and at most
// for its poll interval, so an event that another process has recorded meanwhile is late by that interval at most.
package mover

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

// Config is what a mover is made from.
type Config struct {
	DB     *pgxpool.Pool // whose sessions pg.CheckSessions has seen
	Schema string
	// Poll is the longest sleep between two rounds. Values above [MaxPoll] count as that.
	Poll time.Duration
	// Timeout bounds a look.
	Timeout time.Duration
	Moved   func() // called after events were moved, to wake who sends them
	Log     *slog.Logger
	Outages Outages
}

// Outages are what is logged of failures. They last longer than a mover: an outage that costs a process its lease ends
// under the next one.
type Outages struct {
	Move *outage.Log // nothing can be moved
	Keys *outage.Log // the events of some keys cannot be moved, and others are
}

const (
	// MaxPoll bounds the poll interval. An idle poll reads one index entry, and writes nothing.
	MaxPoll = time.Second
	// longRound is how long a round goes on to pass keys that were blocked: a cancellation may have ended meanwhile.
	longRound = time.Second
	// quickLook is the longest look after which the next one is full. After a longer full look, pauseFull times its
	// duration passes until the next one.
	quickLook = 5 * time.Millisecond
	pauseFull = 20
	// pauseLook times the duration of its looks passes after a round, so slow looks use a fifth of a processor at most.
	pauseLook = 4
	// blockedWait is the first wait after a round with blocked keys. It doubles up to the poll interval.
	blockedWait = 50 * time.Millisecond
)

// Mover moves events that are due. It belongs to one goroutine.
type Mover struct {
	cfg Config
	sql string

	quick    time.Duration
	floor    time.Time // no event is due below it, except for those that were committed late
	nextFull time.Time // by the clock of this process
	blocked  int       // rounds in a row with blocked keys
}

// NewOutages returns the outages of the movers of a process.
func NewOutages(log *slog.Logger) Outages {
	return Outages{Move: outage.NewLog(log, "the move of delayed events"), Keys: outage.NewLog(log, "the move of delayed events of some keys")}
}

// report takes the error of a round. If nothing could be moved, nothing is known of single keys.
func (o Outages) report(err error) {
	if errors.Is(err, errProblem) {
		o.Move.Report(nil)
		o.Keys.Report(err)
		return
	}
	if o.Move.Report(err); err == nil {
		o.Keys.Report(nil)
	}
}

// New returns a mover. It does no I/O.
func New(cfg Config) *Mover {
	cfg.Poll = min(cfg.Poll, MaxPoll)
	return &Mover{cfg: cfg, sql: pg.InSchema(sqlMoveDue, cfg.Schema), quick: quickLook}
}

// Run moves events until ctx is cancelled. Outages are logged, and retried. A look that has begun is finished, unless
// held ends.
func (m *Mover) Run(ctx, held context.Context) {
	for ctx.Err() == nil && held.Err() == nil {
		r, err := m.Round(ctx, held)
		if held.Err() != nil {
			return
		}
		if m.cfg.Outages.report(err); err != nil && !errors.Is(err, errProblem) {
			r.Next = m.cfg.Outages.Move.Backoff()
		}
		wait.Await(ctx, held, nil, r.Next)
	}
}

// Result is what a round has done.
type Result struct {
	Moved, Rejected int
	Blocked         int           // keys
	Late            time.Duration // since when the oldest event is due that was not moved
	Next            time.Duration // until the next round
	Busy            bool          // another mover is at work
	More            bool          // more events are due, besides those of blocked keys

	looking time.Duration // the time of the looks at what is due
}

// errProblem wraps an error that outbox_move_due has met while it moved a single event. Other keys are moved all the
// same, so the next round is not put off.
var errProblem = errors.New("events cannot be moved")

// Round moves all events that are due and not blocked, for at most about a second. It begins no look once ctx is
// cancelled. An error may follow after events were moved.
func (m *Mover) Round(ctx, held context.Context) (r Result, err error) {
	defer func() {
		if r.Moved > 0 {
			m.cfg.Moved()
		}
	}()
	began, start := time.Now(), m.floor
	if !began.Before(m.nextFull) {
		start = time.Time{}
	}
	var passed []string
	var blockedAt pgtype.Timestamptz // the first event of the keys in passed
	var problem error
	for {
		looked := time.Now()
		l, err := m.look(held, start, passed)
		if err != nil {
			if start.IsZero() { // what has become due since the floor does not wait for the next one
				m.nextFull = time.Now().Add(pauseFull * time.Since(looked))
			}
			return r, err
		}
		r.add(&l)
		if !l.lowest.Valid {
			r.Busy, r.More, r.Next = true, true, m.cfg.Poll
			return r, nil
		}
		if start.IsZero() {
			m.nextFull = time.Now()
			if l.took > m.quick {
				m.nextFull = m.nextFull.Add(pauseFull * l.took)
			}
		}
		blockedAt = earlier(blockedAt, l.blockedAt)
		start, m.floor = l.lowest.Time, earlier(blockedAt, l.lowest).Time
		passed = append(passed, l.blocked...)
		if l.problem.Valid {
			problem = fmt.Errorf("%w: %s", errProblem, l.problem.String)
		}
		if !l.more || ctx.Err() != nil || time.Since(began) > longRound || l.moved+l.rejected+len(l.blocked) == 0 {
			m.plan(&r, l)
			return r, problem
		}
	}
}

// add adds a look to the result of its round, and logs what outbox has rejected.
func (r *Result) add(l *look) {
	r.Moved, r.Rejected, r.Blocked = r.Moved+l.moved, r.Rejected+l.rejected, r.Blocked+len(l.blocked)
	r.looking += l.took
	r.Late = max(r.Late, l.late)
}

// plan says when the next round is due.
func (m *Mover) plan(r *Result, last look) {
	if r.Rejected > 0 {
		m.cfg.Log.Error("outbox: the table outbox has rejected delayed events, which stay in outbox_delayed with the error", "count", r.Rejected)
	}
	r.Next = m.cfg.Poll
	if last.next.Valid {
		r.Next = min(r.Next, pg.Seconds(last.next.Float64))
	}
	if r.Blocked == 0 {
		m.blocked = 0
	} else {
		r.Next = min(r.Next, wait.Exponential(blockedWait, m.cfg.Poll, m.blocked))
		m.blocked++
	}
	r.Next = max(r.Next, time.Millisecond, pauseLook*r.looking)
	if r.More = last.more; r.More && r.Moved+r.Rejected > 0 {
		r.Next = 0
	}
}

// look is the result of outbox_move_due, which describes it.
type look struct {
	moved, rejected   int
	blocked           []string
	blockedAt, lowest pgtype.Timestamptz
	more              bool
	next              pgtype.Float8
	late, took        time.Duration
	problem           pgtype.Text
}

const sqlMoveDue = `
SELECT moved, rejected, blocked, blocked_at, more, lowest, next_in, late, took, problem
  FROM {schema}.outbox_move_due($1::timestamptz, $2::text[])`

// look looks once for what is due from a time on, or at all if it is zero.
func (m *Mover) look(ctx context.Context, start time.Time, passed []string) (l look, err error) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.Timeout)
	defer cancel()
	if passed == nil {
		passed = []string{} // nil is NULL
	}
	var late, took float64
	err = pg.Query(ctx, m.cfg.DB, "", func(rows pgx.Rows) error {
		_, err := pgx.ForEachRow(rows, []any{&l.moved, &l.rejected, &l.blocked, &l.blockedAt, &l.more, &l.lowest, &l.next, &late, &took, &l.problem},
			func() error { return nil })
		return err
	}, m.sql, pg.OrNull(start), passed)
	l.late, l.took = pg.Seconds(late), pg.Seconds(took)
	return l, err
}

// earlier returns the earlier of two times that may be NULL.
func earlier(a, b pgtype.Timestamptz) pgtype.Timestamptz {
	if !a.Valid || b.Valid && b.Time.Before(a.Time) {
		return b
	}
	return a
}
