package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxops"
	"golang.org/x/sync/errgroup"
)

// scene is what happens in a run: customers visit the shop, and its service is killed.
type scene struct {
	*app
	cfg     config
	street  *street
	service *show.Process
	opened  chan struct{} // gets one whenever a service is open
	tally
	kills int

	finished bool // all was read before the service was stopped
}

// tally is what the processes of the service say that they have done.
type tally struct {
	mu sync.Mutex
	work
}

// work is what the groups have done, by action. What a process was about to say when it was
// killed is missing.
type work struct {
	done, repeated map[string]int
	deadLetters    int
	delays         []time.Duration // from the request to the statistic, of orders and views
	calm           int             // how many of them are from before the first kill
}

// run opens the shop, lets customers in, waits for the consumers, and compares.
func run(ctx context.Context, cfg config, out io.Writer) (*report, error) {
	cfg.schema, cfg.twice = "commerce_"+uuid.NewString()[:8], !cfg.load
	if cfg.password == "" {
		cfg.password = uuid.NewString()[:8]
	}
	if strings.HasSuffix(cfg.listen, ":0") {
		address, err := freeAddress(ctx)
		if err != nil {
			return nil, err
		}
		cfg.listen = address // the same after a kill
	}
	redis, what, stopRedis, err := startRedis(ctx, cfg.redis)
	if err != nil {
		return nil, err
	}
	defer stopRedis()
	cfg.redis = redis
	a, err := open(ctx, cfg, io.Discard)
	if err != nil {
		return nil, err
	}
	defer a.close()
	printHeader(out, cfg, what)
	defer show.DropSchema(a.db, a.id, out)
	s := &scene{
		app: a, cfg: cfg, street: newStreet("http://" + cfg.listen), opened: make(chan struct{}, 1+cfg.kills),
		tally: tally{work: work{done: map[string]int{}, repeated: map[string]int{}}},
	}
	return s.run(ctx)
}

// Every third product runs out of stock in a run of some hundred visits.
const sqlProducts = `
INSERT INTO products (id, price, stock)
SELECT id, 500 + 250 * id, CASE WHEN id % 3 = 0 THEN 10 ELSE 1000000 END FROM generate_series(1, $1::bigint) AS id`

// fillShelves adds the products, and puts their pages into the cache.
func (a *app) fillShelves(ctx context.Context) error {
	if _, err := a.db.Exec(ctx, sqlProducts, products); err != nil {
		return fmt.Errorf("fill shelves: %w", err)
	}
	for product := range int64(products) {
		if err := a.pages.put(ctx, product+1, pageOf(product+1, 1)); err != nil {
			return fmt.Errorf("cache pages: %w", err)
		}
	}
	return nil
}

// run runs the service until the last customer has left and all is counted. Ctrl-C closes the
// shop, and nothing else: what was sold is counted and compared.
func (s *scene) run(ctx context.Context) (*report, error) {
	if err := s.migrate(ctx); err != nil {
		return nil, err
	}
	if err := s.fillShelves(ctx); err != nil {
		return nil, err
	}
	if err := s.start(); err != nil {
		return nil, err
	}
	defer func() { _ = s.service.Stop() }() // after another error
	life := context.WithoutCancel(ctx)
	open, cancel := context.WithCancel(ctx)
	defer cancel()
	g, life := errgroup.WithContext(life)
	g.Go(func() error { return s.street.send(open, life, s.cfg.rate) })
	g.Go(func() error {
		defer cancel()
		end := time.Now().Add(s.cfg.duration)
		if err := s.killServices(ctx); err != nil {
			return err
		}
		show.Pause(ctx, time.Until(end))
		return nil
	})
	if err := g.Wait(); err != nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx)
	if err := s.awaitCounted(ctx); err != nil {
		return nil, err
	}
	if err := s.service.Stop(); err != nil {
		return nil, err
	}
	return s.report(ctx)
}

