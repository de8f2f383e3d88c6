package contain

import (
	"fmt"
	"sync"
)

// Group runs goroutines. If one of them panics, the process does not end: the owner of
// the group is told to finish, and then [Group.Wait] panics.
type Group struct {
	panicked func(*Panic)
	running  sync.WaitGroup

	mu    sync.Mutex
	first *Panic
}

// NewGroup returns an empty group. It calls panicked after a panic, from the goroutine
// that panicked, to let the owner and the other goroutines finish.
func NewGroup(panicked func(*Panic)) *Group { return &Group{panicked: panicked} }

// Go runs f in a goroutine.
func (g *Group) Go(f func()) {
	g.running.Go(func() {
		defer func() {
			if v := recover(); v != nil {
				g.keep(NewPanic(v))
			}
		}()
		f()
	})
}

func (g *Group) keep(p *Panic) {
	g.mu.Lock()
	if g.first == nil {
		g.first = p
	}
	g.mu.Unlock()
	g.panicked(p)
}

// Wait waits until all goroutines have ended. If one has panicked, it panics with a
// [Crash].
func (g *Group) Wait() {
	g.running.Wait()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.first != nil {
		panic(Crash{g.first})
	}
}

// Crash is a panic that has passed from one goroutine to another. The runtime prints its
// error, so it has the stack of the goroutine that panicked.
type Crash struct{ *Panic }

// Error returns the value and the stack.
func (c Crash) Error() string { return fmt.Sprintf("%v\n\n%s", c.Value, c.Stack) }

// CrashOf returns what a goroutine that has recovered a value passes to another.
func CrashOf(value any) Crash {
	if c, ok := value.(Crash); ok {
		return c // with the stack of where it began
	}
	return Crash{NewPanic(value)}
}
