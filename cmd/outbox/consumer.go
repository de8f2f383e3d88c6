package main

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/outboxgo/outbox/outboxops"
)

// rewindTarget is a flag for a time or an offset.
type rewindTarget struct {
	when
	offset *int64
}

// Set implements flag.Value.
func (r *rewindTarget) Set(text string) error {
	if offset, err := strconv.ParseInt(text, 10, 64); err == nil && offset >= 0 {
		*r = rewindTarget{offset: &offset}
		return nil
	}
	*r = rewindTarget{}
	if r.when.Set(text) != nil {
		return fmt.Errorf("want how long ago (90m, 7d), a time (2006-01-02, 2006-01-02T15:04:05Z) or an offset (1200)")
	}
	return nil
}

var consumerRewindCommand = command{
	name:    "consumer rewind",
	summary: "make a consumer group read records again",
	about: `
Use it after a restore of PostgreSQL that lost what handlers wrote. Stop the
group first. Handlers skip events that are in event_handled, and handle the
others again; those without a transaction get all. It counts both, and never
moves a group forward.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var r consumerRewind
		fs.StringVar(&r.group, "group", "", "`NAME` consumer group; required")
		fs.Var(&r.to, "to", "`TIME` 2h (ago), 2006-01-02, or an offset of one topic; required")
		fs.StringVar(&r.topics, "topic", "", "`LIST` only in these topics")
		fs.BoolVar(&r.yes, "yes", false, yesUsage)
		r.why.define(fs)
		return r.run
	},
}

type consumerRewind struct {
	group, topics string
	to            rewindTarget
	yes           bool
	why           auditFlags
	time          time.Time // of to; zero for an offset
}

func (r *consumerRewind) run(ctx context.Context, e *env) error {
	cfg, err := r.config(e)
	if err != nil {
		return err
	}
	kafka, err := e.kafkaOpts()
	if err != nil {
		return err
	}
	db, err := e.connect(ctx)
	if err != nil {
		return err
	}
	ctx, watchdog := e.watchdog(ctx)
	defer watchdog.stop()
	cfg.Progress = func(int) { watchdog.reset() }
	report, err := outboxops.Rewind(ctx, db, kafka, cfg)
	if err != nil {
		return withCause(ctx, err)
	}
	return r.show(e, report)
}

func (r *consumerRewind) config(e *env) (outboxops.RewindConfig, error) {
	r.time = r.to.time(e.now())
	cfg := outboxops.RewindConfig{Group: r.group, Schema: e.schema, Time: r.time, Offset: r.to.offset, DryRun: !r.yes}
	if r.topics != "" {
		cfg.Topics = strings.Split(r.topics, ",")
	}
	switch {
	case r.group == "":
		return cfg, usagef("--group is missing")
	case cfg.Time.IsZero() && cfg.Offset == nil:
		return cfg, usagef("--to is missing")
	case cfg.Offset != nil && len(cfg.Topics) != 1:
		return cfg, usagef("--to %d: an offset needs one --topic", *cfg.Offset)
	}
	if !r.yes {
		return cfg, nil
	}
	var err error
	cfg.Audit, err = r.why.info(e)
	return cfg, err
}

// rewoundJSON is a partition in the output.
type rewoundJSON struct {
	Topic     string `json:"topic"`
	Partition int32  `json:"partition"`
	From      int64  `json:"from"`
	To        int64  `json:"to"`
	Truncated bool   `json:"truncated"`
}

func (r *consumerRewind) show(e *env, report outboxops.RewindReport) error {
	if e.json {
		partitions := make([]rewoundJSON, 0, len(report.Partitions))
		for _, p := range report.Partitions {
			partitions = append(partitions, rewoundJSON(p))
		}
		return e.writeJSON(map[string]any{"group": r.group, "dry_run": !r.yes, "partitions": partitions, "records": report.Records,
			"noted": report.Noted, "unnoted": report.Unnoted(), "older": report.Older, "unreadable": report.Unreadable,
			"oldest_note": optional(report.OldestNote), "time": optional(r.time)})
	}
	if len(report.Partitions) == 0 {
		e.printf("Group %s is not further than that anywhere.\n", visible(r.group))
		r.showTime(e)
		return nil
	}
	r.showTable(e, report)
	e.printf("%s records: %s noted in event_handled, not repeated; %s not noted, handled", count(report.Records), count(report.Noted), count(report.Unnoted()))
	if report.Older > 0 {
		e.printf("; %s older than the oldest note (%s), handled again", count(report.Older), report.OldestNote.Format(time.RFC3339))
	}
	if report.Unreadable > 0 {
		e.printf("; %s not readable as CloudEvents", count(report.Unreadable))
	}
	e.printf(".\nHandlers without a transaction get all of them again.\n")
	if r.yes {
		e.printf("Done: start the group again.\n")
	} else {
		e.printf("Nothing is changed yet; --yes does it.\n")
		r.showTime(e)
	}
	return nil
}

// showTime prints the absolute time of a dry run with a relative one.
func (r *consumerRewind) showTime(e *env) {
	if !r.yes && r.to.ago > 0 {
		e.printf("to choose the same, use this time: --to %s\n", instant(r.time))
	}
}

func (r *consumerRewind) showTable(e *env, report outboxops.RewindReport) {
	t := table{head: []string{"TOPIC", "PART", "FROM", "TO", "NOTE"}, flex: []int{0}}
	for _, p := range report.Partitions {
		note := ""
		if p.Truncated {
			note = "the first that Kafka has"
		}
		t.add(p.Topic, strconv.Itoa(int(p.Partition)), strconv.FormatInt(p.From, 10), strconv.FormatInt(p.To, 10), note)
	}
	e.writeTable(t)
}
