package main

import (
	"context"
	"errors"
	"flag"
	"fmt"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxreplay"
)

var groupStartCommand = command{
	name: "group start", synopsis: "NAME", min: 1, max: 1,
	summary: "begin a new group with the events of an archive",
	about: `
The group handles all events in outbox_archive and outbox, then later ones from
Kafka (--topic) or as workers. Start its processes while the command waits for
them, not before: it rejects a group that has begun. Without --incomplete, it
also stops where events are missing or unreadable. After an interruption, run it
again.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		g := groupStart{flags: fs}
		fs.StringVar(&g.from, "from", "", "`archive` where it begins; required")
		fs.StringVar(&g.topics, "topic", "", "`LIST` all topics of its consumers; none: workers")
		fs.StringVar(&g.archive, "archive", "", "`NAME` schema of outbox_archive (that of --schema)")
		fs.BoolVar(&g.incomplete, "incomplete", false, "begin although events may be missing")
		fs.BoolVar(&g.yes, "yes", false, yesUsage)
		g.why.define(fs)
		return g.run
	},
}

type groupStart struct {
	flags                 *flag.FlagSet // as they were given
	from, topics, archive string
	incomplete, yes       bool
	why                   auditFlags
}

func (g *groupStart) run(ctx context.Context, e *env) error {
	if g.from != "archive" {
		return usagef("--from archive is missing")
	}
	cfg := outboxreplay.StartConfig{Group: e.args[0], Topics: list(g.topics), Incomplete: g.incomplete, DryRun: !g.yes, Schema: e.schema}
	var err error
	if g.yes {
		if cfg.Audit, err = g.why.info(e); err != nil {
			return err
		}
	}
	archive := archiveFlags{archive: g.archive}
	if cfg.Archive, err = archive.table(ctx, e); err != nil {
		return err
	}
	var opts []kgo.Opt
	if len(cfg.Topics) > 0 {
		if opts, err = e.kafkaOpts(); err != nil {
			return err
		}
	}
	ctx, watchdog := e.watchdog(ctx)
	defer watchdog.stop()
	said := ""
	p := e.progress("up to outbox id", 0)
	cfg.Progress = func(r outboxreplay.StartReport) {
		watchdog.reset()
		if r.Waiting != "" && r.Waiting != said {
			p.end()
			fmt.Fprintf(e.stderr, "waiting: %s\n", r.Waiting)
		}
		said = r.Waiting
		p.total = int(r.Last)
		p.show(int(r.Through))
	}
	report, err := outboxreplay.StartGroup(ctx, e.db, opts, cfg)
	p.end()
	switch {
	case errors.Is(err, outboxreplay.ErrIncomplete):
		return fmt.Errorf("%w; --incomplete begins all the same", err)
	case errors.Is(err, outboxarchive.ErrNoTable):
		return fmt.Errorf("%w: outbox archive create makes it, and RetentionConfig.Archive fills it", err)
	case err != nil && report.Last > 0:
		e.toGoOn(e.commandLine("group start "+word(cfg.Group), g.flags, nil))
	}
	if err != nil {
		return withCause(ctx, err)
	}
	return g.show(e, report)
}

func (g *groupStart) show(e *env, r outboxreplay.StartReport) error {
	if e.json {
		failures := []replayFailureJSON{}
		for _, f := range r.Failed {
			failures = append(failures, replayFailureJSON{f.OutboxID, f.EventID, f.Err.Error()})
		}
		return e.writeJSON(map[string]any{"group": e.args[0], "dry_run": !g.yes, "starting": r.Last > 0 && !g.yes, "through": r.Through, "last": r.Last,
			"deliveries": r.Deliveries, "first": r.First, "archived": r.Archived, "kept": r.Kept, "not_read": r.NotRead, "failed": failures})
	}
	for _, f := range r.Failed {
		e.say("left out: " + visible(errorText(f.Err)))
	}
	name := visible(e.args[0])
	switch {
	case g.yes && r.NotRead > 0:
		e.printf("Group %s has all events before the cut but %s, and goes on by itself: %s deliveries made.\n", name, count(r.NotRead), count(r.Deliveries))
	case g.yes:
		e.printf("Group %s has all events before the cut, up to outbox id %s, and goes on by itself: %s deliveries made.\n", name, count(r.Last), count(r.Deliveries))
	case r.Last > 0:
		e.printf("Group %s is starting: it has the events up to outbox id %s of %s; --yes goes on.\n", name, count(r.Through), count(r.Last))
	default:
		e.printf("Group %s is new. The first event has outbox id %s; the archive ends with %s, outbox begins with %s (0: none). Nothing is changed yet; --yes does it.\n",
			name, count(r.First), count(r.Archived), count(r.Kept))
	}
	return nil
}
