package pg

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Borrowed is a connection of a pool. One goroutine uses it, and another may cut it
// meanwhile, which no other method of a connection allows.
type Borrowed struct {
	*pgx.Conn

	mu       sync.Mutex
	pooled   *pgxpool.Conn // nil: it was returned, cut or detached
	returned bool
}

// acquireTime bounds a try to get a connection of a pool.
const acquireTime = 5 * time.Second

// Acquire takes a connection from a pool. A pool pings a connection that was idle, and waits for the answer without a
// bound, for a quarter of an hour if the connection has died in silence. So each try has one: then the pool drops the
// connection, and the next try gets another one. All tries together take no longer than [Bounded] says.
func Acquire(ctx context.Context, db *pgxpool.Pool) (*pgxpool.Conn, error) {
	ctx, cancel := Bounded(ctx)
	defer cancel()
	for {
		try, cancel := context.WithTimeout(ctx, acquireTime)
		conn, err := db.Acquire(try)
		ended := try.Err() != nil
		cancel()
		switch {
		case err == nil:
			return conn, nil
		case !ended || ctx.Err() != nil:
			return nil, fmt.Errorf("get a connection of the pool: %w", err)
		}
	}
}

// Borrow takes a connection from a pool, as [Acquire] does.
func Borrow(ctx context.Context, db *pgxpool.Pool) (*Borrowed, error) {
	pooled, err := Acquire(ctx, db)
	if err != nil {
		return nil, err
	}
	noteSets(db, pooled.Conn())
	return &Borrowed{Conn: pooled.Conn(), pooled: pooled}, nil
}

// Return ends the use of the connection: it goes back to the pool, unless it was cut.
func (b *Borrowed) Return() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.returned = true
	if b.pooled == nil {
		_ = b.Close(context.Background()) // nothing is sent any more
		return
	}
	b.pooled.Release()
	b.pooled = nil
}

// Cut closes the network connection. PostgreSQL then rolls back uncommitted work, and each user of
// the connection gets an error. The pool no longer counts the connection.
func (b *Borrowed) Cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.returned {
		return
	}
	if b.pooled != nil {
		b.pooled.Hijack()
		b.pooled = nil
	}
	_ = b.PgConn().Conn().Close()
}

// Detach takes the connection out of the pool, which no longer counts it and can be closed. A statement under way goes
// on. Return closes the connection.
func (b *Borrowed) Detach() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.pooled != nil {
		b.pooled.Hijack()
		b.pooled = nil
	}
}
