package lease

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/testenv"
)

// A try without a session on which to take the lock says nothing about the lock, and ends no outage of it.
func TestNoSessionEndsNoOutage(t *testing.T) {
	t.Parallel()
	db, schema := testenv.Migrated(t)
	log := outage.NewLog(slog.New(slog.DiscardHandler), "the lock of the lease")
	log.Report(errors.New("permission denied"))
	u := NewUpkeep(NewStore(db, schema, "default", time.Minute), Leadership{Lease: &Lease{}, Held: t.Context()}, log)
	require.Nil(t, u.takeLock())
	require.NotNil(t, log.Current())
}
