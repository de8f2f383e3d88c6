package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox/examples/internal/show"
	"golang.org/x/sync/errgroup"
)

// performance is what happens in a run: the processes work, and each of them is killed.
type performance struct {
	*app
	cfg    config
	others show.Processes
	closed bool // early, by Ctrl-C

	finished bool // all had arrived before the processes were stopped
}

// run sets everything up, lets the processes work, and compares.
func run(ctx context.Context, cfg config, out io.Writer) (*report, error) {
	cfg.schema = "ledger_" + uuid.NewString()[:8]
	a, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer a.db.Close()
	fmt.Fprintf(out, `
A ledger, its auditors and those who look at its balances

  PostgreSQL  schema %s, of this run
  Kafka       %s
  topics      %s
  seed        %d
`, cfg.schema, strings.Join(cfg.Brokers, ", "), cfg.topics, cfg.seed)
	defer show.DropSchema(a.db, a.schema, out)
	if err := a.migrate(ctx, cfg.accounts); err != nil {
		return nil, err
	}
	cfg.began = time.Now().UnixMilli()
	p := &performance{app: a, cfg: cfg}
	defer func() { _ = p.others.Stop() }() // after another error; otherwise there is nothing left to stop
	return p.perform(ctx)
}

// perform starts the processes, kills them, and waits until what was posted has arrived. Ctrl-C closes the counter.
func (p *performance) perform(ctx context.Context) (*report, error) {
	var crashes []string
	if p.cfg.kill {
		crashes = []string{fmt.Sprintf("-crash-after=%d", max(1, p.cfg.deposits/3))}
	}
	err := errors.Join(p.start(relayRole, crashes...), p.start(consumersRole), p.start(tellersRole))
	if err != nil {
		return nil, err
	}
	if p.cfg.kill {
		if err := p.incidents(ctx); err != nil {
			return nil, err
		}
	}
	ended, err := p.others.Await(ctx, tellersRole)
	if err == nil && !ended {
		p.closed = true
		err = p.others.Stop(tellersRole)
	}
	if err != nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx)
	p.finished, err = show.Await(ctx, p.cfg.patience, p.arrived(ctx))
	if err != nil {
		return nil, err
	}
	if err := p.others.Stop(); err != nil {
		return nil, err
	}
	return p.report(ctx)
}

func (p *performance) start(role string, more ...string) error {
	return p.others.Start(role, p.cfg.roleArgs(role, more...)...)
}

// incidents are what may happen to processes on any day.
func (p *performance) incidents(ctx context.Context) error {
	var g errgroup.Group
	g.Go(func() error { return p.others.ReplaceCrashed(ctx, relayRole, p.cfg.roleArgs(relayRole)...) })
	g.Go(func() error {
		if err := p.kill(ctx, tellersRole, sqlPostings, p.cfg.deposits/4); err != nil {
			return err
		}
		return p.kill(ctx, consumersRole, sqlAudited, p.cfg.deposits/2)
	})
	return g.Wait()
}

const (
	sqlPostings = `SELECT count(*) FROM ledger_transaction`
	sqlAudited  = `SELECT count(*) FROM audit_feed`
)

// kill kills a process when a query counts so many rows, and starts another one.
func (p *performance) kill(ctx context.Context, role, sqlCount string, at int) error {
	if err := show.AwaitCount(ctx, p.cfg.patience, p.db, sqlCount, at); err != nil || ctx.Err() != nil {
		return err
	}
	return p.others.Replace(role, p.cfg.roleArgs(role)...)
}

const sqlArrived = `
SELECT (SELECT count(*) FROM ledger_transaction),
       (SELECT count(*) FROM audit_feed),
       (SELECT coalesce(sum(sequence), 0)::bigint FROM portfolio_view),
       (SELECT count(*) FROM outbox_archive),
       (SELECT count(*) FROM outbox_pending)`

// arrived looks whether everybody knows all that was posted, the relay as well, and whether the archive has something
// of it.
func (p *performance) arrived(ctx context.Context) func() (int, bool, error) {
	return func() (progress int, complete bool, err error) {
		var posted, audited, viewed, archived, pending int
		err = p.db.QueryRow(ctx, sqlArrived).Scan(&posted, &audited, &viewed, &archived, &pending)
		complete = audited >= posted && viewed >= posted && pending == 0 && (archived > 0 || posted == 0)
		return audited + viewed + archived - pending, complete, err
	}
}
