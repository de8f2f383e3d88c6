package main

import (
	"context"
	"flag"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/outboxarchive"
	"github.com/outboxgo/outbox/outboxops"
)

// archiveFlags are the schema of outbox_archive, and the time for which it keeps events.
type archiveFlags struct {
	archive string
	months  int
}

func (a *archiveFlags) define(fs *flag.FlagSet) {
	fs.StringVar(&a.archive, "archive", "", "`NAME` schema of outbox_archive (that of --schema)")
	fs.IntVar(&a.months, "months", 0, "`NUMBER` of months to keep (60); -1: all")
}

func (a *archiveFlags) table(ctx context.Context, e *env) (*outboxarchive.Table, error) {
	db, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	schema := a.archive
	if schema == "" {
		schema = e.schema
	}
	return outboxarchive.NewTable(db, outboxarchive.TableConfig{Schema: schema, OutboxSchema: e.schema, KeepMonths: a.months})
}

var archiveStatusCommand = command{
	name:    "archive status",
	summary: "the months of outbox_archive, and which have expired",
	about: `
Lists partitions with sizes and estimated numbers of events. All events of an
expired one are older than --months.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var a archiveFlags
		a.define(fs)
		return a.status
	},
}

func (a *archiveFlags) status(ctx context.Context, e *env) error {
	table, err := a.table(ctx, e)
	if err != nil {
		return err
	}
	partitions, err := table.Partitions(ctx)
	if err != nil {
		return err
	}
	return showPartitions(e, partitions)
}

var archiveCreateCommand = command{
	name:    "archive create",
	summary: "create outbox_archive, and partitions in advance",
	about: `
Run it as the owner of the tables. Creates what is missing, up to three months
ahead. docs/archive.md says what to grant.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var a archiveFlags
		a.define(fs)
		return a.create
	},
}

func (a *archiveFlags) create(ctx context.Context, e *env) error {
	table, err := a.table(ctx, e)
	if err != nil {
		return err
	}
	if err := table.Ensure(ctx); err != nil {
		return err
	}
	partitions, err := table.Partitions(ctx)
	if err != nil {
		return err
	}
	return showPartitions(e, partitions)
}

var archiveExpireCommand = command{
	name:    "archive expire",
	summary: "drop the months of outbox_archive that have expired",
	about: `
Run it as the owner of the tables. Drops partitions whose events are older than
--months.`,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		var x archiveExpire
		x.define(fs)
		fs.BoolVar(&x.yes, "yes", false, yesUsage)
		x.why.define(fs)
		return x.run
	},
}

type archiveExpire struct {
	archiveFlags
	yes bool
	why auditFlags
}

func (x *archiveExpire) run(ctx context.Context, e *env) error {
	var why outboxops.AuditInfo
	if x.yes {
		var err error
		if why, err = x.why.info(e); err != nil {
			return err
		}
	}
	table, err := x.table(ctx, e)
	if err != nil {
		return err
	}
	var expired []outboxarchive.Partition
	if x.yes {
		expired, err = table.Expire(ctx, why)
	} else {
		expired, err = table.Expiring(ctx)
	}
	if err != nil && len(expired) == 0 {
		return err
	}
	if serr := showPartitions(e, expired); err == nil {
		err = serr
	}
	if !e.json && err == nil && len(expired) > 0 {
		if x.yes {
			e.printf("Dropped.\n")
		} else {
			e.printf("Nothing is dropped yet; --yes does it.\n")
		}
	}
	return err
}

// partitionJSON is a partition in the output.
type partitionJSON struct {
	Name    string     `json:"name"`
	From    *time.Time `json:"from"`
	Until   *time.Time `json:"until"`
	Events  int64      `json:"events"`
	Bytes   int64      `json:"bytes"`
	Expired bool       `json:"expired"`
}

func showPartitions(e *env, partitions []outboxarchive.Partition) error {
	if e.json {
		out := make([]partitionJSON, 0, len(partitions))
		for _, p := range partitions {
			out = append(out, partitionJSON{p.Name, optional(p.From), optional(p.Until), p.Events, p.Bytes, p.Expired})
		}
		return e.writeJSON(map[string]any{"partitions": out})
	}
	if len(partitions) == 0 {
		e.printf("No such partitions.\n")
		return nil
	}
	t := table{head: []string{"PARTITION", "FROM", "UNTIL", "EVENTS", "BYTES", "EXPIRED"}, flex: []int{0}}
	for _, p := range partitions {
		events, expired := "-", ""
		if p.Events >= 0 {
			events = fmt.Sprintf("~%s", count(p.Events))
		}
		if p.Expired {
			expired = "yes"
		}
		t.add(p.Name, month(p.From), month(p.Until), events, count(p.Bytes), expired)
	}
	e.writeTable(t)
	return nil
}

// month writes a bound, in UTC; "-" for none.
func month(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.DateOnly)
}
