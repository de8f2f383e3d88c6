package main

import (
	"context"

	"github.com/outboxgo/outbox/outboxtopics"
)

// topics says how the topics of the registry are made, and those for their dead letters, unless
// they are there: 3 partitions and 7 days, 1 partition and 30 days. Replication is the
// broker's: three copies, of which two must be written, is what to set there. So that
// this runs on a single broker, it is not the default of outboxtopics here.
var topics = outboxtopics.Config{ReplicationFactor: -1}

// makeTopics makes them beside relays and consumers, once Kafka is there.
func (a *app) makeTopics(ctx context.Context) error {
	cfg := topics
	cfg.Logger = a.log
	return outboxtopics.Run(ctx, a.kafka, a.events, cfg)
}
