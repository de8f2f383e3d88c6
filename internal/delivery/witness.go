package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// An event that fails may be a bad one, or what its handler needs may be away. Only the success of another event of the
// action tells, in whatever process. So each process saves when its actions have last succeeded, as often as it takes
// over leases, and not for each event.

// sqlSaveSuccesses saves when calls of actions that have succeeded began. The times are relative, because the clocks of
// processes differ. A time from before the clock of PostgreSQL was set back is none.
const sqlSaveSuccesses = `
INSERT INTO {schema}.event_success AS s (consumer_group, action, succeeded_at)
SELECT $1::text, n.action, clock_timestamp() - n.ago FROM unnest($2::text[], $3::interval[]) AS n (action, ago) ORDER BY n.action
    ON CONFLICT (consumer_group, action)
    DO UPDATE SET succeeded_at = greatest(CASE WHEN s.succeeded_at <= clock_timestamp() THEN s.succeeded_at END, excluded.succeeded_at)`

// SaveSuccesses saves for each action when its last successful call began. A crash of PostgreSQL may forget that.
func (s *Store) SaveSuccesses(ctx context.Context, began map[string]time.Time) error {
	actions, ago := make([]string, 0, len(began)), make([]time.Duration, 0, len(began))
	for action, at := range began {
		actions, ago = append(actions, action), append(ago, time.Since(at))
	}
	err := s.transactAsync(ctx, func(b *pgx.Batch) { b.Queue(s.sqlSaveSuccesses, s.group, actions, ago) })
	if err != nil {
		return fmt.Errorf("save when actions have succeeded: %w", err)
	}
	return nil
}

const sqlWitness = `
SELECT EXISTS (SELECT FROM {schema}.event_success AS s
                WHERE s.consumer_group = $1::text AND s.action = $2::text AND s.succeeded_at > clock_timestamp() - $3::interval
                  AND s.succeeded_at <= clock_timestamp())`

// Witness reports whether the last successful call of an action that a process has saved began less than ago.
func (s *Store) Witness(ctx context.Context, action string, ago time.Duration) (seen bool, err error) {
	if err := s.db.QueryRow(ctx, s.sqlWitness, s.group, action, ago).Scan(&seen); err != nil {
		return false, fmt.Errorf("look for a success of an action: %w", err)
	}
	return seen, nil
}
