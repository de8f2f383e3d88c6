package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"

	"github.com/outboxgo/outbox/internal/mover"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/outboxops"
)

var delayedCommand = command{
	name:    "events delayed",
	summary: "events that are not due yet, the next ones first",
	about: `
Shows events that wait in outbox_delayed until they are due
(EventOptions.NotBefore). Then a leading relay or worker, or outbox events move,
moves them to outbox.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var l delayedList
		fs.BoolVar(&l.page.Rejected, "rejected", false, "only those that outbox refused, with errors")
		fs.IntVar(&l.page.Limit, "limit", 100, "`NUMBER` of events, up to 1000 (100)")
		return l.run
	},
}

type delayedList struct{ page outboxops.DelayedPage }

// delayedJSON is a delayed event in the output.
type delayedJSON struct {
	EventID       string     `json:"event_id"`
	Type          string     `json:"type"`
	Source        string     `json:"source"`
	AggregateType string     `json:"aggregate_type"`
	AggregateID   string     `json:"aggregate_id"`
	Topic         string     `json:"topic"`
	Key           string     `json:"key"`
	Size          int        `json:"size"`
	DueAt         time.Time  `json:"due_at"`
	OccurredAt    time.Time  `json:"occurred_at"`
	RecordedAt    time.Time  `json:"recorded_at"`
	RejectedAt    *time.Time `json:"rejected_at,omitempty"`
	Rejection     string     `json:"rejection,omitempty"`
}

func delayedOf(d outboxops.DelayedEvent) delayedJSON {
	return delayedJSON{
		EventID: d.EventID, Type: d.Type, Source: d.Source, AggregateType: d.AggregateType, AggregateID: d.AggregateID, Topic: d.Topic, Key: d.Key, Size: d.Size,
		DueAt: d.DueAt.UTC(), OccurredAt: d.OccurredAt.UTC(), RecordedAt: d.RecordedAt.UTC(), RejectedAt: optional(d.RejectedAt), Rejection: d.Rejection,
	}
}

func (l *delayedList) run(ctx context.Context, e *env) error {
	if err := checkLimit(l.page.Limit); err != nil {
		return err
	}
	delayed, err := e.delayed(ctx)
	if err != nil {
		return err
	}
	status, err := delayed.Status(ctx)
	if err != nil {
		return err
	}
	events, err := delayed.List(ctx, l.page)
	if err != nil {
		return err
	}
	if e.json {
		out := make([]delayedJSON, 0, len(events))
		for _, d := range events {
			out = append(out, delayedOf(d))
		}
		return e.writeJSON(map[string]any{"waiting": status.Waiting, "rejected": status.Rejected, "late_seconds": status.Late.Seconds(), "events": out})
	}
	l.show(e, status, events)
	return nil
}

func (l *delayedList) show(e *env, status outboxops.DelayedStatus, events []outboxops.DelayedEvent) {
	t := table{head: []string{"DUE", "EVENT", "AGGREGATE"}, flex: []int{2}}
	if l.page.Rejected {
		t.head[2] = "ERROR"
	}
	for _, d := range events {
		about := d.AggregateType + "/" + d.AggregateID
		if l.page.Rejected {
			about = d.Rejection
		}
		t.add(clock(d.DueAt), d.EventID, about)
	}
	if len(events) > 0 {
		e.writeTable(t)
	}
	text := upTo(status.Waiting).Of("event waits", "events wait")
	if status.Late > 0 {
		text += fmt.Sprintf(", the oldest has been due for %v", status.Late.Round(time.Millisecond))
	}
	if status.Rejected > 0 {
		text += fmt.Sprintf(", %s: --rejected", upTo(status.Rejected).Of("is rejected", "are rejected"))
	}
	e.printf("%s.\n", text)
}

func (e *env) delayed(ctx context.Context) (*outboxops.Delayed, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	return outboxops.NewDelayed(db, outboxops.DelayedConfig{Schema: e.schema})
}

var cancelCommand = command{
	name: "events cancel", synopsis: "EVENT-ID…", min: 1, max: maxIDs,
	summary: "delete events that are not due yet",
	about: `
They are never sent. Events that are in outbox already are neither deleted nor
counted. outbox_audit keeps the payloads.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var why auditFlags
		why.define(fs)
		return func(ctx context.Context, e *env) error { return cancelDelayed(ctx, e, why) }
	},
}

