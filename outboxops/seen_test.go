package outboxops_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxops"
)

var lee = outboxops.AuditInfo{Operator: "lee", Reason: "the customer has called"}

// seenActions are the actions on one failure.
var seenActions = map[string]func(*outboxops.Failures, outboxops.FailureID, outboxops.AuditInfo) error{
	"retry": func(f *outboxops.Failures, id outboxops.FailureID, why outboxops.AuditInfo) error {
		return f.Retry(background, id, why)
	},
	"resolve": func(f *outboxops.Failures, id outboxops.FailureID, why outboxops.AuditInfo) error {
		return f.Resolve(background, id, why)
	},
	"hold": func(f *outboxops.Failures, id outboxops.FailureID, why outboxops.AuditInfo) error {
		return f.Hold(background, id, why)
	},
	"edit": func(f *outboxops.Failures, id outboxops.FailureID, why outboxops.AuditInfo) error {
		return f.Edit(background, id, []byte(`{"n": 3}`), why)
	},
}

// deadFailures returns a dead event and a dead delivery, and what makes each dead again as a process would.
func (h *opsFixture) deadFailures(t *testing.T) map[outboxops.FailureID]func() {
	t.Helper()
	h.insertFailed(t, 4)
	event := outboxops.FailureID{Kind: outboxops.KindEvent}
	require.NoError(t, h.db.QueryRow(background, h.sql(`SELECT id FROM {schema}.outbox_failed WHERE status = 'dead'`)).Scan(&event.Number))
	of := delivery(h.deliver(t, "k", "D")[0])
	return map[outboxops.FailureID]func(){
		event: func() {
			h.exec(t, `UPDATE {schema}.outbox_failed SET status = 'dead', retry_count = retry_count + 1, next_retry_at = now() WHERE id = $1`, event.Number)
		},
		of: func() {
			h.exec(t, `UPDATE {schema}.event_delivery SET status = 'DEAD', attempt_count = 10, processed_at = now(), last_error_code = 'timeout' WHERE id = $1`, of.Number)
		},
	}
}

// row returns what operators change.
func (h *opsFixture) row(t *testing.T, f *outboxops.Failures, id outboxops.FailureID) [3]any {
	t.Helper()
	row, err := f.Get(background, id)
	require.NoError(t, err)
	return [3]any{row.Status, row.Held, string(row.Payload)}
}

// An operator looks at a failure. Another one edits it, and it fails again. The action of the first one would be about
// the failure from before: it is rejected, and the failure stays as it is. What processes do, and reads of payloads,
// make no difference.
func TestActionOnAFailureThatHasChanged(t *testing.T) {
	t.Parallel()
	for name, do := range seenActions {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := newFixture(t)
			f := h.operator(t)
			for id, die := range h.deadFailures(t) {
				seen, err := f.Get(background, id)
				require.NoError(t, err)
				require.NotEmpty(t, seen.Seen)
				require.NoError(t, f.Edit(background, id, []byte(`{"n": 2}`), lee))
				die()
				before, audited := h.row(t, f, id), h.count(t, "outbox_audit")
				why := kim
				why.Seen = seen.Seen
				err = do(f, id, why)
				require.ErrorIs(t, err, outboxops.ErrStatus, "%v", id)
				require.ErrorContains(t, err, "after it was read, lee did this: ")
				require.ErrorIs(t, f.CheckEdit(background, id, []byte(`{"n": 3}`), why), outboxops.ErrStatus)
				require.Equal(t, before, h.row(t, f, id))
				require.Equal(t, audited, h.count(t, "outbox_audit"))

				fresh, err := f.Get(background, id)
				require.NoError(t, err)
				require.NoError(t, f.AuditRead(background, id, lee))
				die()
				why.Seen = fresh.Seen
				require.NoError(t, do(f, id, why), "%v", id)
				require.ErrorIs(t, do(f, id, why), outboxops.ErrStatus, "an action of one's own counts too")
			}
		})
	}
}

// A hold is an action on the key of an event: who has not seen it would send the event.
func TestActionOnAKeyThatIsHeld(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	for id := range h.deadFailures(t) {
		seen, err := f.Get(background, id)
		require.NoError(t, err)
		require.NoError(t, f.Hold(background, id, lee))
		why := kim
		why.Seen = seen.Seen
		err = f.Retry(background, id, why)
		require.ErrorIs(t, err, outboxops.ErrStatus)
		require.ErrorContains(t, err, "lee did this: hold")
		require.True(t, h.row(t, f, id)[1].(bool))
	}
}

// The edit of another operator is committed while an action waits for the row.
func TestActionWhileAnotherIsCommitted(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a transaction that is left open
	h := newFixture(t)
	f := h.operator(t)
	for id := range h.deadFailures(t) {
		tx, err := h.db.Begin(background)
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(background) }()
		edit := map[outboxops.Kind]string{outboxops.KindEvent: "outbox_edit_failed", outboxops.KindDelivery: "outbox_edit_delivery"}[id.Kind]
		_, err = tx.Exec(background, h.sql(`SELECT {schema}.`+edit+`($1, convert_to('{"n": 2}', 'UTF8'), 'lee', 'why')`), id.Number)
		require.NoError(t, err)
		seen, err := f.Get(background, id)
		require.NoError(t, err)
		require.Equal(t, outbox.StatusDead, seen.Status)
		why := kim
		why.Seen = seen.Seen
		ended := make(chan error, 1)
		go func() { ended <- f.Resolve(background, id, why) }()
		h.awaitBlocked(t, tx)
		require.NoError(t, tx.Commit(background))
		require.ErrorIs(t, <-ended, outboxops.ErrStatus)
		require.NotEqual(t, outbox.StatusResolved, h.row(t, f, id)[0])
	}
}

// awaitBlocked waits until a session waits for a transaction.
func (h *opsFixture) awaitBlocked(t *testing.T, tx pgx.Tx) {
	t.Helper()
	require.Eventually(t, func() bool {
		var blocked bool
		err := h.db.QueryRow(background, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))`, int32(tx.Conn().PgConn().PID())).Scan(&blocked)
		return err == nil && blocked
	}, testenv.Patience, testenv.Patience/1000)
}

func TestSeenIsChecked(t *testing.T) {
	t.Parallel()
	h := newFixture(t)
	f := h.operator(t)
	why := kim
	why.Seen = "yesterday"
	err := f.Retry(background, delivery(1), why)
	require.ErrorIs(t, err, outbox.ErrMalformed)
	require.ErrorContains(t, err, `field Seen is malformed: "yesterday" is no snapshot`)
}
