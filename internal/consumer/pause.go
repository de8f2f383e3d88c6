package consumer

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/wait"
)

// Pause has this process handle nothing of some topics, or nothing at all.
func (c *Consumer) Pause(topics []string) error {
	if err := c.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: pause: %w", err)
	}
	c.pauses.Pause(handling.PausedTopics(topics)...)
	return nil
}

// Resume ends the pause that pause has begun with the same topics.
func (c *Consumer) Resume(topics []string) error {
	if err := c.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: resume: %w", err)
	}
	c.pauses.Resume(handling.PausedTopics(topics)...)
	return nil
}

func (c *Consumer) checkPause(topics []string) error {
	for _, t := range topics {
		if !slices.Contains(c.Processor.Routes.Topics, t) {
			return fmt.Errorf("the consumer does not read topic %q", t)
		}
	}
	return nil
}

// isTopicPaused reports whether the topic of the partition is paused.
func (w *partitionWorker) isTopicPaused() bool { return w.limits.pauses.IsPaused(w.partition.Topic) }

// awaitResume waits while the topic is paused, and reports whether that ended before the
// worker is to end.
func (w *partitionWorker) awaitResume() bool {
	return w.limits.pauses.AwaitResume(w.stopping, w.partition.Topic) && w.stopping.Err() == nil
}

// mayCall waits until a handler may be called: until the topic is not paused, and there is a
// slot. It reports whether that was before the worker is to end. A worker whose topic is
// paused keeps no slot from others.
func (w *partitionWorker) mayCall(tx bool) bool {
	for w.awaitResume() && w.takeSlots(tx) {
		if !w.isTopicPaused() {
			return true
		}
		w.releaseSlots() // paused while it waited for the slot
	}
	return false
}

// pauseTopics has the client fetch nothing of some topics. What it has fetched waits in the
// queues of the workers.
func (m *membership) pauseTopics(paused, others []string) {
	if len(paused) > 0 {
		m.client.PauseFetchTopics(paused...)
	}
	if len(others) > 0 {
		m.client.ResumeFetchTopics(others...)
	}
}

// watchPauses reads what operators have paused, until stop is called, which waits for it.
// While PostgreSQL does not answer, what it said last counts.
func (c *Consumer) watchPauses(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		for c.operators != nil && ctx.Err() == nil {
			wait.Sleep(ctx, handling.PausesInterval)
			began := time.Now()
			err := c.readPauses(ctx)
			if err != nil {
				err = fmt.Errorf("what was read before still counts: %w", err)
			}
			if ctx.Err() == nil {
				c.outages.Report(handling.OutagePauses, began, err)
			}
		}
	})
	return func() {
		cancel()
		watching.Wait()
	}
}

func (c *Consumer) readPauses(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, handling.PausesTimeout)
	defer cancel()
	now, err := c.operators.Read(ctx)
	if err != nil {
		return err
	}
	handling.LogPauses(c.Processor.Log, "consumer", c.pauses.SetStored(now), now)
	return nil
}
