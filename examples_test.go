package outbox_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// The examples that need services run here, because an example without an Output comment
// is only compiled. They log.Fatal on errors, which fails the whole test.
func TestExamples(t *testing.T) {
	// Not parallel: it sets the variables that the examples share.
	db, kafka = testenv.OtherDatabase(t), testenv.KafkaOpts(testenv.Brokers(t))
	ctx = t.Context()
	var err error
	events, err = outbox.NewRegistry("shop",
		outbox.Event("acme.order.paid.v1", "Order", OrderPaid.OrderOf),
		outbox.Event("acme.stock.depleted.v1", "Product", StockDepleted.ProductOf),
		outbox.Event("acme.stock.depleted.v2", "Product", StockDepletedV2.ProductOf),
	)
	require.NoError(t, err)
	_, err = db.Exec(ctx, `CREATE TABLE orders (id text PRIMARY KEY, paid bool)`)
	require.NoError(t, err)
	for _, example := range []func(){
		ExampleMigrate, ExampleRecorder_Record, ExampleRecorder_Queue, ExampleWaker_InTx, ExampleRelay_Health, ExampleCleanHandled,
		ExampleNewRelay,
		ExampleAlerter, ExampleHandleBatch, ExampleOncePer, ExampleInbox_Once, ExampleHandleNoTx, ExamplePermanent, ExampleRetryAfter, ExampleUpcast, ExampleMetadata, ExampleConsumerHooks,
	} {
		example()
	}

	running, stop := context.WithCancel(t.Context())
	defer stop()
	ctx = running
	ended := make(chan struct{})
	go func() { ExampleRelay_Run(); close(ended) }()
	ExampleNewWaker()
	const sqlRelayed = `SELECT count(*) FROM outbox_cursor WHERE highest_id = (SELECT max(id) FROM outbox)`
	require.Eventually(t, func() bool {
		var n int
		return db.QueryRow(t.Context(), sqlRelayed).Scan(&n) == nil && n > 0
	}, testenv.Patience, 10*time.Millisecond)
	stop()
	<-ended

	running, stop = context.WithCancel(t.Context())
	stop() // a consumer that is stopped before it begins returns at once
	ctx = running
	ExampleConsumer()

	running, stop = context.WithCancel(t.Context())
	defer stop()
	ctx = running
	worked := make(chan struct{})
	go func() { ExampleWorker(); close(worked) }()
	require.Eventually(t, func() bool {
		var done bool
		return db.QueryRow(t.Context(), `SELECT count(*) > 0 AND bool_and(status = 'DONE') FROM event_delivery`).Scan(&done) == nil && done
	}, testenv.Patience, 10*time.Millisecond)
	stop()
	<-worked
}
