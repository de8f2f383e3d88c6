package pg

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Borrowed is a connection of a pool. One goroutine uses it, and another may cut it
// meanwhile, which no other method of a connection allows.
type Borrowed struct {
	*pgx.Conn

	mu     sync.Mutex
	pooled *pgxpool.Conn // nil: it was returned or cut
}

// Borrow takes a connection from a pool.
func Borrow(ctx context.Context, db *pgxpool.Pool) (*Borrowed, error) {
	pooled, err := db.Acquire(ctx)
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
	if b.pooled == nil {
		return
	}
	b.pooled.Hijack()
	b.pooled = nil
	_ = b.PgConn().Conn().Close()
}
