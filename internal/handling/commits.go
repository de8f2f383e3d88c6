package handling

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outboxgo/outbox/internal/guardtx"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/wait"
)

const (
	lateCommit   = 20 * time.Second // a COMMIT that takes longer is asked about
	askCommit    = 2 * time.Second  // between two questions about it
	answerCommit = 5 * time.Second  // for an answer
)

// Why a COMMIT was given up.
var (
	errCommitLost = errors.New("PostgreSQL does not run the COMMIT whose answer was awaited, and may have executed it")
	errCommitLate = fmt.Errorf("the COMMIT has taken longer than a transaction may take: %w", context.DeadlineExceeded)
)

// commit commits a transaction. A COMMIT may take long: it waits for a synchronous standby, or for deferred triggers.
// If the client gives up, pgx cancels the wait, and PostgreSQL commits without the standby. So neither the end of a
// claim, whose rows the transaction has locked, nor a stop ends the COMMIT. Two things do:
//
//   - The time of a whole transaction has passed.
//   - PostgreSQL has answered twice, on another connection, that it does not run the COMMIT. Then the connection has
//     died in silence. A shorter timeout of TCP does not show that behind a proxy. Elsewhere, PostgreSQL may be waiting
//     for the standby while the network is down, and pgx would cancel that wait when the network is back.
//
// A COMMIT that returns in time costs one timer and no goroutine.
func (s *Notes) commit(ctx context.Context, work *Activity, conn *pg.Borrowed, tx *guardtx.Tx) error {
	work.Commits()
	ctx = context.WithoutCancel(ctx)
	watched, end := context.WithCancel(ctx)
	defer end()
	first := lateCommit
	if s.Limits.Whole > 0 {
		first = min(first, s.Limits.Whole)
	}
	given := make(chan error, 1)
	backend := pg.KnownSession(conn.Conn).Backend() // here: the connection may have another user when the timer fires
	defer time.AfterFunc(first, func() {
		if why := s.watchCommit(watched, backend, first); why != nil {
			given <- why
			conn.Cut()
		}
	}).Stop()
	err := tx.Commit(ctx)
	if err == nil {
		return nil
	}
	select {
	case why := <-given:
		return fmt.Errorf("%w: %w", why, err)
	default:
		return err
	}
}

// watchCommit watches a COMMIT that began some time ago in a process of PostgreSQL. It returns why the COMMIT must be
// given up, or nil when ctx ends, because the COMMIT has returned.
func (s *Notes) watchCommit(ctx context.Context, backend int32, ago time.Duration) error {
	began, whole := time.Now().Add(-ago), s.Limits.Whole
	for lost := 0; ctx.Err() == nil; {
		pause := askCommit
		if whole > 0 {
			if pause = min(pause, whole-time.Since(began)); pause <= 0 {
				return errCommitLate
			}
		}
		switch { // the first time, the answer to the COMMIT may be on its way
		case !s.isLost(ctx, backend, time.Since(began)):
			lost = 0
		case lost == 1:
			return errCommitLost
		default:
			lost++
		}
		wait.Sleep(ctx, pause)
	}
	return nil
}

// isLost reports whether PostgreSQL has answered that it does not run a COMMIT that began some time ago.
func (s *Notes) isLost(ctx context.Context, backend int32, ago time.Duration) bool {
	if backend == 0 {
		return false
	}
	select {
	case s.asking <- struct{}{}:
		defer func() { <-s.asking }()
	case <-ctx.Done():
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, answerCommit)
	defer cancel()
	lost, err := pg.IsLost(ctx, s.db, backend, ago)
	return lost && err == nil
}
