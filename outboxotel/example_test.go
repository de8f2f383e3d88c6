package outboxotel_test

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/outboxgo/outbox/outboxotel"
)

// A service with metrics and traces. A Telemetry uses OpenTelemetry's global providers
// if it is given none.
func Example() {
	_ = func(db *pgxpool.Pool, kafka []kgo.Opt, events *outbox.Registry, mux http.Handler) {
		tel := must(outboxotel.New(outboxotel.Config{}))
		rec := must(outbox.NewRecorder(events, tel.Recorder(outbox.RecorderConfig{})))
		relay := must(outbox.NewRelay(db, kafka, tel.Relay(outbox.RelayConfig{})))
		cfg := tel.Consumer("sales", outbox.ConsumerConfig{})
		sales := must(outbox.NewConsumer(db, kafka, events, "sales", cfg, outbox.Handle("SALE_COUNTED", countSale)))
		if err := errors.Join(tel.WatchDatabase(db, ""), tel.WatchConsumers(sales)); err != nil {
			log.Fatal(err)
		}
		// Events and the log lines of their handlers have the X-Trace-Id of the request.
		handler := outboxhttp.Trace(outboxhttp.TraceConfig{}, mux)
		slog.SetDefault(slog.New(outboxhttp.LogTrace(slog.NewJSONHandler(os.Stdout, nil))))
		_ = rec // for the handlers of mux
		go func() { _ = sales.Run(context.Background()) }()
		go func() { _ = relay.Run(context.Background()) }()
		_ = http.ListenAndServe("127.0.0.1:8080", handler)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

type orderPlaced struct{ at time.Time }

func (e orderPlaced) OccurredAt() time.Time { return e.at }

func countSale(context.Context, pgx.Tx, orderPlaced, outbox.Metadata) error { return nil }
