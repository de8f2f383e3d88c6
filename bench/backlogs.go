package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/bench/internal/report"
)

const (
	backlogsPatience = 15 * time.Minute // for a relay that does not get ahead
	growthLimit      = 1.1              // times as much time as there are times as many events
)

// backlogs drains a backlog that grows, from its beginning each time. The time may
// grow as the events do, and memory may not.
func (b *bench) backlogs(ctx context.Context) error {
	s, err := b.newStock(ctx, "backlogs")
	if err != nil {
		return err
	}
	runs := make([][]used, len(b.cfg.backlogs))
	for i, n := range b.cfg.backlogs {
		if err := b.fill(ctx, s, n, kind{event: smallEvents.event, perTx: smallEvents.perTx, writers: 3}); err != nil {
			return err
		}
		for again := range b.cfg.longRuns {
			c := contestant{backlogName(n), s, job{Work: "relay"}}
			u, err := b.competeWithin(ctx, backlogsPatience, round{again, b.cfg.longRuns}, c)
			if errors.Is(err, errLate) {
				return b.DropSchema(ctx, s.schema)
			}
			if err != nil {
				return err
			}
			runs[i] = append(runs[i], u)
		}
		b.reportBacklog(i, runs)
	}
	return b.DropSchema(ctx, s.schema)
}

func backlogName(n int) string { return fmt.Sprintf("backlogs/%d", n) }

// reportBacklog reports the i-th backlog, compared with the first one.
func (b *bench) reportBacklog(i int, runs [][]used) {
	first, n := b.cfg.backlogs[0], b.cfg.backlogs[i]
	took := report.Measured(backlogName(n), "s", each(runs[i], used.seconds))
	if i > 0 {
		took = report.Compared(backlogName(n), "s", each(runs[i], used.seconds), backlogName(first), each(runs[0], used.seconds)).
			RatioAtMost(growthLimit * float64(n) / float64(first))
	}
	b.report.Add(took, report.Measured(backlogName(n)+"-heap", "MiB", each(runs[i], used.peak)).ValueAtMost(memoryLimit))
}
