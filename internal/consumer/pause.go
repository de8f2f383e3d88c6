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

// Pause pauses topics in this process, or all topics if none is named.
func (c *Consumer) Pause(topics []string) error {
	if err := c.checkPause(topics); err != nil {
		return fmt.Errorf("outbox: pause: %w", err)
	}
	c.pauses.Pause(handling.PausedTopics(topics)...)
	return nil
}

// Resume ends a pause that [Consumer.Pause] began with the same topics.
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

// awaitResume waits while the topic is paused. It returns false if the worker is stopped.
func (w *partitionWorker) awaitResume() bool {
	if w.isTopicPaused() {
		w.givePlace()
	}
	return w.limits.pauses.AwaitResume(w.stopping, w.partition.Topic) && w.stopping.Err() == nil
}

// mayCall waits until the topic is not paused and the worker has its place and the slots for a call. It returns
// false if the worker is stopped first. A worker whose topic is paused holds no slot.
func (w *partitionWorker) mayCall(tx bool) bool {
	for w.awaitResume() && w.takePlace() && w.slots.Take(w.stopping, w.limits.slots, tx) {
		if !w.isTopicPaused() {
			return true
		}
		w.slots.Release() // paused while it waited for its place or the slot
	}
	return false
}

// pauseTopics stops fetching of paused topics and resumes the others. Fetched records stay in the
// queues.
func (m *membership) pauseTopics(paused, others []string) {
	if len(paused) > 0 {
		m.client.PauseFetchTopics(paused...)
	}
	if len(others) > 0 {
		m.client.ResumeFetchTopics(others...)
	}
}

// watchPauses reads the pauses of operators at intervals until stop is called; stop waits for it.
// While PostgreSQL does not answer, the pauses that were read last apply.
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
