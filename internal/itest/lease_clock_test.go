package itest

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// The clock of the database is set back by nine and a half minutes, and the relay that
// led is gone. The standby says once why it waits, waits no longer than that, and says it
// again when it happens again.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	h := newRelayFixture(t)
	held := func(until string) {
		t.Helper()
		h.exec(t, `INSERT INTO {s}.outbox_lease AS l (name, holder, epoch, expires_at, lasts) VALUES ('default', 'another', 7, clock_timestamp() + $1::text::interval, '30 s')
			ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at`, until)
	}
	held("30 s")
	log := new(testenv.Buffer)
	cfg := quick
	cfg.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	testenv.Run(t, h.relay(t, cfg).Run)
	said := func() int { return strings.Count(log.String(), "the clock of PostgreSQL was set back") }
	await := func(n int) {
		t.Helper()
		require.Eventually(t, func() bool { return said() == n }, testenv.Patience, time.Millisecond)
		time.Sleep(10 * cfg.PollInterval)
		require.Equal(t, n, said(), "once")
	}
	await(0)
	held("10 min")
	await(1)
	require.Regexp(t, `set_back=9m(29|30)`, log.String())
	for said() == 1 { // a standby that is late does not see that the holder lives, and renews it
		held("30 s")
		time.Sleep(10 * cfg.PollInterval)
		held("1 h")
		time.Sleep(10 * cfg.PollInterval)
	}
	await(2)
	held("0")
	require.Eventually(t, func() bool { return h.relayStatus(t, "default").Epoch == 8 }, testenv.Patience, time.Millisecond, "taken over")
	var lasts time.Duration
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT lasts FROM {s}.outbox_lease`)).Scan(&lasts))
	require.Positive(t, lasts)
}
