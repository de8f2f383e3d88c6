package main

import (
	"context"
	"os"
	"testing"

	"github.com/outboxgo/outbox/bench/internal/services"
	"github.com/stretchr/testify/require"
)

// A turn counts what does not fail, all of it where nothing does; and it would not get away with a wrong count.
func TestFailingTurns(t *testing.T) {
	ctx, cfg := context.Background(), tiny(t)
	s, err := connect(ctx, cfg)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	f, err := (&bench{Services: s, cfg: cfg, stderr: os.Stderr}).newFailing(ctx)
	require.NoError(t, err)
	require.Equal(t, 990, f.others)
	for _, w := range []failingWay{{"consumer", true, f.consumer}, {"worker", false, f.worker}} {
		f.cfg.failingSeconds = 60 // is not needed
		u, err := f.round(ctx, w, false)
		require.NoError(t, err)
		require.Equal(t, f.others, u.Events, w.name)
		f.cfg.failingSeconds = cfg.failingSeconds
		u, err = f.round(ctx, w, true)
		require.NoError(t, err)
		require.Positive(t, u.Events, w.name)
		require.Less(t, u.seconds(), 10*cfg.failingSeconds, w.name)
		for table, want := range map[string]int{"counts WHERE n > 0 AND starts_with(key, '" + failingPrefix + "')": 0, "event_delivery": 0, "event_handled": 0} {
			var rows int
			require.NoError(t, f.DB.QueryRow(ctx, services.InSchema(`SELECT count(*) FROM {schema}.`+table, f.schema)).Scan(&rows))
			require.Equal(t, want, rows, "%s: %s", w.name, table)
		}
	}
	m := newOthersMeter(f.others)
	require.ErrorContains(t, f.checkTurn(ctx, m), "0 events were handled and counted")
}
