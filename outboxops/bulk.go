package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/wait"
)

// BulkConfig tunes [Failures.RetryAll] and [Failures.ResolveAll].
type BulkConfig struct {
	// DryRun counts and changes nothing.
	DryRun bool
	// Rate is how many failures are changed in a second, at most. Zero means 1,000.
	Rate int
	// Progress is called after each part, with the number of failures that are done. Nil means none.
	Progress func(done int)
	// Topics receives the number of picked failures by topic. Nil means none.
	Topics map[string]int
	// Handlers receives the number of picked deliveries by group and action. Check it in a dry run: a filter without a
	// group picks the deliveries of all groups. Nil means none.
	Handlers map[FailureHandler]int
}

// FailureHandler is the handler that a delivery is for.
type FailureHandler struct {
	// Group is the consumer group.
	Group string
	// Action is that of the handler. It is empty for an event that no handler of the group could get.
	Action string
}

const (
	defaultBulkRate = 1000
	bulkPart        = 100    // failures in a statement
	dryRunPart      = 10_000 // the same, where they are only counted
)

// RetryAll is [Failures.Retry] for all failures that a filter picks and that can be retried: events
// that are waiting, failed or dead, and dead deliveries. If the filter names [outbox.StatusResolved], it also picks
// resolved deliveries: this undoes a ResolveAll. It returns their number, also together
// with an error. They are changed in parts, the oldest of each kind first, each part in a
// transaction of its own. A failure that fails again meanwhile is not picked twice.
func (f *Failures) RetryAll(ctx context.Context, filter FailureFilter, cfg BulkConfig, why AuditInfo) (int, error) {
	return f.changeAll(ctx, actionRetry, filter, cfg, why)
}

// ResolveAll is [Failures.Resolve] for all failures that a filter picks, but for deliveries that
// are with a worker.
func (f *Failures) ResolveAll(ctx context.Context, filter FailureFilter, cfg BulkConfig, why AuditInfo) (int, error) {
	return f.changeAll(ctx, actionResolve, filter, cfg, why)
}

// onlyPossible returns the wanted statuses that are possible, or all possible ones if none is wanted.
func onlyPossible(wanted, possible []string) []string {
	if len(wanted) == 0 {
		return possible
	}
	statuses := []string{""} // matches nothing, where an empty list matches all
	for _, s := range possible {
		if slices.Contains(wanted, s) {
			statuses = append(statuses, s)
		}
	}
	return statuses
}

func (f *Failures) changeAll(ctx context.Context, action string, filter FailureFilter, cfg BulkConfig, why AuditInfo) (done int, err error) {
	cfg.Rate = cmp.Or(cfg.Rate, defaultBulkRate)
	chosen, err := filter.kinds()
	err = errors.Join(err, check.NotNegative("Rate", cfg.Rate), why.check())
	for _, k := range chosen {
		if err == nil {
			done, err = f.changeKind(ctx, k, action, filter, cfg, why, done)
		}
	}
	if err != nil {
		return done, fmt.Errorf("outbox: %s failures: %w", action, orNotMigrated(err))
	}
	return done, nil
}

// changeKind changes all failures of a kind that a filter picks, in parts. It adds their number to done.
func (f *Failures) changeKind(ctx context.Context, kind Kind, action string, filter FailureFilter, cfg BulkConfig, why AuditInfo, done int) (int, error) {
	part := min(cfg.Rate, bulkPart)
	pause := time.Duration(part) * time.Second / time.Duration(cfg.Rate)
	if cfg.DryRun {
		part = dryRunPart
	}
	store := f.stores[kind]
	for last := int64(0); ; {
		chosen, err := store.pick(ctx, action, filter, last, part)
		if err != nil || len(chosen) == 0 {
			return done, err
		}
		n, numbers := len(chosen), make([]int64, len(chosen))
		for i, p := range chosen {
			numbers[i] = p.number
		}
		if !cfg.DryRun {
			if n, err = f.change(ctx, store.statement(action), numbers, why); err != nil {
				return done, err
			}
		}
		last, done = numbers[len(numbers)-1], done+n
		cfg.report(done, kind, chosen)
		if len(numbers) < part {
			return done, nil
		}
		if !cfg.DryRun {
			wait.Sleep(ctx, pause)
		}
		if err := ctx.Err(); err != nil {
			return done, err
		}
	}
}

// report reports the number of failures that are done, and what the last part is for.
func (c BulkConfig) report(done int, kind Kind, part []picked) {
	for _, p := range part {
		if c.Topics != nil {
			c.Topics[p.topic]++
		}
		if c.Handlers != nil && kind == KindDelivery {
			c.Handlers[p.handler]++
		}
	}
	if c.Progress != nil {
		c.Progress(done)
	}
}
