package lease

import (
	"context"
	"time"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
)

// sqlLeaseElsewhere says when Kafka last answered a process that stands by.
const sqlLeaseElsewhere = `
UPDATE {schema}.outbox_lease SET elsewhere_at = clock_timestamp() - $4::interval WHERE name = $1::text AND holder = $2::text AND epoch = $3`

// SayElsewhere says to the holder of the lease that Acquire has seen when Kafka last answered this process.
func (s *Store) SayElsewhere(ctx context.Context, answered time.Time) error {
	_, err := pg.Exec(ctx, s.DB, s.elsewhere, s.Relay, s.Other.Holder, s.Other.epoch, time.Since(answered))
	return err
}

// HasNews reports whether this process says something else now than the last renewal has written.
func (s *Store) HasNews() bool {
	said := s.said.Load()
	if s.Says == nil || said == nil {
		return false
	}
	now, _ := s.Says()
	return now.Differs(*said)
}

// says returns what a renewal writes: the state, and for how long Kafka has not answered, or nil.
func (s *Store) says(l *Lease) (says outage.State, state string, sinceKafka *time.Duration) {
	if s.Says == nil {
		return says, "{}", nil
	}
	says, kafka := s.Says()
	if !kafka.IsZero() {
		since := time.Since(kafka)
		sinceKafka = &since
	}
	stored := says
	stored.Epoch = l.Epoch
	return says, stored.JSON(), sinceKafka
}
