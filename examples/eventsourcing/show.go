package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/show"
	"golang.org/x/sync/errgroup"
)

// scene is what happens in a run: processes of the service are killed, and the read model is
// damaged and rebuilt.
type scene struct {
	*app
	cfg       config
	processes []*show.Process
	tally
	finished bool // all events were projected before the processes were stopped
}

// tally is what was seen of the processes, and done to the read model.
type tally struct {
	mu           sync.Mutex
	acknowledged map[uuid.UUID][]int // versions, by order
	changes      int                 // that were acknowledged
	conflicts    int
	closed       chan struct{} // gets one for each process whose customers have left

	kills, damaged, rebuilds int
}

func newScene(a *app, cfg config) *scene {
	return &scene{
		app: a, cfg: cfg, processes: make([]*show.Process, cfg.processes),
		tally: tally{acknowledged: map[uuid.UUID][]int{}, closed: make(chan struct{}, cfg.processes)},
	}
}

// hear takes in a line that a process of the service has printed.
func (t *tally) hear(line string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	words := strings.Fields(line)
	switch {
	case len(words) == 3 && words[0] == saidAcknowledged:
		id, err := uuid.Parse(words[1])
		version, bad := strconv.Atoi(words[2])
		if err == nil && bad == nil { // a line may be cut off by the kill
			t.acknowledged[id] = append(t.acknowledged[id], version)
			t.changes++
		}
	case line == saidConflict:
		t.conflicts++
	case line == saidClosed:
		t.closed <- struct{}{}
	}
}

// run lets customers in for a while, and then waits until their orders are in the read model.
// Ctrl-C closes the shop early; what was ordered is still compared.
func (s *scene) run(ctx context.Context) (*report, error) {
	defer func() { _ = s.stop() }() // after another error
	for slot := range s.processes {
		if err := s.start(slot); err != nil {
			return nil, err
		}
	}
	open, cancel := context.WithTimeout(ctx, s.cfg.duration)
	defer cancel()
	g, busy := errgroup.WithContext(ctx)
	g.Go(func() error { return s.killProcesses(busy) })
	g.Go(func() error { return s.rebuild(open) })
	g.Go(func() error { return s.damage(busy) })
	if err := g.Wait(); err != nil {
		return nil, err
	}
	<-open.Done()
	ctx = context.WithoutCancel(ctx)
	for _, p := range s.processes {
		if err := p.Say("close"); err != nil {
			return nil, fmt.Errorf("close the shop: %w", err)
		}
	}
	if err := s.awaitAll(ctx); err != nil {
		return nil, err
	}
	if err := s.stop(); err != nil {
		return nil, err
	}
	return s.report(ctx)
}

func (s *scene) start(slot int) (err error) {
	s.processes[slot], err = show.StartProcess(s.cfg.serviceArgs(), nil, s.hear)
	return err
}

func (s *scene) stop() (err error) {
	for _, p := range s.processes {
		if p != nil {
			err = errors.Join(err, p.Stop())
		}
	}
	return err
}

// killProcesses kills processes of the service while they work: what they have committed is
// being published and projected.
func (s *scene) killProcesses(ctx context.Context) error {
	for n := range s.cfg.kills {
		projected, err := s.projected(ctx)
		if err != nil {
			return err
		}
		show.Pause(ctx, s.cfg.duration/time.Duration(s.cfg.kills+2))
		if _, err := s.awaitProjected(ctx, projected); err != nil || ctx.Err() != nil {
			return err
		}
		slot := n % len(s.processes)
		if err := s.processes[slot].Kill(); err != nil {
			return fmt.Errorf("kill a process: %w", err)
		}
		s.kills++
		if err := s.start(slot); err != nil {
			return err
		}
	}
	return nil
}

// rebuild rebuilds the whole read model again and again, while events flow.
func (s *scene) rebuild(ctx context.Context) error {
	for show.Pause(ctx, s.cfg.duration/8) {
		if err := s.projection().RebuildAll(context.WithoutCancel(ctx)); err != nil {
			return fmt.Errorf("rebuild all: %w", err)
		}
		s.rebuilds++
	}
	return nil
}

const (
	sqlSome   = `SELECT id FROM orders ORDER BY random() LIMIT 20`
	sqlDamage = `UPDATE orders SET status = 'LOST', version = 1000 WHERE id = $1`
)

// damage spoils some orders of the read model, as a bug would, and repairs each.
func (s *scene) damage(ctx context.Context) error {
	show.Pause(ctx, s.cfg.duration/2)
	if _, err := s.awaitProjected(ctx, 0); err != nil || ctx.Err() != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	rows, _ := s.db.Query(ctx, sqlSome) // CollectRows returns its error
	ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return err
	}
	for _, id := range ids {
		if _, err := s.db.Exec(ctx, sqlDamage, id); err != nil {
			return fmt.Errorf("damage order %s: %w", id, err)
		}
		if err := s.projection().RebuildOrder(ctx, id); err != nil {
			return err
		}
		s.damaged++
	}
	return nil
}

// sqlProjected says how many events are projected: both a consumer and a worker leave a row for
// each, in the transaction of the projection.
const sqlProjected = `SELECT count(*) FROM event_handled`

func (s *scene) projected(ctx context.Context) (n int, err error) {
	if err := s.db.QueryRow(context.WithoutCancel(ctx), sqlProjected).Scan(&n); err != nil {
		return 0, fmt.Errorf("count projected events: %w", err)
	}
	return n, nil
}

// awaitProjected waits until more than n events are projected, or until none was for as long as
// patience lasts, or until ctx ends. It reports whether they are projected.
func (s *scene) awaitProjected(ctx context.Context, n int) (bool, error) {
	last, progress := -1, time.Now()
	for time.Since(progress) < s.cfg.patience && show.Pause(ctx, 50*time.Millisecond) {
		now, err := s.projected(ctx)
		if err != nil || now > n {
			return err == nil, err
		}
		if now > last {
			last, progress = now, time.Now()
		}
	}
	return false, nil
}

// awaitAll waits until the last customer has left and all events are projected. The report
// says if some are not.
func (s *scene) awaitAll(ctx context.Context) error {
	for range s.processes {
		select {
		case <-s.closed:
		case <-time.After(s.cfg.patience):
			return errors.New("a customer does not leave")
		}
	}
	var events int
	if err := s.db.QueryRow(ctx, `SELECT count(*) FROM order_events`).Scan(&events); err != nil {
		return fmt.Errorf("count events: %w", err)
	}
	var err error
	s.finished, err = s.awaitProjected(ctx, events-1)
	return err
}
