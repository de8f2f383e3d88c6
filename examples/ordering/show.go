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
	"github.com/outboxgo/outbox/outboxops"
	"golang.org/x/sync/errgroup"
)

// performance is what happens in a run: the processes work, and most of them are killed.
type performance struct {
	*app
	cfg    config
	mails  *mailProvider
	others show.Processes
	closed bool // early, by Ctrl-C

	finished bool // all had arrived before the processes were stopped
}

// run sets everything up, lets the processes work, and compares.
func run(ctx context.Context, cfg config, out io.Writer) (r *report, err error) {
	cfg.schema = "ordering_" + uuid.NewString()[:8]
	a, err := open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer a.db.Close()
	fmt.Fprintf(out, `
A shop whose orders are a saga of four services

  PostgreSQL  schema %s, of this run
  Kafka       %s
  seed        %d
`, cfg.schema, strings.Join(cfg.Brokers, ", "), cfg.seed)
	if !cfg.keep {
		defer show.DropSchema(a.db, a.schema, out)
	}
	publication := ""
	if cfg.debezium {
		publication = a.schema
		if err := a.checkLogical(ctx); err != nil {
			return nil, err
		}
		defer dropPublication(a.db, publication, out)
	}
	if err := a.migrate(ctx, publication, stockFor(cfg, a.source)); err != nil {
		return nil, err
	}
	stopTopics := a.makeTopics()
	defer func() { err = errors.Join(err, stopTopics()) }()
	if cfg.debezium {
		if err := a.awaitDebezium(ctx, out); err != nil {
			return nil, err
		}
	}
	mails, url, closeMails, err := openMailProvider(ctx)
	if err != nil {
		return nil, err
	}
	defer closeMails()
	cfg.mail, cfg.began = url, time.Now().UnixMilli()
	p := &performance{app: a, cfg: cfg, mails: mails}
	defer func() { _ = p.others.Stop() }() // after another error; otherwise there is nothing left to stop
	return p.perform(ctx)
}

// perform starts the processes, kills them, and waits until all orders have ended everywhere. Ctrl-C closes the shop.
func (p *performance) perform(ctx context.Context) (*report, error) {
	var err error
	switch {
	case p.cfg.debezium: // it sends the events
	case p.cfg.kill:
		err = p.start(relayRole, fmt.Sprintf("-crash-after=%d", 4*p.cfg.orders)) // each order has seven events or more
	default:
		err = p.start(relayRole)
	}
	for _, role := range []string{ordersRole, inventoryRole, rewardRole, notificationRole, customersRole} {
		err = errors.Join(err, p.start(role))
	}
	if err != nil {
		return nil, err
	}
	if p.cfg.kill {
		if err := p.incidents(ctx); err != nil {
			return nil, err
		}
	}
	ended, err := p.others.Await(ctx, customersRole)
	if err == nil && !ended {
		p.closed = true
		err = p.others.Stop(customersRole)
	}
	if err != nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx)
	arrived, err := p.arrived(ctx)
	if err != nil {
		return nil, err
	}
	p.finished, err = show.Await(ctx, p.cfg.patience, arrived)
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

const (
	sqlPlaced   = `SELECT count(*) FROM orders`
	sqlAnswered = `SELECT count(*) FROM reservation`
	sqlEnded    = `SELECT count(*) FROM orders WHERE status <> 'CREATED'`
	sqlNotified = `SELECT count(*) FROM notification`
)

// incidents are what may happen to processes on any day.
func (p *performance) incidents(ctx context.Context) error {
	var g errgroup.Group
	if !p.cfg.debezium {
		g.Go(func() error { return p.others.ReplaceCrashed(ctx, relayRole, p.cfg.roleArgs(relayRole)...) })
	}
	g.Go(func() error {
		return errors.Join(
			p.kill(ctx, customersRole, sqlPlaced, p.cfg.orders/5),
			p.kill(ctx, inventoryRole, sqlAnswered, p.cfg.orders/3),
			p.kill(ctx, ordersRole, sqlEnded, p.cfg.orders/2),
			p.kill(ctx, notificationRole, sqlNotified, p.cfg.orders),
		)
	})
	return g.Wait()
}

// kill kills a process when a query counts so many rows, and starts another one.
func (p *performance) kill(ctx context.Context, role, sqlCount string, at int) error {
	if err := show.AwaitCount(ctx, p.cfg.patience, p.db, sqlCount, at); err != nil || ctx.Err() != nil {
		return err
	}
	return p.others.Replace(role, p.cfg.roleArgs(role)...)
}

// sqlArrived counts by what a handler leaves behind: each type of event that is handled has one
// handler with a transaction.
const sqlArrived = `
SELECT (SELECT count(*) FROM orders WHERE status = 'CREATED'),
       (SELECT count(*) FROM outbox),
       (SELECT count(*) FROM outbox WHERE event_type <> ALL($1)),
       (SELECT count(*) FROM event_handled),
       (SELECT count(*) FROM outbox WHERE event_type = $2),
       (SELECT count(*) FROM event_delivery WHERE status <> 'DONE')`

// arrived looks whether all orders have ended, and everybody has handled all events.
func (p *performance) arrived(ctx context.Context) (func() (int, bool, error), error) {
	inspector, err := outboxops.NewInspector(p.db, outboxops.InspectorConfig{Schema: p.schema})
	return func() (progress int, complete bool, err error) {
		var open, recorded, owed, handled, states, waiting int
		if err := p.db.QueryRow(ctx, sqlArrived, unhandled, notificationRequired).Scan(&open, &recorded, &owed, &handled, &states, &waiting); err != nil {
			return 0, false, err
		}
		mails, _ := p.mails.counts()
		progress = owed + handled + mails
		if open > 0 || waiting > 0 || handled < owed || mails < states {
			return progress, false, nil
		}
		if p.cfg.debezium { // only Kafka knows what Debezium has sent
			s, err := p.readKafka(ctx)
			return progress + s.events, s.events >= recorded, err
		}
		relays, err := inspector.Relays(ctx)
		for _, r := range relays {
			waiting += int(r.Pending)
		}
		return progress - waiting, waiting == 0 && len(relays) > 0, err
	}, err
}
