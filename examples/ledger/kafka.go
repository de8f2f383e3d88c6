package main

import (
	"context"

	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/twmb/franz-go/pkg/kgo"
)

// sent is what Kafka has of this run.
type sent struct {
	records, events int // an event that was sent twice is one event
}

// readKafka reads the topics to their ends.
func (a *app) readKafka(ctx context.Context) (s sent, err error) {
	topics := []string{}
	for _, r := range a.events.Registrations() {
		topics = append(topics, r.Topic)
	}
	mine, ids := onlyFrom(a.source), map[string]bool{}
	err = show.ReadTopics(ctx, a.kafka, topics, func(r *kgo.Record) {
		if m, err := mine(r); err == nil && m != nil {
			s.records++
			ids[m.ID] = true
		}
	})
	s.events = len(ids)
	return s, err
}
