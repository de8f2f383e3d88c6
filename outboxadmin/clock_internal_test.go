package outboxadmin

import (
	"encoding/json"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// Pages, the API and bulk actions go by the clock of the database, although that of this host is ahead or behind.
func TestPagesByAnotherClock(t *testing.T) {
	t.Parallel()
	for _, ahead := range []time.Duration{-time.Hour, time.Hour} {
		db, schema := testenv.Schema(t)
		require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema, PartitionRows: 1_000_000}))
		h := newAdminFixtureIn(t, testenv.OtherClock(t, ahead), schema, nil)
		wrong := map[string]string{}
		page := h.get("/")
		for _, want := range []string{`said <time [^>]*>([0-9]+ s|[1-5] min) ago`, `Throughput: [1-9][0-9.]*/s at `} {
			if !regexp.MustCompile(want).MatchString(page) {
				wrong[want] = page
			}
		}
		if page := h.get("/failed/retry?type=loopers.order.created.v1&status=dead"); regexp.MustCompile(`\b0 (failures|events)\b`).MatchString(page) {
			wrong["bulk"] = page
		}
		var progress apiProgressList
		require.NoError(t, json.Unmarshal([]byte(h.get("/api/relays/default/progress?span=15m")), &progress))
		if events := progress.Progress; len(events) != 60 {
			wrong["progress"] = h.get("/api/relays/default/progress?span=15m")
		}
		var over apiOverview
		require.NoError(t, json.Unmarshal([]byte(h.get("/api/overview")), &over))
		if time.Until(over.At.Add(-ahead)).Abs() > testenv.Patience {
			wrong["at"] = over.At.String()
		}
		var kept apiSampleList
		require.NoError(t, json.Unmarshal([]byte(h.get("/api/relays/default/backlog?span=15m")), &kept))
		if len(kept.Samples) == 0 || time.Until(kept.Samples[0].At.Add(-ahead)).Abs() > testenv.Patience {
			wrong["samples"] = h.get("/api/relays/default/backlog?span=15m")
		}
		require.Empty(t, wrong, ahead)
	}
}

// Outages that this process reports have the times of the database, as those have that others report.
func TestOwnOutagesByAnotherClock(t *testing.T) {
	t.Parallel()
	began := time.Now()
	all := []outbox.Outage{{What: "Kafka", Class: "unreachable", Since: began}}
	a := &admin{cfg: Config{
		Health:    func() []outbox.RelayHealth { return []outbox.RelayHealth{{Relay: "default", Outages: all}} },
		Consumers: func() []outbox.ConsumerHealth { return []outbox.ConsumerHealth{{Outages: all}} },
		Workers:   func() []outbox.WorkerHealth { return []outbox.WorkerHealth{{Outages: all}} },
	}}
	clock := pg.ClockAt(began.Add(-time.Hour))
	a.clock.Store(&clock)
	for _, got := range [][]outbox.Outage{a.health()["default"].Outages, a.consumerHealth()[0].Outages, a.workerHealth()[0].Outages} {
		require.WithinDuration(t, began.Add(-time.Hour), got[0].Since, time.Minute)
	}
	require.Equal(t, began, all[0].Since)
}
