package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
)

// service is one that is up.
type service struct {
	name string
	env  []string // KEY=value
	// stop ends what the tool started. Nil if it started nothing.
	stop func(context.Context) error
	// server is watched for a sudden end. Nil if it cannot end by itself.
	server watched
}

type watched interface {
	Done() <-chan struct{}
	Tail() string
}

// stack is the services that are up.
type stack struct {
	services []*service
}

// startAll starts the services at once. If one fails the others are stopped.
func startAll(ctx context.Context, o *options, say teller) (*stack, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	docker := newDocker()
	starts := []func() ([]*service, error){
		func() ([]*service, error) { return startBounced(ctx, o, docker, say.about) },
		func() ([]*service, error) {
			kafka, err := startKafka(ctx, o, docker, say.about("kafka"))
			return []*service{kafka}, err
		},
		func() ([]*service, error) {
			registry, err := startRegistry(ctx, o, say.about("registry"))
			return []*service{registry}, err
		},
	}
	started, errs := make([][]*service, len(starts)), make([]error, len(starts))
	var wg sync.WaitGroup
	for i, start := range starts {
		wg.Go(func() {
			if started[i], errs[i] = start(); errs[i] != nil {
				cancel(errOther)
			}
		})
	}
	wg.Wait()
	s := &stack{}
	for _, service := range slices.Concat(started...) {
		if service != nil {
			s.services = append(s.services, service)
		}
	}
	if err := firstCauses(errs); err != nil {
		// ctx may have ended, and what has started must stop in order.
		return nil, errors.Join(err, s.stop(context.WithoutCancel(ctx)))
	}
	return s, nil
}

// errOther is why a start was broken off when the other one failed.
var errOther = errors.New("another service did not start")

// firstCauses joins errs without those that only follow from another.
func firstCauses(errs []error) error {
	var causes []error
	for _, err := range errs {
		if !errors.Is(err, errOther) {
			causes = append(causes, err)
		}
	}
	return errors.Join(causes...)
}

// env returns the variables of all services.
func (s *stack) env() []string {
	var env []string
	for _, service := range s.services {
		env = append(env, service.env...)
	}
	return env
}

// stop stops all services at once. When ctx ends they are killed.
func (s *stack) stop(ctx context.Context) error {
	errs := make([]error, len(s.services))
	var wg sync.WaitGroup
	for i, service := range s.services {
		if service.stop != nil {
			wg.Go(func() { errs[i] = service.stop(ctx) })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// watch sends an error for each service that ends by itself, until quit closes.
func (s *stack) watch(quit <-chan struct{}) <-chan error {
	failed := make(chan error, len(s.services))
	for _, service := range s.services {
		if service.server == nil {
			continue
		}
		go func() {
			select {
			case <-service.server.Done():
				failed <- fmt.Errorf("%s has ended by itself; its log ends with:\n%s", service.name, service.server.Tail())
			case <-quit:
			}
		}()
	}
	return failed
}
