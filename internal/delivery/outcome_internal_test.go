package delivery

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/pg"
)

// usedTx is a transaction whose handlers may have changed settings.
type usedTx struct{ changed bool }

func (usedTx) Call(string, func(pgx.Tx) error) error { return nil }
func (x usedTx) ChangedSettings() bool               { return x.changed }
func (x usedTx) Used() bool                          { return true }
func (usedTx) Own() pgx.Tx                           { return nil }

// The end of a transaction that its handlers have prevented is a failure of the handlers, and counts as an attempt. A
// transaction that has taken longer than an administrator permits would be repeated for ever as an outage.
func TestUnfinishedIsOfTheHandler(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]struct{ plain, changed bool }{
		"25P04": {true, true},   // transaction_timeout
		"25P02": {true, true},   // a statement of the handler has failed
		"40001": {false, false}, // a conflict is tried again
		"57P01": {false, true},  // PostgreSQL stops, unless a setting of the handler ends the session
		"55P03": {false, true},  // a lock, or the handler's lock_timeout
		"":      {false, false}, // the connection
	} {
		err := fmt.Errorf("complete: %w", &pgconn.PgError{Code: code})
		require.Equal(t, want.plain, errors.Is(AsUnfinished(usedTx{false}, err), handling.ErrUnfinished), code)
		require.Equal(t, want.changed, errors.Is(AsUnfinished(usedTx{true}, err), handling.ErrUnfinished), code)
		require.ErrorIs(t, AsUnfinished(usedTx{true}, err), err)
	}
	wait := &pg.LockError{Err: &pgconn.PgError{Code: "55P03"}}
	require.NotErrorIs(t, AsUnfinished(usedTx{true}, wait), handling.ErrUnfinished)
}

// A delivery that comes back to a process that has given it to others is in the log, once for each kind.
func TestComesAgain(t *testing.T) {
	t.Parallel()
	var y yielded
	d := func(id int64, action string) *Delivery { return &Delivery{Ref: Ref{ID: id}, Action: action} }
	require.False(t, y.comesAgain(d(1, "COUNTED")))
	require.False(t, y.comesAgain(d(2, "COUNTED")))
	require.True(t, y.comesAgain(d(1, "COUNTED")))
	require.False(t, y.comesAgain(d(2, "COUNTED")), "of the same kind")
	require.False(t, y.comesAgain(d(3, "SUMMED")))
	require.True(t, y.comesAgain(d(3, "SUMMED")))
	for id := range int64(2 * maxYielded) {
		y.comesAgain(d(id+10, "COUNTED"))
	}
	require.LessOrEqual(t, len(y.again), maxYielded)
}
