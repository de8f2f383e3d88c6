package retention_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/contain"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/retention"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The archive has the rows before they go, and what it writes commits with that.
func TestArchive(t *testing.T) {
	t.Parallel()
	d, ctx := newFixture(t), context.Background()
	d.Exec(t, `CREATE TABLE {schema}.archive (id bigint, payload text)`)
	d.Insert(t, 2)
	d.Update(t, `UPDATE {schema}.outbox SET payload = NULL, payload_bytes = '\x00ff', topic = 't', partition_key = 'p', headers = '{"a": "b"}' WHERE id = 2`)
	d.Insert(t, 1)
	d.send(t, "default")
	d.Update(t, `UPDATE {schema}.outbox SET created_at = now() - '8 days'::interval WHERE id < 3`)
	fails := errors.New("the archive is full")
	var got []retention.Row
	var full error
	r, l := d.cleaning(t, archiving(keep.BatchSize, func(ctx context.Context, tx pgx.Tx, rows []retention.Row) error {
		got = rows
		for _, e := range rows {
			if _, err := tx.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.archive VALUES ($1, $2)`, d.Schema), e.OutboxID, fmt.Sprintf("%q", e.Payload)); err != nil {
				return err
			}
		}
		return full
	}))
	full = fails
	_, err := r.Published(ctx, l, 0)
	require.ErrorIs(t, err, fails)
	require.Equal(t, 3, d.Count(t, "outbox"))
	require.Zero(t, d.Count(t, "archive"))

	full = nil
	s, err := r.Published(ctx, l, 0)
	require.NoError(t, err)
	require.EqualValues(t, 2, s.Removed)
	require.Equal(t, []int64{3}, d.IDs(t, "outbox"))
	require.Equal(t, []int64{1, 2}, d.IDs(t, "archive"))
	require.Len(t, got, 2)
	for i := range got {
		require.NotEmpty(t, got[i].EventID)
		require.WithinDuration(t, time.Now(), got[i].OccurredAt, time.Minute)
		require.WithinDuration(t, time.Now().Add(-8*day), got[i].CreatedAt, time.Minute)
		got[i].EventID, got[i].OccurredAt, got[i].CreatedAt = "", time.Time{}, time.Time{}
	}
	plain := retention.Row{OutboxID: 1, Type: "a.b.c.v1", Source: "s", AggregateType: "a", AggregateID: "k", Payload: []byte("{}"), ContentType: "application/json", JSON: true}
	other := plain
	other.JSON, other.OutboxID, other.Payload, other.Topic, other.PartitionKey, other.Headers = false, 2, []byte{0, 255}, "t", "p", []byte(`{"a": "b"}`)
	require.Equal(t, []retention.Row{plain, other}, got)

	got = nil
	s, err = r.Published(ctx, l, 0)
	require.NoError(t, err)
	require.Zero(t, s.Removed)
	require.Nil(t, got, "there is nothing to archive")
}

// An archive that does not return keeps neither rows locked nor the pool from closing, and
// what it has done does not happen.
func TestArchiveHangs(t *testing.T) {
	t.Parallel()
	d := newFixture(t)
	d.Insert(t, 2)
	d.send(t, "default")
	d.age(t, "outbox", "created_at", "8 days")
	db := testenv.Pool(t, nil)
	release, ended := make(chan struct{}), make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r, l := d.cleaning(t, archiving(keep.BatchSize, func(_ context.Context, tx pgx.Tx, _ []retention.Row) error {
		cancel() // the time for it is over
		<-release
		_, err := tx.Exec(context.Background(), `SELECT 1`)
		ended <- err
		return nil
	}))
	r.DB = db
	r.Callback = contain.NewCallback("Retention.Archive", slog.New(slog.DiscardHandler), contain.Limits{Grace: 50 * time.Millisecond}).Call
	_, err := r.Published(ctx, l, 0)
	require.ErrorIs(t, err, contain.ErrAbandoned)
	_, err = r.Published(context.Background(), l, 0)
	require.ErrorIs(t, err, contain.ErrOmitted)
	d.Exec(t, `DELETE FROM {schema}.outbox WHERE id = 1`)
	db.Close()
	close(release)
	require.Error(t, <-ended, "its connection is closed")
	require.Equal(t, []int64{2}, d.IDs(t, "outbox"))
}
