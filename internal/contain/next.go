package contain

import (
	"context"
	"errors"
	"sync"
)

var (
	errNextTwice = errors.New("next is called twice")
	errNextEarly = errors.New("it has returned before next has")
	errNextLate  = errors.New("next is called after the end")
)

// Next is what a middleware calls: a function that runs once, and while the middleware does.
type Next struct {
	f    func(context.Context) error
	done chan struct{} // closed when f has ended; nil before it is called

	mu     sync.Mutex // guards all below, and done
	over   bool
	misuse error
}

// NewNext returns a function that has not run.
func NewNext(f func(context.Context) error) *Next { return &Next{f: f} }

// Call runs the function and returns its error. It returns another one, and runs nothing, if
// it was called before or End was.
func (n *Next) Call(ctx context.Context) error {
	if err := n.begin(); err != nil {
		return err
	}
	defer close(n.done) // also if f ends its goroutine
	return n.f(ctx)
}

func (n *Next) begin() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.over:
		return errNextLate
	case n.done != nil:
		n.misuse = errNextTwice
		return errNextTwice
	}
	n.done = make(chan struct{})
	return nil
}

// End is called when the middleware has returned. It waits for the function if that runs in
// another goroutine. Its error says that the middleware has not kept to the rules: whether it
// knows the result of the function is not certain then.
func (n *Next) End() error {
	n.mu.Lock()
	n.over = true
	done := n.done
	n.mu.Unlock()
	if done == nil {
		return nil
	}
	select {
	case <-done:
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.misuse
	default:
		<-done
		return errNextEarly
	}
}
