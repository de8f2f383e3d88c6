package main

import (
	"context"

	"github.com/outboxgo/outbox/bench/internal/laps"
	"github.com/twmb/franz-go/pkg/kadm"
)

// newReader returns one that starts at the topic's end, which it knows before it
// returns: whatever is produced afterwards will arrive.
func (b *bench) newReader(ctx context.Context) (*laps.Reader, error) {
	ends, err := b.Ends(ctx)
	if err != nil {
		return nil, err
	}
	return b.readFrom(ends)
}

// readFrom returns a reader that starts where the topic once ended.
func (b *bench) readFrom(ends kadm.ListedOffsets) (*laps.Reader, error) {
	return laps.ReadFrom(b.cfg.Brokers, b.Topic, ends)
}