func cancelDelayed(ctx context.Context, e *env, why auditFlags) error {
	var ids []uuid.UUID
	for _, arg := range e.args {
		id, err := uuid.Parse(arg)
		if err != nil {
			return usagef("%q is no id of an event: outbox events delayed shows them", arg)
		}
		ids = append(ids, id)
	}
	info, err := why.info(e)
	if err != nil {
		return err
	}
	delayed, err := e.delayed(ctx)
	if err != nil {
		return err
	}
	n, err := delayed.Cancel(ctx, ids, info)
	if err != nil {
		return err
	}
	if e.json {
		return e.writeJSON(map[string]int{"cancelled": n})
	}
	e.printf("Cancelled %s of %d.\n", plural(int64(n), "event", "events"), len(ids))
	return nil
}

var moveCommand = command{
	name:    "events move",
	summary: "move due events to outbox, where neither relay nor worker runs",
	about: `
Moves events from outbox_delayed to outbox when they are due, until it is
interrupted.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		once := fs.Bool("once", false, "only what is due now; exit with 3 if not all moved")
		return func(ctx context.Context, e *env) error { return move(ctx, e, *once) }
	},
}

// moveTimeout bounds a statement that moves events.
const moveTimeout = 30 * time.Second

func move(ctx context.Context, e *env, once bool) error {
	db, err := e.connect(ctx)
	if err != nil {
		return err
	}
	if err := pg.CheckSessions(ctx, db); err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(masked{e}, nil))
	m := mover.New(mover.Config{
		DB: db, Schema: e.schemaName(), Poll: mover.MaxPoll, Timeout: moveTimeout, Moved: func() {}, Log: log, Outages: mover.NewOutages(log),
	})
	if !once {
		m.Run(ctx, context.WithoutCancel(ctx))
		return nil
	}
	return moveOnce(ctx, e, m)
}

// moveOnce moves what is due, in rounds that go on as long as they move or reject something.
func moveOnce(ctx context.Context, e *env, m *mover.Mover) error {
	var all mover.Result
	for goesOn := true; goesOn; {
		r, err := m.Round(ctx, context.WithoutCancel(ctx))
		goesOn = r.More && r.Moved+r.Rejected > 0 && ctx.Err() == nil
		r.Moved, r.Rejected = r.Moved+all.Moved, r.Rejected+all.Rejected
		if all = r; err != nil {
			return cmp.Or(reportMoved(e, all), err)
		}
	}
	if err := reportMoved(e, all); err != nil {
		return err
	}
	switch {
	case all.More && ctx.Err() != nil:
		return context.Cause(ctx)
	case all.More, all.Blocked > 0, all.Rejected > 0:
		return errProblems
	}
	return nil
}

func reportMoved(e *env, r mover.Result) error {
	if e.json {
		return e.writeJSON(map[string]any{"moved": r.Moved, "rejected": r.Rejected, "blocked_keys": r.Blocked, "busy": r.Busy, "left": r.More || r.Blocked > 0})
	}
	e.printf("Moved %s.\n", plural(int64(r.Moved), "event", "events"))
	if r.Rejected > 0 {
		e.printf("%s rejected: outbox events delayed --rejected\n", plural(int64(r.Rejected), "event was", "events were"))
	}
	if r.Blocked > 0 {
		e.printf("Transactions have locked events of %s, which wait.\n", plural(int64(r.Blocked), "key", "keys"))
	}
	if r.Busy {
		e.printf("Another session moves events, and some are left.\n")
	}
	return nil
}
