package itest

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/internal/verify"
	"github.com/outboxgo/outbox/outboxarchive"
)

// While writers commit, a relay sends, stops and begins again, and retention removes rows, outbox verify finds nothing:
// with the archive that gets these rows, and without it. A record that is removed from the archive afterwards is found.
func TestVerifyFindsNothingWhileAllRuns(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	h := newRelayFixture(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 3)
	h.commit(t, oracle.Event{ID: uuid.NewString(), Key: "first"}) // so that no id is missing in front of the others
	table, err := outboxarchive.NewTable(h.db, outboxarchive.TableConfig{Schema: h.schema, OutboxSchema: h.schema})
	require.NoError(t, err)
	require.NoError(t, table.Ensure(t.Context()))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1<<32))
	stop := testenv.Run(t, func(ctx context.Context) error {
		for ctx.Err() == nil {
			relay := h.relay(t, outbox.RelayConfig{BatchSize: 50, PollInterval: 10 * time.Millisecond, Retention: outbox.RetentionConfig{
				PublishedFor: time.Second, CursorsFor: time.Second, Archive: table.Archive}})
			run, cancel := context.WithTimeout(ctx, time.Duration(500+rng.IntN(1500))*time.Millisecond)
			if err := relay.Run(run); err != nil {
				cancel()
				return err
			}
			cancel()
		}
		return nil
	})
	require.Eventually(t, func() bool { return h.count(t, "outbox_cursor") > 0 }, testenv.Patience, 10*time.Millisecond)
	written := make(chan error, 1)
	go func() {
		written <- oracle.Write(context.Background(), oracle.Writers{DB: h.db, Schema: h.schema, Record: h.record, Seed: seed, Events: 3000, Writers: 6, Keys: 50,
			Pause: 20 * time.Millisecond, Open: 2})
	}()
	runs := 0
	for done := false; !done; runs++ {
		select {
		case err := <-written:
			require.NoError(t, err)
			done = true
		default:
		}
		report := verified(t, h, h.schema)
		require.Empty(t, report.Findings)
		require.Empty(t, verified(t, h, "").Findings)
	}
	require.Eventually(t, func() bool {
		report := verified(t, h, h.schema)
		require.Empty(t, report.Findings)
		return report.Records >= report.Events && report.Events > 3000
	}, testenv.Patience, 100*time.Millisecond)
	stop()
	t.Logf("verified %d times; %d events are in outbox", runs, h.count(t, "outbox"))

	for _, table := range []string{"outbox", "outbox_archive"} {
		_, err := h.db.Exec(t.Context(), pg.InSchema(`DELETE FROM {schema}.`+table+` WHERE id = (SELECT max(id) FROM {schema}.`+table+`)`, h.schema))
		require.NoError(t, err)
	}
	report := verified(t, h, h.schema)
	require.Positive(t, report.Found[verify.Phantom])
	require.Equal(t, report.Found[verify.Phantom], report.Problems(verify.Kinds...))
}

func verified(t *testing.T, h *relayFixture, archive string) verify.Report {
	t.Helper()
	report, err := verify.Run(t.Context(), h.db, []kgo.Opt{kgo.SeedBrokers(h.brokers...)}, verify.Config{Schema: h.schema, Archive: archive, Relay: "default", Findings: 20})
	require.NoError(t, err)
	return report
}
