package outboxotel_test

import (
	"context"
	"log/slog"
	"net/http"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/outboxgo/outbox/outboxotel"
)

// A service with metrics and traces. A Telemetry uses OpenTelemetry's global providers
// if it is given none.
func Example() {
	_ = func(db *pgxpool.Pool, kafka []kgo.Opt, events *outbox.Registry, countSale outbox.Handler) {
		tel := must(outboxotel.New(outboxotel.Config{}))
		rec := must(outbox.NewRecorder(events, tel.Recorder(outbox.RecorderConfig{})))
		relay := must(outbox.NewRelay(db, kafka, tel.Relay(outbox.RelayConfig{})))
		sales := must(outbox.NewConsumer(db, kafka, events, tel.Consumer(outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{Group: "sales"}}), countSale))
		tel.Watch(must(outboxops.NewInspector(db, outboxops.InspectorConfig{})), sales)
		// Events and the log lines of their handlers have the X-Trace-Id of the request.
		handler := outboxhttp.Trace(outboxhttp.TraceConfig{}, api{rec})
		slog.SetDefault(slog.New(outboxhttp.LogTrace(slog.NewJSONHandler(os.Stdout, nil))))
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

// api is the service's own handler.
type api struct{ rec *outbox.Recorder }

func (api) ServeHTTP(http.ResponseWriter, *http.Request) {}
