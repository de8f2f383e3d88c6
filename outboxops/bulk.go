package outboxops

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
)

// BulkConfig tunes [Failures.RetryAll] and [Failures.ResolveAll].
type BulkConfig struct {
	// DryRun counts and changes nothing.
	DryRun bool
	// Rate bounds the failures changed in a second. Zero means 1,000.
	Rate int
	// Progress is called after each part, with the number done. Nil means none.
	Progress func(done int)
	// Topics receives the number of picked failures by topic. Nil means none.
	Topics map[string]int
	// Handlers receives the number of picked deliveries by group and action. Without a group, a filter picks all.
	// Nil means none.
	Handlers map[FailureHandler]int
	// Seen is a dry run's snapshot, written if empty. Actions leave out failures changed since. Nil means none.
	Seen *string
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
	if cfg.Seen != nil && err == nil {
		err = f.see(ctx, cfg.Seen)
	}
	for _, k := range chosen {
		switch {
		case err != nil:
		case cfg.DryRun:
			done, err = f.countKind(ctx, k, action, filter, cfg, done)
		default:
			done, err = f.changeKind(ctx, k, action, filter, cfg, why, done)
		}
	}
	if err != nil {
		return done, fmt.Errorf("outbox: %s failures: %w", action, orNotMigrated(err))
	}
	return done, nil
}

const sqlSnapshot = `SELECT pg_catalog.pg_current_snapshot()::text`

// see checks a snapshot, or takes one.
func (f *Failures) see(ctx context.Context, snapshot *string) error {
	if *snapshot == "" {
		return f.db.QueryRow(ctx, sqlSnapshot).Scan(snapshot)
	}
	if !tables.IsSnapshot(*snapshot) {
		return fmt.Errorf("field Seen %w: %.40q is no snapshot", outbox.ErrMalformed, *snapshot)
	}
	return nil
}

// eachPart calls do with the failures of a kind that a filter picks, in parts, the oldest first. It leaves out those
// that have changed since a snapshot, unless that is empty.
func (f *Failures) eachPart(ctx context.Context, kind Kind, action string, filter FailureFilter, snapshot string, size int, do func([]picked) error) error {
	for last := int64(0); ; {
		part, err := f.stores[kind].pick(ctx, action, filter, snapshot, last, size)
		if err != nil || len(part) == 0 {
			return err
		}
		last = part[len(part)-1].number
		if err := cmp.Or(do(part), ctx.Err()); err != nil || len(part) < size {
			return err
		}
	}
}

// countKind counts all failures of a kind that a filter picks. It adds their number to done.
func (f *Failures) countKind(ctx context.Context, kind Kind, action string, filter FailureFilter, cfg BulkConfig, done int) (int, error) {
	err := f.eachPart(ctx, kind, action, filter, cfg.snapshot(), dryRunPart, func(part []picked) error {
		done += len(part)
		cfg.report(done, kind, part)
		return nil
	})
	return done, err
}

// changeKind changes all failures of a kind that a filter picks, in parts. It adds their number to done. Those that
// have not changed since a dry run are read before the first change, which may write the row behind it, too.
func (f *Failures) changeKind(ctx context.Context, kind Kind, action string, filter FailureFilter, cfg BulkConfig, why AuditInfo, done int) (int, error) {
	seen, snapshot := map[int64]bool{}, cfg.snapshot()
	if snapshot != "" {
		if err := f.eachPart(ctx, kind, action, filter, snapshot, dryRunPart, func(part []picked) error {
			for _, p := range part {
				seen[p.number] = true
			}
			return nil
		}); err != nil {
			return done, err
		}
	}
	size := min(cfg.Rate, bulkPart)
	pause := time.Duration(size) * time.Second / time.Duration(cfg.Rate)
	err := f.eachPart(ctx, kind, action, filter, "", size, func(part []picked) error {
		full := len(part) == size
		part = slices.DeleteFunc(part, func(p picked) bool { return snapshot != "" && !seen[p.number] })
		if len(part) == 0 {
			return nil
		}
		changed, err := f.changePart(ctx, kind, action, part, why)
		if err != nil {
			return err
		}
		done += len(changed)
		cfg.report(done, kind, changed)
		if full {
			wait.Sleep(ctx, pause)
		}
		return nil
	})
	return done, err
}

// sqlMine returns those of events $1 and deliveries $2 that this transaction has acted on.
const sqlMine = `
SELECT failed_id FROM {schema}.outbox_audit WHERE failed_id = ANY ($1::bigint[]) AND xmin = pg_catalog.pg_current_xact_id_if_assigned()::xid
 UNION ALL
SELECT delivery_id FROM {schema}.outbox_audit WHERE delivery_id = ANY ($2::bigint[]) AND xmin = pg_catalog.pg_current_xact_id_if_assigned()::xid`

// changePart changes picked failures in a transaction, and returns those that it has changed: the statement leaves out
// failures that an action is not possible with any more.
func (f *Failures) changePart(ctx context.Context, kind Kind, action string, part []picked, why AuditInfo) (changed []picked, err error) {
	numbers := map[Kind][]int64{kind: numbersOf(part)}
	err = pgx.BeginTxFunc(ctx, f.db, readCommitted, func(tx pgx.Tx) error {
		n, err := f.change(ctx, tx, action, kind, numbers[kind], why)
		if err != nil || n == len(part) {
			changed = part
			return err
		}
		rows, err := tx.Query(ctx, f.sqlMine, numbers[KindEvent], numbers[KindDelivery])
		if err != nil {
			return err
		}
		mine, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		changed = slices.DeleteFunc(slices.Clone(part), func(p picked) bool { return !slices.Contains(mine, p.number) })
		return err
	})
	return changed, err
}

func numbersOf(part []picked) []int64 {
	numbers := make([]int64, len(part))
	for i, p := range part {
		numbers[i] = p.number
	}
	return numbers
}

// snapshot is empty without Seen.
func (c BulkConfig) snapshot() string {
	if c.Seen == nil {
		return ""
	}
	return *c.Seen
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
