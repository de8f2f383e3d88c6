package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

var statusCommand = command{
	name:    "status",
	summary: "state of relays and consumer groups, and problems",
	about: `
Shows relays (leader, lease, state, events pending, failed and sent in the last
minute), groups (processes, state, deliveries), open transactions and problems.
STATE is works, an outage, a breaker, or unknown (not reported lately). PENDING
counts events without a delivery yet. MISSED counts events that an action lacks,
because processes of the group without this action have read them.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		s := statusFlags{limits: limits{defaultMaxAge, defaultOpenFor}}
		fs.BoolVar(&s.watch, "watch", false, "repeat until Ctrl-C")
		fs.DurationVar(&s.every, "every", 2*time.Second, "`TIME` between updates of --watch (2s)")
		fs.BoolVar(&s.check, "check", false, "exit with 3 for a problem")
		s.limits.define(fs)
		return s.run
	},
}

func (l *limits) define(fs *flag.FlagSet) {
	fs.DurationVar(&l.maxAge, "max-age", defaultMaxAge, "`TIME` events that wait longer are a problem (5m)")
	fs.DurationVar(&l.openFor, "open-for", defaultOpenFor, "`TIME` transactions open for longer are a problem (1m)")
}

type statusFlags struct {
	watch, check bool
	every        time.Duration
	limits       limits
}

func (s *statusFlags) run(ctx context.Context, e *env) error {
	if s.every < 100*time.Millisecond {
		return usagef("--every %v: at least 100ms", s.every)
	}
	if s.watch && s.check {
		return usagef("--watch and --check do not go together")
	}
	if !s.watch {
		return s.printStatus(ctx, e)
	}
	for ctx.Err() == nil {
		if err := s.printStatus(ctx, e); err != nil && ctx.Err() == nil {
			if !mayPass(err) {
				return err
			}
			e.printError(clock(e.now()) + ": " + errorText(err))
		}
		pause(ctx, s.every)
	}
	return nil
}

// mayPass reports whether --watch goes on after an error: PostgreSQL may answer again, but the command line and the
// tables are to be changed first.
func mayPass(err error) bool {
	var usage *usageError
	return !errors.As(err, &usage) && !errors.Is(err, outbox.ErrNotMigrated) && !pg.IsUndefined(err)
}

// pause waits, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// printStatus reads the state and prints it.
func (s *statusFlags) printStatus(ctx context.Context, e *env) error {
	ctx, cancel := e.step(ctx)
	defer cancel()
	now, err := look(ctx, e, s.limits)
	if err != nil {
		return err
	}
	dead, err := deadDeliveries(ctx, e)
	if err != nil {
		return err
	}
	now.findings = append(now.findings, dead...)
	minutes, err := lastMinute(ctx, e, now.relays)
	if err != nil {
		return err
	}
	switch {
	case e.json && s.watch:
		err = e.writeLine(statusOf(now, minutes, e.databaseName(), e.schemaName()))
	case e.json:
		err = e.writeJSON(statusOf(now, minutes, e.databaseName(), e.schemaName()))
	default:
		s.show(e, now, minutes)
	}
	if err == nil && s.check && areProblems(now.findings) {
		return errProblems
	}
	return err
}

// deadDeliveries reports the dead deliveries of each group, and the keys that they hold.
func deadDeliveries(ctx context.Context, e *env) ([]finding, error) {
	deliveries, err := e.deliveries(ctx)
	if err != nil {
		return nil, err
	}
	counts, err := deliveries.Count(ctx, outboxops.DeliveryFilter{Statuses: []string{outboxops.DeliveryDead}})
	return deadFindings(counts), err
}

// minute is the work of a relay in the last minute.
type minute struct {
	events  int64
	latency time.Duration
}

func lastMinute(ctx context.Context, e *env, relays []outbox.RelayStatus) (map[string]minute, error) {
	inspector, err := e.inspector(ctx)
	if err != nil {
		return nil, err
	}
	all := map[string]minute{}
	for _, r := range relays {
		progress, err := inspector.Progress(ctx, r.Name, e.dbNow().Add(-time.Minute), 10*time.Second)
		if err != nil {
			return nil, err
		}
		var sum minute
		for _, p := range progress {
			sum.events += p.Events
			sum.latency = max(sum.latency, p.Latency)
		}
		all[r.Name] = sum
	}
	return all, nil
}

func (s *statusFlags) show(e *env, now snapshot, minutes map[string]minute) {
	if s.watch && e.outTTY {
		e.printf("\x1b[H\x1b[2J")
	}
	e.printf("%s  %s, schema %s\n\n", clock(now.now), visible(e.databaseName()), visible(e.schemaName()))
	if len(now.relays) == 0 {
		e.printf("No relay has run here yet.\n")
	} else {
		e.writeTable(relayTable(now))
		e.printf("\n")
	}
	for _, r := range now.relays {
		m := minutes[r.Name]
		line := visible(r.Name) + ": in the last minute about " + count(m.events) + " events"
		if m.latency > 0 {
			line += ", " + length(m.latency) + " from recording to Kafka"
		}
		e.printf("%s\n", line)
		if r.CursorTopic != "" {
			e.printf("%s\n", visible(exactlyLine(r)))
		}
	}
	if t := groupTable(now.groups, now.now); len(t.rows) > 0 {
		e.printf("\n")
		e.writeTable(t)
	}
	if len(now.open) > 0 {
		e.printf("\n")
		e.writeTable(transactionTable(now))
	}
	if len(now.findings) > 0 {
		e.printf("\n")
	}
	for _, f := range now.findings {
		e.writeSeverity(f.Severity, f.What)
	}
	if s.watch && !e.outTTY {
		e.printf("\n")
	}
}

// exactlyLine says how far a relay that sends exactly once has come.
func exactlyLine(r outbox.RelayStatus) string {
	confirmed := "no transaction is confirmed yet"
	if r.Transaction > 0 {
		confirmed = "transaction " + count(r.Transaction) + " is confirmed"
	}
	return fmt.Sprintf("%s: exactly once, cursor topic %s, %s", r.Name, r.CursorTopic, confirmed)
}

func relayTable(now snapshot) table {
	t := table{head: []string{"RELAY", "LEADER", "LEASE", "STATE", "SINCE", "PENDING", "OLDEST", "WAIT", "FAIL", "PARK", "DEAD"}, flex: []int{0, 1}}
	for _, r := range now.relays {
		leader, lease := "none", "-"
		if r.Holder != "" {
			leader, lease = r.Holder, length(r.LeaseUntil.Sub(now.now))
		}
		word, since := relayWord(r)
		t.add(r.Name, leader, lease, word, age(since, now.now), short.TallyOf(r.Pending, r.PendingMore).String(), age(r.Oldest, now.now),
			upTo(r.Waiting).String(), upTo(r.Failed).String(), upTo(r.Parked).String(), upTo(r.Dead).String())
	}
	return t
}

func transactionTable(now snapshot) table {
	t := table{head: []string{"OPEN", "PID", "USER", "APPLICATION", "STATE", "RECORDS", "QUERY"}, flex: []int{2, 3, 4, 6}}
	for _, o := range now.open {
		pid, records := count(o.PID), ""
		if o.Prepared != "" {
			pid = o.Prepared
		}
		if o.Recording {
			records = "yes"
		}
		t.add(age(o.Since, now.now), pid, o.User, o.Application, o.State, records, o.Query)
	}
	return t
}

// statusJSON is the document of status.
type statusJSON struct {
	At           time.Time         `json:"at"`
	Database     string            `json:"database"`
	Schema       string            `json:"schema"`
	Relays       []relayJSON       `json:"relays"`
	Groups       []groupStateJSON  `json:"groups"`
	Transactions []transactionJSON `json:"transactions"`
	Stale        []staleJSON       `json:"stale"`
	Problems     []finding         `json:"problems"`
}

// staleJSON is a number of equal events that wait for too long.
type staleJSON struct {
	Relay  string    `json:"relay,omitempty"`
	Group  string    `json:"group,omitempty"`
	Action string    `json:"action,omitempty"`
	Status string    `json:"status"`
	Type   string    `json:"type"`
	Class  string    `json:"class"`
	Events int       `json:"events"`
	More   bool      `json:"more"`
	Oldest time.Time `json:"oldest"`
}

type relayJSON struct {
	Name        string            `json:"name"`
	Leader      string            `json:"leader"`
	Epoch       int64             `json:"epoch"`
	LeaseUntil  *time.Time        `json:"lease_until"`
	MovedAt     *time.Time        `json:"moved_at"`
	CursorTopic string            `json:"cursor_topic"` // empty: it sends at least once
	Transaction int64             `json:"transaction"`
	State       *outage.RelayForm `json:"state"` // null: not known
	Pending     int64             `json:"pending"`
	PendingMore bool              `json:"pending_more"`
	Oldest      *time.Time        `json:"oldest"`
	Waiting     int64             `json:"waiting"`
	Failed      int64             `json:"failed"`
	Parked      int64             `json:"parked"`
	Dead        int64             `json:"dead"`
	ParkedKeys  int64             `json:"parked_keys"`
	HeldKeys    int64             `json:"held_keys"`
	LastMinute  int64             `json:"last_minute_events"`
	Latency     float64           `json:"last_minute_latency_seconds"`
}

type transactionJSON struct {
	PID         int       `json:"pid,omitempty"`
	Prepared    string    `json:"prepared,omitempty"`
	Database    string    `json:"database"`
	User        string    `json:"user"`
	Application string    `json:"application"`
	Client      string    `json:"client"`
	State       string    `json:"state"`
	Since       time.Time `json:"since"`
	Query       string    `json:"query"`
	Recording   bool      `json:"recording"`
	WaitsFor    []int32   `json:"waits_for,omitempty"`
}

func statusOf(s snapshot, minutes map[string]minute, database, schema string) statusJSON {
	out := statusJSON{At: s.now.UTC(), Database: database, Schema: schema, Relays: []relayJSON{}, Groups: groupStatesOf(s.groups), Transactions: []transactionJSON{}, Stale: []staleJSON{},
		Problems: append([]finding{}, s.findings...)}
	for _, r := range s.relays {
		out.Relays = append(out.Relays, relayJSON{
			Name: r.Name, Leader: r.Holder, Epoch: r.Epoch, LeaseUntil: optional(r.LeaseUntil), MovedAt: optional(r.MovedAt), CursorTopic: r.CursorTopic, Transaction: r.Transaction, State: relayStateOf(r),
			Pending: r.Pending, PendingMore: r.PendingMore, Oldest: optional(r.Oldest),
			Waiting: r.Waiting, Failed: r.Failed, Parked: r.Parked, Dead: r.Dead, ParkedKeys: r.ParkedKeys, HeldKeys: r.HeldKeys,
			LastMinute: minutes[r.Name].events, Latency: minutes[r.Name].latency.Seconds(),
		})
	}
	for _, c := range s.stale {
		out.Stale = append(out.Stale, staleJSON{c.Relay, c.Group, c.Action, c.Status, c.Type, c.Class, c.Events, c.More, c.Oldest.UTC()})
	}
	for _, o := range s.open {
		out.Transactions = append(out.Transactions, transactionJSON{o.PID, o.Prepared, o.Database, o.User, o.Application, o.Client,
			o.State, o.Since.UTC(), o.Query, o.Recording, o.WaitsFor})
	}
	return out
}

const severityWidth = 8

// writeSeverity writes a problem next to its severity.
func (e *env) writeSeverity(severity, what string) {
	label := map[string]string{
		severityError: e.paint(red, "ERROR") + "   ", severityWarning: e.paint(yellow, "WARNING") + " ", severityNote: e.paint(dim, "NOTE") + "    ",
	}[severity]
	for _, line := range wrap(visible(what), max(e.width, usualWidth)-severityWidth) {
		e.printf("%s%s\n", label, line)
		label = strings.Repeat(" ", severityWidth)
	}
}