// start starts the service and waits until it is open.
func (s *scene) start() (err error) {
	env := []string{"REDIS_URL=" + s.cfg.redis, "OPERATOR_PASSWORD=" + s.cfg.password}
	if s.service, err = show.StartProcess(s.cfg.serviceArgs(), env, s.hear); err != nil {
		return err
	}
	select {
	case <-s.opened:
		return nil
	case <-s.service.Ended():
	case <-time.After(time.Minute):
	}
	return errors.Join(errors.New("the service does not open"), s.service.Stop())
}

// killServices kills the service while it works, and starts another.
func (s *scene) killServices(ctx context.Context) error {
	for range s.cfg.kills {
		before, open := s.handled(), show.Pause(ctx, s.cfg.duration/time.Duration(s.cfg.kills+2))
		for end := time.Now().Add(s.cfg.patience); open && s.handled() == before && time.Now().Before(end); {
			open = show.Pause(ctx, 20*time.Millisecond)
		}
		if !open {
			return nil
		}
		if err := s.service.Kill(); err != nil {
			return fmt.Errorf("kill the service: %w", err)
		}
		s.note(func() {
			if s.kills++; s.kills == 1 {
				s.calm = len(s.delays)
			}
		})
		if err := s.start(); err != nil {
			return err
		}
	}
	return nil
}

func (t *tally) note(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
}

// hear takes in a line that a process of the service has printed.
func (s *scene) hear(line string) {
	words := strings.Fields(line)
	s.note(func() {
		switch {
		case line == saidOpen:
			s.opened <- struct{}{}
		case len(words) == 3 && words[0] == saidHandled:
			s.done[words[1]]++
			micros, err := strconv.ParseInt(words[2], 10, 64)
			if err == nil && (words[1] == salesCounted || words[1] == viewsCounted) {
				s.delays = append(s.delays, time.Duration(micros)*time.Microsecond)
			}
		case len(words) == 2 && words[0] == saidRepeated:
			s.repeated[words[1]]++
		case len(words) == 2 && words[0] == saidDead:
			s.deadLetters++
		}
	})
}

// handled is how much the groups have done.
func (t *tally) handled() (n int) {
	t.note(func() {
		for _, counts := range []map[string]int{t.done, t.repeated} {
			for _, count := range counts {
				n += count
			}
		}
	})
	return n
}

// awaitCounted waits until everything is published, read and counted rightly, or until nothing
// has happened for as long as patience lasts.
func (s *scene) awaitCounted(ctx context.Context) error {
	handled, progress := -1, time.Now()
	for time.Since(progress) < s.cfg.patience {
		if n := s.handled(); n > handled {
			handled, progress = n, time.Now()
		}
		open, err := s.unread(ctx)
		if err != nil {
			return err
		}
		if s.finished = open == 0; s.finished {
			if r, err := s.report(ctx); err != nil || r.right() {
				return err
			}
		}
		show.Pause(ctx, 100*time.Millisecond)
	}
	return nil
}

// unread is how many events are not published, by both relays, or not read by the statistics.
func (s *scene) unread(ctx context.Context) (n int64, err error) {
	inspector, err := outboxops.NewInspector(s.db, outboxops.InspectorConfig{Schema: s.id})
	if err != nil {
		return 0, err
	}
	relays, err := inspector.Relays(ctx)
	if err != nil {
		return 0, err
	}
	for _, relay := range relays {
		n += relay.Pending + relay.Waiting + relay.Failed + relay.Parked
	}
	consumers, err := outboxops.NewConsumers(s.db, outboxops.ConsumersConfig{Schema: s.id})
	if err != nil {
		return 0, err
	}
	groups, _, err := consumers.List(ctx, outboxops.ConsumerFilter{})
	if err != nil {
		return 0, err
	}
	lags, err := consumers.Lag(ctx, s.kafka, groups)
	for _, topics := range lags {
		for _, lag := range topics {
			n += lag
		}
	}
	return n, err
}
