package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/outboxops"
)

var auditCommand = command{
	name: "audit", synopsis: "[ID]", max: 1,
	summary: "what operators did, to what, and why",
	about: `
Shows the newest entries of outbox_audit, or those of one failure (event-17).
OPERATOR is the given name, LOGIN the PostgreSQL role. Actions: retry, edit,
resolve, hold, release, read; pause, resume, rewind, forget, forget-action,
replay; to-kafka, to-postgres, finish-cut, cancel-cut, from-debezium,
begin-relay, to-debezium; start-group; cancel; expire, stop-archive.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var a auditList
		fs.StringVar(&a.operator, "operator", "", "`NAME` who did it")
		fs.StringVar(&a.action, "action", "", "`NAME` an action of those above")
		fs.StringVar(&a.group, "group", "", "`NAME` consumer group")
		fs.Var(&a.since, "since", "`TIME` at or after: 2h (ago), 2006-01-02")
		fs.Var(&a.until, "until", "`TIME` before")
		fs.BoolVar(&a.reads, "reads", false, "also reads of payloads")
		fs.IntVar(&a.limit, "limit", 50, "`NUMBER` of entries, up to 1000 (50)")
		fs.Int64Var(&a.before, "before", 0, "`NUMBER` only entries before this one")
		return a.run
	},
}

type auditList struct {
	operator, action, group string
	since, until            when
	reads                   bool
	limit                   int
	before                  int64
}

func (a *auditList) run(ctx context.Context, e *env) error {
	ids, err := e.ids()
	if err == nil {
		err = checkLimit(a.limit)
	}
	switch {
	case err != nil:
		return err
	case a.before < 0:
		return usagef("--before %d: must not be negative", a.before)
	}
	failures, err := e.failures(ctx)
	if err != nil {
		return err
	}
	var id outboxops.FailureID
	if len(ids) > 0 {
		id = ids[0]
	}
	entries, err := failures.Audit(ctx, id, outboxops.AuditPage{Before: a.before, Limit: min(a.limit+1, 1000), WithoutReads: !a.reads && a.action != "read",
		Operator: a.operator, Action: a.action, Group: a.group, Since: a.since.time(e.dbNow()), Until: a.until.time(e.dbNow())})
	if err != nil {
		return err
	}
	return showAudit(e, entries[:min(len(entries), a.limit)], len(entries) > a.limit)
}

// auditJSON is an entry of the audit in the output.
type auditJSON struct {
	ID       int64     `json:"id"`
	At       time.Time `json:"at"`
	Operator string    `json:"operator"`
	Login    string    `json:"login"`
	Action   string    `json:"action"`
	Reason   string    `json:"reason"`
	Failure  string    `json:"failure,omitempty"`
	Relay    string    `json:"relay,omitempty"`
	Group    string    `json:"group,omitempty"`
	Handler  string    `json:"handler,omitempty"`
	Topic    string    `json:"topic,omitempty"`
	Key      string    `json:"key,omitempty"`
	EventID  string    `json:"event_id,omitempty"`
}

func auditOf(a outboxops.AuditEntry) auditJSON {
	return auditJSON{a.ID, a.At.UTC(), a.Operator, a.Login, a.Action, a.Reason, a.Failure.String(), a.Relay, a.Group, a.Handler, a.Topic, a.Key, a.EventID}
}

func showAudit(e *env, entries []outboxops.AuditEntry, more bool) error {
	if e.json {
		out := make([]auditJSON, 0, len(entries))
		for _, a := range entries {
			out = append(out, auditOf(a))
		}
		return e.writeJSON(map[string]any{"audit": out, "more": more})
	}
	if len(entries) == 0 {
		e.printf("Nothing like that was done.\n")
		return nil
	}
	t := table{head: []string{"NUMBER", "AT", "ACTION", "TO", "OPERATOR", "LOGIN", "REASON"}, flex: []int{3, 4, 5, 6}}
	for _, a := range entries {
		t.add(fmt.Sprint(a.ID), clock(a.At), a.Action, auditObject(a), a.Operator, a.Login, a.Reason)
	}
	e.writeTable(t)
	if more {
		e.printf("There is more: --before %d\n", entries[len(entries)-1].ID)
	}
	return nil
}

// auditObject returns the object of the action.
func auditObject(a outboxops.AuditEntry) string {
	switch {
	case a.Failure != (outboxops.FailureID{}):
		return a.Failure.String()
	case a.Group != "":
		return "group " + a.Group + " " + a.Topic
	case a.Action == "expire":
		return "partition " + a.Key
	case a.Relay != "" && a.Key != "":
		return "key " + a.Key + " of " + a.Topic
	}
	return cmp.Or(a.EventID, a.Relay, a.Topic)
}

// who returns the operator and the role that was logged in.
func who(a outboxops.AuditEntry) string {
	if a.Login == "" {
		return visible(a.Operator)
	}
	return fmt.Sprintf("%s (%s)", visible(a.Operator), visible(a.Login))
}
