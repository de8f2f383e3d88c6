package main

import (
	"context"
	"crypto/subtle"
	"errors"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxadmin"
	"github.com/outboxgo/outbox/outboxhttp"
	"golang.org/x/sync/errgroup"
)

// service is the shop with its consumers, all in one process. Of it may run as many as
// one likes: one of them relays, and they share the partitions.
type service struct {
	*app
	shop     *shop
	tel      *telemetry
	relays   []*outbox.Relay
	groups   []*outbox.Consumer
	operator http.Handler // the operators' page
	password string       // for it
	listener net.Listener
}

// newService makes the parts of a service, and listens.
func newService(ctx context.Context, a *app, cfg config) (s *service, err error) {
	s = &service{app: a, password: cfg.password}
	if s.tel, err = newTelemetry(); err != nil {
		return nil, err
	}
	if s.relays, err = s.newRelays(cfg.twice); err != nil {
		return nil, err
	}
	rec, err := outbox.NewRecorder(a.events, s.tel.Recorder(outbox.RecorderConfig{Schema: a.id, Headers: outboxhttp.TraceHeaders}))
	if err != nil {
		return nil, err
	}
	inbox, err := outbox.NewInbox(a.id, "shop")
	if err != nil {
		return nil, err
	}
	s.shop = &shop{rec, inbox, s.relays[0].Waker().InTx}
	if s.groups, err = a.groups(s.tel.Consumer); err != nil {
		return nil, err
	}
	if err := s.tel.watch(a, s.groups...); err != nil {
		return nil, err
	}
	if s.operator, err = s.operatorsPage(); err != nil {
		return nil, err
	}
	s.listener, err = (&net.ListenConfig{}).Listen(ctx, "tcp", cfg.listen)
	return s, err
}

// newRelays returns the relay, which runs in every process. Twice adds one of another name: it
// publishes everything once more, as a crash might, so that there is something to skip.
func (s *service) newRelays(twice bool) (relays []*outbox.Relay, err error) {
	names := []string{"default"}
	if twice {
		names = append(names, "again")
	}
	for _, name := range names {
		relay, err := outbox.NewRelay(s.db, s.kafka, s.tel.Relay(outbox.RelayConfig{Schema: s.id, Name: name, Logger: s.log}))
		if err != nil {
			return nil, err
		}
		relays = append(relays, relay)
	}
	return relays, nil
}

// operatorsPage shows what relays and groups do, and what has failed, to who knows the password.
func (s *service) operatorsPage() (http.Handler, error) {
	return outboxadmin.New(s.db, outboxadmin.Config{
		Schema:    s.id,
		Authorize: s.authorize,
		Challenge: `Basic realm="operators"`,
		Kafka:     s.kafka,
		Logger:    s.log,
		Health: func() (all []outbox.RelayHealth) {
			for _, relay := range s.relays {
				all = append(all, relay.Health())
			}
			return all
		},
		Consumers: func() (all []outbox.ConsumerHealth) {
			for _, group := range s.groups {
				all = append(all, group.Health())
			}
			return all
		},
	})
}

// authorize is for one operator. A company asks its single sign-on here.
func (s *service) authorize(r *http.Request) (outboxadmin.Access, error) {
	name, password, _ := r.BasicAuth()
	if name == "" || s.password == "" || subtle.ConstantTimeCompare([]byte(password), []byte(s.password)) != 1 {
		return outboxadmin.Access{}, nil
	}
	return outboxadmin.Access{Operator: name, Role: outboxadmin.Operator}, nil
}

const operatorsPath = "/operators"

// handler has the trace id around all endpoints: it is taken from X-Trace-Id or made, sent
// back, and in every event and log line of the request, that of its consumers included.
func (s *service) handler() http.Handler {
	parts := []outboxhttp.Part{}
	for _, relay := range s.relays {
		parts = append(parts, outboxhttp.Relay(relay))
	}
	for _, group := range s.groups {
		parts = append(parts, outboxhttp.Consumer(group))
	}
	mux := s.api()
	mux.Handle("GET /metrics", s.tel.scraped)
	mux.Handle("GET /livez", outboxhttp.Live(parts...))
	mux.Handle("GET /readyz", outboxhttp.Ready(parts...))
	mux.Handle(operatorsPath+"/", http.StripPrefix(operatorsPath, s.operator))
	return outboxhttp.Trace(outboxhttp.TraceConfig{}, mux)
}

// run runs all parts until ctx is cancelled, HTTP first to end: what was answered is still
// published and counted.
func (s *service) run(ctx context.Context) error {
	server := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, ReadTimeout: 30 * time.Second, WriteTimeout: time.Minute,
		IdleTimeout: 2 * time.Minute, MaxHeaderBytes: 64 << 10,
	}
	behind, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	g, failed := errgroup.WithContext(behind)
	g.Go(func() error { return s.makeTopics(failed) })
	for _, relay := range s.relays {
		g.Go(func() error { return relay.Run(failed) })
	}
	for _, group := range s.groups {
		g.Go(func() error { return group.Run(failed) })
	}
	g.Go(func() error {
		if err := server.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	g.Go(func() error {
		defer stop() // relays and groups finish what is in flight
		select {
		case <-ctx.Done():
		case <-failed.Done():
		}
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return server.Shutdown(end)
	})
	return errors.Join(g.Wait(), s.tel.shutdown(context.WithoutCancel(ctx)))
}

// What a process of the service prints, a line each. The process that has started it reads it.
const (
	saidOpen     = "open"     // customers may come
	saidHandled  = "handled"  // action, and microseconds since the request
	saidRepeated = "repeated" // action
	saidDead     = "dead"     // action
)

// serve is what such a process does, until its standard input ends.
func serve(ctx context.Context, cfg config, stdin io.Reader, stdout, stderr io.Writer) error {
	a, err := open(ctx, cfg, stderr)
	if err != nil {
		return err
	}
	defer a.close()
	say := show.SayTo(stdout)
	a.hooks = outbox.ConsumerHooks{
		Handled: func(m outbox.Metadata, action string, _ time.Duration) {
			say(saidHandled, action, time.Since(m.Time).Microseconds())
		},
		Repeated:     func(_ outbox.Metadata, action string) { say(saidRepeated, action) },
		DeadLettered: func(_ outbox.Metadata, action, _ string, _ error) { say(saidDead, action) },
	}
	s, err := newService(ctx, a, cfg)
	if err != nil {
		return err
	}
	ctx, stop := show.UntilEnd(ctx, stdin)
	defer stop()
	say(saidOpen)
	return s.run(ctx)
}
