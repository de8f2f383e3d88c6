package main

import (
	"context"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/outboxgo/outbox/bench/internal/orders"
	"github.com/outboxgo/outbox/bench/internal/report"
)

// exactlyMost is what the mode may take from commit to arrival at p50, in milliseconds.
const exactlyMost = 10

// exactly compares relays that send exactly once with relays that send at least once. All readers read committed
// records only.
func (t *track) exactly(ctx context.Context) error {
	topic := t.TopicName("cursor")
	t.Topics = append(t.Topics, topic)
	if err := t.exactlyLatency(ctx, topic); err != nil {
		return err
	}
	s, err := t.stock(ctx, t.cfg.events)
	if err != nil {
		return err
	}
	runs, err := t.inTurns(ctx, []contestant{
		{"exactly/drain-default", s, job{Work: "relay"}},
		{"exactly/drain", s, job{Work: "relay", ExactlyOnce: topic}},
	})
	if err != nil {
		return err
	}
	base, once := each(runs["exactly/drain-default"], used.rate), each(runs["exactly/drain"], used.rate)
	t.report.Add(report.Measured("exactly/drain-default", "events/s", base),
		report.Compared("exactly/drain", "events/s", once, "exactly/drain-default", base).RatioAtLeast(0.6))
	return nil
}

// exactlyLatency compares the time from commit to arrival. Each mode has a schema of its own, because a schema keeps
// the mode of its relay; one reader numbers the laps of both.
func (t *track) exactlyLatency(ctx context.Context, topic string) (err error) {
	once := *t
	if once.schema, err = t.NewSchema(ctx, "once"); err != nil {
		return err
	}
	if once.rec, err = t.Recorder(once.schema); err != nil {
		return err
	}
	inMode := func(ctx context.Context, rate int, measured time.Duration) (*laps.Lap, error) {
		l := t.newLap(rate, measured)
		return l, once.relayed(ctx, l, outbox.RelayConfig{ExactlyOnce: topic}, orders.New)
	}
	if _, err := inMode(ctx, openRate, seconds(t.cfg.warmUp)); err != nil {
		return err
	}
	return t.race(ctx, race{
		name: "exactly", rate: openRate, measured: t.lapTime(), most: exactlyMost,
		base: side{"default", t.withRelay}, with: side{"once", inMode},
	})
}
