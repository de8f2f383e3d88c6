package main

import (
	"context"
	"flag"
	"fmt"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxreplay"
)

var replayCommand = command{
	name:    "replay",
	summary: "send recorded events to Kafka again, from outbox or an archive",
	about: `
Groups skip events that they handled in the last 31 days. Danger: old events
follow newer ones of their keys. Every 5 s it writes the command that continues.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		r := replay{flags: fs}
		r.define(fs)
		return r.run
	},
}

type replay struct {
	flags                  *flag.FlagSet // as they were given
	times                  times
	archive, files         string
	since, until           when
	again                  again
	types, ids, key        string
	of                     aggregate
	after                  int64
	to, group              string
	headers                string
	counted                int // number before they were sent
	rate                   int
	structured, skips, yes bool
	why                    auditFlags
}

func (r *replay) define(fs *flag.FlagSet) {
	fs.StringVar(&r.archive, "archive", "", "`NAME` schema of outbox_archive, to include it")
	fs.StringVar(&r.files, "files", "", "`FOLDER` archive of files, in place of outbox")
	fs.Var(&r.since, "since", "`TIME` recorded at or after: 2h (ago), 2006-01-02")
	fs.Var(&r.until, "until", "`TIME` recorded before")
	fs.StringVar(&r.types, "type", "", "`TYPE,…` only these types")
	fs.StringVar(&r.key, "key", "", "`KEY` of the record")
	fs.Var(&r.of, "aggregate", "`TYPE[/ID]` of the aggregate, Order/42")
	fs.StringVar(&r.ids, "id", "", "`ID,…` only these events")
	fs.Int64Var(&r.after, "after", 0, "`NUMBER` only after this outbox id")
	fs.StringVar(&r.to, "to", "", "`TOPIC` for all events (their own)")
	fs.StringVar(&r.group, "group", "", "`NAME` only this consumer group handles them")
	fs.Var(&r.again, "again", "--group handles all again (=TIME: older): effects twice")
	fs.BoolVar(&r.structured, "structured", false, "structured CloudEvents, not binary")
	fs.StringVar(&r.headers, "headers", "", "`ID[,TRACE]` extra headers for event id and trace id")
	fs.IntVar(&r.rate, "rate", 0, "`NUMBER` of events a second (1000); -1: no limit")
	fs.BoolVar(&r.skips, "skip-unreadable", false, "leave out unreadable events")
	fs.BoolVar(&r.yes, "yes", false, yesUsage)
	r.why.define(fs)
}

func (r *replay) run(ctx context.Context, e *env) error {
	cfg, err := r.config(ctx, e)
	if err != nil {
		return err
	}
	kafka, err := e.kafkaOpts()
	if err != nil {
		return err
	}
	if r.yes {
		e.toGoOn(r.goOn(e, r.after))
	}
	ctx, watchdog := e.watchdog(ctx)
	defer watchdog.stop()
	cfg.DryRun, cfg.Progress = true, func(outboxreplay.Report) { watchdog.reset() }
	report, err := outboxreplay.Run(ctx, e.db, kafka, cfg)
	if err != nil {
		return withCause(ctx, err)
	}
	if r.yes {
		r.counted = report.Sent
		p := e.progress("sent", report.Sent)
		cfg.DryRun, cfg.Progress = false, func(so outboxreplay.Report) {
			watchdog.reset()
			p.showNext(so.Sent, so.Next, func() string { return r.goOn(e, so.Next) })
		}
		report, err = outboxreplay.Run(ctx, e.db, kafka, cfg)
		p.end()
	}
	if err != nil {
		r.counted = 0 // with an error, it is expected that not all were sent
		if r.yes {
			e.toGoOn(r.goOn(e, report.Next))
		}
	}
	if serr := r.show(e, report); err == nil && serr != nil {
		return serr
	}
	switch {
	case err != nil:
		return withCause(ctx, err)
	case report.NotSent > 0:
		return errProblems
	}
	return nil
}

func (r *replay) config(ctx context.Context, e *env) (cfg outboxreplay.Config, err error) {
	cfg = outboxreplay.Config{To: r.to, Group: r.group, Again: r.again.on, Rate: r.rate, SkipUnreadable: r.skips, Schema: e.schema}
	cfg.IDHeader, cfg.TraceHeader, _ = strings.Cut(r.headers, ",")
	if r.structured {
		cfg.Mode = outbox.Structured
	}
	now, err := e.nowFor(ctx, r.since, r.until)
	if err != nil {
		return cfg, err
	}
	r.times = timesOf(r.since, r.until, now)
	cfg.Filter = outboxarchive.Filter{After: r.after, Since: r.times.since, Until: r.times.until, Types: list(r.types),
		EventIDs: list(r.ids), AggregateType: r.of.kind, AggregateID: r.of.id}
	if r.key != "" {
		cfg.Filter.Keys = []string{r.key}
	}
	switch {
	case r.archive != "" && r.files != "":
		return cfg, usagef("--archive and --files: only one of them")
	case r.again.on && r.group == "":
		return cfg, usagef("--again needs --group")
	case r.after != 0 && (r.times.relative || r.again.ago > 0):
		return cfg, needAbsolute("--after", map[string]when{"--since": r.since, "--until": r.until, "--again": r.again.when}, now)
	case r.yes && !r.picks():
		return cfg, usagef("which events? --since 2006-01-02, or other flags")
	case r.yes:
		if cfg.Audit, err = r.why.info(e); err != nil {
			return cfg, err
		}
	}
	if cfg.Source, err = r.source(ctx, e); err != nil {
		return cfg, err
	}
	if r.times.until.IsZero() { // the relay sends events that are recorded from now on
		r.times.until = e.dbNow()
		cfg.Filter.Until = r.times.until
	}
	if r.again.on {
		cfg.AgainBefore, err = r.againBefore(ctx, e)
	}
	return cfg, err
}

// againBefore returns the time before which the group has handled what it is to handle again: by default now, so before
// the first event is sent.
func (r *replay) againBefore(ctx context.Context, e *env) (time.Time, error) {
	if _, err := e.connect(ctx); err != nil {
		return time.Time{}, err
	}
	now := e.dbNow()
	before := now
	if r.again.when != (when{}) {
		before = r.again.time(now)
	}
	if before.After(now) {
		return time.Time{}, usagef("--again=%s: by the clock of PostgreSQL that is in the future", instant(before))
	}
	r.times.again = before.Truncate(time.Microsecond) // as PostgreSQL has it
	return r.times.again, nil
}

// goOn returns the command that sends what is behind an outbox id.
func (r *replay) goOn(e *env, after int64) string {
	replace := map[string]string{"until": instant(r.times.until), "after": fmt.Sprint(after)}
	if !r.times.since.IsZero() {
		replace["since"] = instant(r.times.since)
	}
	if r.again.on {
		replace["again"] = instant(r.times.again)
	}
	return e.commandLine("replay", r.flags, replace)
}

// list splits the value of a flag.
func list(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}

// picks reports whether a flag chooses events.
func (r *replay) picks() bool {
	return r.since != (when{}) || r.until != (when{}) || r.types+r.key+r.ids+r.of.kind != "" || r.after > 0
}

// source connects to the database, which has at least the audit.
func (r *replay) source(ctx context.Context, e *env) (outboxarchive.Source, error) {
	if r.files != "" && !r.yes {
		return outboxarchive.OpenFolder(r.files)
	}
	db, err := e.connect(ctx)
	switch {
	case err != nil:
		return nil, err
	case r.files != "":
		return outboxarchive.OpenFolder(r.files)
	case r.archive != "":
		return outboxarchive.NewTable(db, outboxarchive.TableConfig{Schema: r.archive, OutboxSchema: e.schema})
	}
	return outboxarchive.Recorded(db, e.schema)
}

// replayCountJSON and replayFailureJSON are parts of the output.
type replayCountJSON struct {
	Topic  string    `json:"topic"`
	Type   string    `json:"type"`
	Events int       `json:"events"`
	Bytes  int64     `json:"bytes"`
	First  time.Time `json:"first"`
	Last   time.Time `json:"last"`
}

type replayFailureJSON struct {
	OutboxID int64  `json:"outbox_id"`
	EventID  string `json:"event_id"`
	Error    string `json:"error"`
}

func (r *replay) show(e *env, report outboxreplay.Report) error {
	if e.json {
		counts, failures := []replayCountJSON{}, []replayFailureJSON{}
		for _, c := range report.Counts {
			counts = append(counts, replayCountJSON{c.Topic, c.Type, c.Events, c.Bytes, c.First.UTC(), c.Last.UTC()})
		}
		for _, f := range report.Failed {
			failures = append(failures, replayFailureJSON{f.OutboxID, f.EventID, f.Err.Error()})
		}
		doc := map[string]any{"dry_run": !r.yes, "read": report.Read, "sent": report.Sent, "counts": counts, "older": report.Older,
			"forgotten": report.Forgotten, "not_sent": report.NotSent, "failed": failures, "next": report.Next}
		r.times.addTo(doc)
		if r.yes {
			doc["go_on"] = r.goOn(e, report.Next)
		}
		return e.writeJSON(doc)
	}
	if len(report.Counts) > 0 {
		t := table{head: []string{"TOPIC", "TYPE", "EVENTS", "BYTES", "FIRST", "LAST"}, flex: []int{0, 1}}
		for _, c := range report.Counts {
			t.add(c.Topic, c.Type, count(c.Events), count(c.Bytes), clock(c.First), clock(c.Last))
		}
		e.writeTable(t)
	}
	for _, f := range report.Failed {
		e.say("not sent: " + visible(errorText(f.Err)))
	}
	r.warn(e, report)
	switch {
	case !r.yes && report.Sent > 0:
		e.printf("would send %s, not %s; --yes does it\n", count(report.Sent), count(report.NotSent))
	case !r.yes:
		e.printf("would send 0, not %s\n", count(report.NotSent))
	default:
		e.printf("sent %s, not %s (to go on: %s --after %d)\n", count(report.Sent), count(report.NotSent), r.times.text(), report.Next)
	}
	if !r.yes {
		e.showTimes(times{since: r.times.since, until: r.times.until, again: r.times.again, relative: true})
	}
	return nil
}

// warn says which events are gone, and which groups handle the events again.
func (r *replay) warn(e *env, report outboxreplay.Report) {
	if gone := r.counted - report.Sent - report.NotSent; gone > 0 {
		e.say(fmt.Sprintf("%s of those that were counted are gone: retention has removed them meanwhile. With --archive they are found, if they are archived.", count(gone)))
	}
	switch {
	case report.Sent == 0 && report.Forgotten > 0:
		e.say(fmt.Sprintf("%s notes of group %s are removed, and none of their events is sent. The group handles these events if they come again.", count(report.Forgotten), visible(r.group)))
	case report.Sent == 0:
	case r.again.on:
		e.say(fmt.Sprintf("Group %s handles them again: %s notes removed.", visible(r.group), count(report.Forgotten)))
	case report.Older > 0:
		who := "every group handles"
		if r.group != "" {
			who = "group " + visible(r.group) + " handles"
		}
		e.say(fmt.Sprintf("%s of them are older than notes in event_handled are kept: %s these again.", count(report.Older), who))
	}
}
