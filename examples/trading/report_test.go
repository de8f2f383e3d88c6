package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/examples/trading/simulator"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A command that is DEAD is printed with its last error, unless the exchange has rejected its order.
func TestDeadCommandsArePrinted(t *testing.T) {
	t.Parallel()
	const printed = "(UNKNOWN), is DEAD after 1 attempts: permanent: the exchange does not want the order: insufficient funds\n"
	f := newFixture(t, onFirst(simulator.Reject))
	workers, err := f.workers()
	require.NoError(t, err)
	f.decide(t)
	testenv.Run(t, workers[0].Run)
	require.Eventually(t, func() bool {
		var dead bool
		err := f.db.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM event_delivery WHERE status = 'DEAD')`).Scan(&dead)
		return err == nil && dead
	}, testenv.Patience, 10*time.Millisecond)
	require.NotContains(t, f.print(t), "is DEAD")
	_, err = f.db.Exec(t.Context(), `UPDATE order_attempt SET state = 'UNKNOWN'`)
	require.NoError(t, err)
	require.Contains(t, f.print(t), printed)
}

// print returns what the report prints.
func (f *fixture) print(t *testing.T) string {
	t.Helper()
	s := &scene{app: f.app, outside: f.outside, finished: true}
	r, err := s.report(t.Context())
	require.NoError(t, err)
	var out strings.Builder
	if err := r.print(&out); err != nil {
		require.ErrorIs(t, err, show.ErrWrong)
	}
	return out.String()
}
