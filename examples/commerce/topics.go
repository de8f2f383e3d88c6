package main

import (
	"context"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxtopics"
	"github.com/twmb/franz-go/pkg/kgo"
)

// makeTopics makes the topics of the registry, and those for their dead letters, unless
// they are there: 3 partitions and 7 days, 1 partition and 30 days. Replication is the
// broker's: three copies, of which two must be written, is what to set there. So that
// this runs on a single broker, it is not the default of outboxtopics here.
func makeTopics(ctx context.Context, kafka []kgo.Opt, events *outbox.Registry) error {
	_, err := outboxtopics.Ensure(ctx, kafka, events, outboxtopics.Config{ReplicationFactor: -1})
	return err
}
