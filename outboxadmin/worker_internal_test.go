package outboxadmin

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// noticed is the event of this test.
type noticed struct {
	Key string
	At  time.Time
}

func (n noticed) OccurredAt() time.Time { return n.At }

func (n noticed) aggregateID() string { return n.Key }

// A group of workers in another process is on the page as a relay is: its state, what it has picked up and how
// soon. A pause on the page stops it, and shows the backlog; the end of the pause lets it handle the rest.
func TestWorkersElsewhere(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, nil)
	h.exec(`DELETE FROM {s}.outbox_failed`)
	h.exec(`DELETE FROM {s}.outbox`)
	h.exec(`DELETE FROM {s}.outbox_cursor`)
	events, err := outbox.NewRegistry("test", outbox.Event("test.thing.noticed.v1", "Thing", noticed.aggregateID).Topic("things"))
	require.NoError(t, err)
	recorder, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)
	var handled atomic.Int64
	worker, err := outbox.NewWorker(h.db, events, "bus", outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: h.schema, From: outbox.FromStart}, PollInterval: 50 * time.Millisecond},
		outbox.Handle("NOTICE", func(context.Context, pgx.Tx, noticed, outbox.Metadata) error {
			handled.Add(1)
			return nil
		}))
	require.NoError(t, err)
	testenv.Run(t, worker.Run)
	record := func(n int) {
		require.NoError(t, pgx.BeginFunc(t.Context(), h.db, func(tx pgx.Tx) error {
			for i := range n {
				if err := recorder.Record(t.Context(), tx, noticed{fmt.Sprint(i), time.Now()}); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	await := func(want int64) {
		t.Helper()
		require.Eventually(t, func() bool { return handled.Load() == want }, testenv.Patience, 10*time.Millisecond)
	}
	record(20)
	await(20)
	require.Eventually(t, func() bool {
		return regexp.MustCompile(`"events":[1-9]\d*,"latency_ms":[0-9.]+`).MatchString(h.get("/api/consumers/bus/progress"))
	}, testenv.Patience, 50*time.Millisecond)
	page := h.get("/consumers")
	require.Regexp(t, `(?s)aria-label="Consumer group bus".*is-sent">works</span>.*Processes</dt><dd>1</dd>.*PostgreSQL, active`, page)
	require.Contains(t, page, `aria-label="Picked up: `)

	require.Equal(t, http.StatusSeeOther, h.post("/consumers/pause", "group", "bus", "reason", "the stock is counted").Code)
	require.Eventually(t, func() bool { return len(worker.Health().Reasons) > 0 }, testenv.Patience, 50*time.Millisecond)
	record(5)
	require.Eventually(t, func() bool {
		h.get("/consumers")
		return regexp.MustCompile(`"pending":\d+,"failed":\d+,"lag":null\}\]`).MatchString(h.get("/api/consumers/bus/backlog")) &&
			regexp.MustCompile(`aria-label="Backlog: 5 at`).MatchString(h.get("/consumers"))
	}, testenv.Patience, 100*time.Millisecond)
	require.EqualValues(t, 20, handled.Load())
	require.Equal(t, http.StatusSeeOther, h.post("/consumers/resume", "group", "bus", "reason", "it is counted").Code)
	await(25)
}
