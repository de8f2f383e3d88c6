package outbox_test

import (
	"context"
	"log"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/outboxgo/outbox"
)

// Migrate creates the tables, or brings them up to this release. Call it at the start of
// the service; several processes may do so at the same time.
func ExampleMigrate() {
	if err := outbox.Migrate(ctx, db, outbox.MigrateConfig{}); err != nil {
		log.Fatal(err)
	}
}

// The event is stored if and only if the transaction commits.
func ExampleRecorder_Record() {
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `UPDATE orders SET paid = true WHERE id = $1`, "O-1"); err != nil {
			return err
		}
		return rec.Record(ctx, tx, OrderPaid{OrderID: "O-1", ProductID: "P-7", Quantity: 2, At: time.Now()})
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Queue adds one statement to a batch that is sent anyway, so recording costs no round
// trip of its own.
func ExampleRecorder_Queue() {
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		var batch pgx.Batch
		batch.Queue(`UPDATE orders SET paid = true WHERE id = $1`, "O-2")
		if err := rec.Queue(ctx, &batch, OrderPaid{OrderID: "O-2", ProductID: "P-7", Quantity: 1, At: time.Now()}); err != nil {
			return err
		}
		return tx.SendBatch(ctx, &batch).Close()
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A reminder is recorded with the order, and sent a day later unless the order is paid before.
func ExampleRecorder_Cancel() {
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		log.Fatal(err)
	}
	reminder := uuid.New()
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		event := OrderPaid{OrderID: "O-1", ProductID: "P-7", Quantity: 2, At: time.Now()}
		return rec.Record(ctx, tx, outbox.With(event, outbox.EventOptions{ID: reminder, NotBefore: time.Now().Add(24 * time.Hour)}))
	})
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		inTime, err := rec.Cancel(ctx, tx, reminder)
		if err == nil && !inTime {
			log.Print("the reminder was sent already")
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Every process of the service runs a relay: one of them works, the others stand by.
func ExampleRelay_Run() {
	relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if err := relay.Run(ctx); err != nil { // blocks until ctx is cancelled and the batch in flight is finished
		log.Fatal(err)
	}
}

// A relay that is woken after a commit sends the event at once instead of at its next poll.
func ExampleWaker_InTx() {
	relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{})
	if err != nil {
		log.Fatal(err)
	}
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		log.Fatal(err)
	}
	// In the process of a relay or a worker. It commits, and then wakes the relay that leads, wherever that is.
	err = relay.Waker().InTx(ctx, func(tx pgx.Tx) error {
		return rec.Record(ctx, tx, OrderPaid{OrderID: "O-3", ProductID: "P-7", Quantity: 1, At: time.Now()})
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A process that only records makes a waker of its own.
func ExampleNewWaker() {
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{})
	if err != nil {
		log.Fatal(err)
	}
	waker, err := outbox.NewWaker(db, outbox.WakerConfig{})
	if err != nil {
		log.Fatal(err)
	}
	go func() { _ = waker.Run(ctx) }() // until ctx is cancelled; it returns no error then

	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		return rec.Record(ctx, tx, OrderPaid{OrderID: "O-4", ProductID: "P-7", Quantity: 1, At: time.Now()})
	})
	if err != nil {
		log.Fatal(err)
	}
	waker.Wake() // after the commit, not before; InTx does both
}

// Health answers without asking PostgreSQL or Kafka, so a probe may call it often.
func ExampleRelay_Health() {
	relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{})
	if err != nil {
		log.Fatal(err)
	}
	if h := relay.Health(); !h.Works {
		slog.Warn("the relay does not work", "relay", h.Relay, "live", h.Live, "ready", h.Ready, "reasons", h.Reasons)
	}
}

// A service that consumes and has no relay on its schema removes old notes of what its
// groups have handled by itself.
func ExampleCleanHandled() {
	gone, err := outbox.CleanHandled(ctx, db, "", outbox.RetentionConfig{HandledFor: 45 * 24 * time.Hour})
	if err != nil {
		log.Fatal(err)
	}
	slog.Info("notes of handled events removed", "rows", gone)
}

// pager is an Alerter that pages the person on call about events that died.
type pager struct {
	call func(ctx context.Context, text string) error
}

func (p pager) Alert(ctx context.Context, a outbox.Alert) error {
	if a.Kind != outbox.AlertDead {
		return nil
	}
	return p.call(ctx, a.String()) // after an error the alert comes again at the next check
}

// An Alerter is told what an operator should know.
func ExampleAlerter() {
	relay, err := outbox.NewRelay(db, kafka, outbox.RelayConfig{
		Alerts: outbox.AlertConfig{Alerter: pager{func(_ context.Context, text string) error {
			slog.Error(text)
			return nil
		}}},
	})
	if err != nil {
		log.Fatal(err)
	}
	_ = relay
}
