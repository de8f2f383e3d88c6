// Package perpool has what all users of a pool of connections in a process share, and runs it while there are any.
package perpool

import (
	"context"
	"runtime"
	"sync"
	"weak"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Registry has a value for each pool and name. It keeps no pool alive, and forgets what belongs to one that is gone.
// It is safe for concurrent use.
type Registry[V any] struct {
	mu sync.Mutex
	of map[place]V
}

type place struct {
	db   weak.Pointer[pgxpool.Pool]
	name string
}

// Get returns the value of a pool and a name, which it makes if there is none. The value may refer
// to the pool only through the function that create gets. That function returns nil once the pool
// is unreachable.
func (r *Registry[V]) Get(db *pgxpool.Pool, name string, create func(db func() *pgxpool.Pool) V) V {
	r.mu.Lock()
	defer r.mu.Unlock()
	key := place{weak.Make(db), name}
	if v, ok := r.of[key]; ok {
		return v
	}
	v := create(key.db.Value)
	if r.of == nil {
		r.of = map[place]V{}
	}
	r.of[key] = v
	runtime.AddCleanup(db, r.forget, key)
	return v
}

func (r *Registry[V]) forget(key place) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.of, key)
}

// Users runs something while it has any. It is safe for concurrent use.
type Users struct {
	mu    sync.Mutex
	count int
	end   func() // ends what runs, and waits until it has ended
}

// Add adds a user. For the first one it begins to run, until the last one is removed.
func (u *Users) Add(run func(context.Context)) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.count++; u.count > 1 {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	before := u.end // of earlier users, for whom it may still be ending
	go func() {
		defer close(ended)
		if before != nil {
			before()
		}
		run(ctx)
	}()
	u.end = func() { cancel(); <-ended }
}

// Remove removes a user, and waits for the end if it was the last one.
func (u *Users) Remove() {
	u.mu.Lock()
	u.count--
	last, end := u.count == 0, u.end
	u.mu.Unlock()
	if last {
		end()
	}
}

// Any reports whether there are users.
func (u *Users) Any() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.count > 0
}
