package cursor_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/cursor"
)

// replaceRow gives the id of row 1 to another event, as after a crash that has lost row 1.
func (d *fixture) replaceRow(t *testing.T, change string) {
	t.Helper()
	d.Exec(t, `UPDATE {schema}.outbox_failed SET `+change+` WHERE id = 1`)
}

// reused are the events that may get the id of a row that a crash has lost.
var reused = map[string]string{
	"another event": `outbox_id = 77, event_id = gen_random_uuid()`, "an event of another relay": `relay = 'other'`,
	"an event whose id is given out again": `event_id = gen_random_uuid()`,
}

// readRow1 returns the event of row 1, read to be retried.
func readRow1(t *testing.T, failed *cursor.Failed) []cursor.FailedRow {
	t.Helper()
	found, err := failed.Due(context.Background(), "", false, pgtype.Timestamptz{}, nil)
	require.NoError(t, err)
	events, err := failed.ReadRows(context.Background(), found[:1], true)
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.EqualValues(t, 1, events[0].Row)
	return events
}

// A crash loses rows that were not flushed, and their ids are given out again, while the lease stays. The result of
// the event that had the row before says nothing about the one that has it now, whether that one is locked or not.
func TestResultOfAnotherEventOfTheRow(t *testing.T) {
	t.Parallel()
	for name, change := range reused {
		for _, status := range []string{statusResolved, statusFailed, statusDead} {
			t.Run(fmt.Sprint(name, ": ", status), func(t *testing.T) {
				t.Parallel()
				d, ctx := newFixture(t), context.Background()
				failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
				l, err := d.leases.Acquire(ctx)
				require.NoError(t, err)
				d.InsertParked(t, 1, 1)
				event := readRow1(t, failed)
				d.replaceRow(t, change)
				before := d.rows(t, `f::text`)
				save := func() {
					for _, keep := range []bool{true, false} {
						result := cursor.RetryResult{Event: &event[0], Row: 1, Status: status, Count: 1, Class: "c", Err: check.ErrEmpty}
						saved, err := failed.SaveResults(ctx, l, []cursor.RetryResult{result}, keep)
						require.NoError(t, err)
						require.Empty(t, saved.Rows)
						require.Empty(t, saved.Locked)
						require.Empty(t, saved.Headless)
						require.Equal(t, before, d.rows(t, `f::text`))
					}
				}
				save()
				d.lock(t, `id = 1`)
				save()
			})
		}
	}
}

// A row that was found is not read once it is that of another event.
func TestReadAnotherEventOfTheRow(t *testing.T) {
	t.Parallel()
	for name, change := range reused {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d, ctx := newFixture(t), context.Background()
			failed := cursor.NewFailed(d.DB, d.Schema, "default", false)
			d.InsertParked(t, 1, 1)
			found, err := failed.Due(ctx, "", false, pgtype.Timestamptz{}, nil)
			require.NoError(t, err)
			d.replaceRow(t, change)
			events, err := failed.ReadRows(ctx, found, true)
			require.NoError(t, err)
			require.Empty(t, events)
		})
	}
}
