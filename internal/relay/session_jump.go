package relay

import (
	"context"
	"fmt"

	"github.com/outboxgo/outbox/internal/cursor"
)

// maxStale is how often in a row the cursor may be stale. A crash or another process changes it once.
const maxStale = 3

// awaitFresh waits after the cursor was stale again and again, and reports that as an outage of PostgreSQL.
func (s *Session) awaitFresh(ctx context.Context) {
	if s.stale++; s.stale <= maxStale {
		return
	}
	s.Outage.Report(fmt.Errorf("%w each time since it was loaded, %d times in a row: perhaps a pooler sends the statement that loads it "+
		"to a standby, and the next one to another server", cursor.ErrStale, s.stale))
	s.sleep(ctx, s.Outage.Backoff())
}

// isFresh records that the cursor was not stale.
func (s *Session) isFresh() {
	if s.stale > maxStale {
		s.Outage.Report(nil)
	}
	s.stale = 0
}

// reportJump logs that the cursor is not where the session had left it.
func (s *Session) reportJump(known int64) error {
	found := s.pos.CursorID
	switch {
	case found == known: // another server, or the same one restarted
	case found > known:
		s.Log.Warn("outbox: cursor is not where it was left; some events may be sent twice", "left", known, "found", found)
	default:
		return s.reportLostRows(known, found)
	}
	return nil
}

// reportLostRows logs that PostgreSQL has forgotten rows of the cursor, which need no fsync, and whether it has
// forgotten events that were sent since, too.
func (s *Session) reportLostRows(known, found int64) error {
	ids, created := s.recent.since(found)
	there := 0
	err := s.try(func(ctx context.Context) (err error) {
		there, err = s.Cursors.Count(ctx, ids, created)
		return err
	})
	if err != nil {
		return err
	}
	args := []any{"left", known, "found", found, "sent_since", len(ids), "missing", len(ids) - there}
	if there < len(ids) {
		s.Log.Error("outbox: PostgreSQL has lost the newest rows of the cursor, and transactions whose events were sent", args...)
	} else {
		s.Log.Warn("outbox: PostgreSQL has lost the newest rows of the cursor, but no event that was sent; events since then are sent again", args...)
	}
	return nil
}
