package itest

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/exactly"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/testenv"
)

// commitAgain commits a transaction in which the relay has sent the event of a row of outbox_failed again, and is gone
// before it removes the row.
func (f *exactlyFixture) commitAgain(t *testing.T, row int64) {
	t.Helper()
	ctx, cancel := context.WithTimeout(background, testenv.Patience)
	defer cancel()
	system, database, err := tables.Identity(ctx, f.db)
	require.NoError(t, err)
	opts := kafka.TransactionOpts(testenv.KafkaOpts(f.brokers), 10*time.Second)
	cfg := exactly.Config{Opts: append(opts, kafka.FlushOpts(opts)...), Topic: f.cfg.ExactlyOnce, Go: func(do func()) { go do() }}
	sender := exactly.NewSender(cfg.For(system, database, f.schema, "default"))
	defer sender.Close()
	newest, _, err := sender.Start(ctx, false)
	require.NoError(t, err)
	newest.Number, newest.Again = newest.Number+1, []int64{row}
	record, err := sender.CursorRecord(newest)
	require.NoError(t, err)
	tx, err := sender.Begin(ctx)
	require.NoError(t, err)
	errs, err := tx.Send(ctx, []kgo.Record{record})
	require.NoError(t, err)
	require.NoError(t, errs[0])
	require.NoError(t, tx.Commit(ctx).Wait(ctx))
}

// The mode does not end while another transaction has locked the row of an event that was sent: without the mode, the
// event would be sent again. Once the lock is gone, the end removes the row.
func TestEndExactlyOnceBesideALock(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	f.runUntil(t, f.cfg, f.follow(t), numbered("key", 1, 20)...)
	d := &testenv.Tables{DB: f.db, Schema: f.schema}
	d.InsertParked(t, 1, 1)
	f.commitAgain(t, 1)
	operator, err := f.db.Begin(background)
	require.NoError(t, err)
	defer operator.Rollback(background)
	_, err = operator.Exec(background, f.sql(`UPDATE {s}.outbox_failed SET held = true WHERE id = 1`))
	require.NoError(t, err)
	topic := func() (topic string) {
		require.NoError(t, f.db.QueryRow(background, f.sql(`SELECT coalesce(cursor_topic, '') FROM {s}.outbox_cursor ORDER BY id DESC LIMIT 1`)).Scan(&topic))
		return topic
	}
	relay := f.relay(t, f.cfg)
	err = relay.EndExactlyOnce(background, true)
	require.True(t, pg.IsWaitInVain(err), "%v", err)
	require.ErrorContains(t, err, "rows [1] of outbox_failed")
	require.Equal(t, f.cfg.ExactlyOnce, topic())
	require.NoError(t, operator.Rollback(background))
	require.NoError(t, relay.EndExactlyOnce(background, true))
	require.Empty(t, topic())
	require.Empty(t, d.IDs(t, "outbox_failed"))
}

// The mode can be ended again, also with the same relay and after a call that has failed, and begun again.
func TestEndExactlyOnceAgain(t *testing.T) {
	t.Parallel()
	f := newExactlyFixture(t)
	reader := f.follow(t)
	events := numbered("key", 1, 20)
	f.runUntil(t, f.cfg, reader, events[:10]...)
	relay := f.relay(t, f.cfg)
	ended, cancel := context.WithCancel(background)
	cancel()
	require.Error(t, relay.EndExactlyOnce(ended, true))
	for _, readKafka := range []bool{true, true, false, false} {
		require.NoError(t, relay.EndExactlyOnce(background, readKafka))
	}
	stop := testenv.Run(t, relay.Run)
	f.commit(t, events[10:]...)
	requireArrival(t, reader, events[10:]...)
	stop()
	f.requireOnce(t, reader, events)
}
