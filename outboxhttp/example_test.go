package outboxhttp_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxhttp"
)

// The trace id of a request is in its context, in the answer, and in every log line.
func ExampleTrace() {
	logger := slog.New(outboxhttp.LogTrace(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{} // for a line that stays the same
			}
			return a
		},
	})))
	orders := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		logger.InfoContext(r.Context(), "order placed") // and events recorded with this context carry the id
	})
	r := httptest.NewRequest(http.MethodPost, "/orders", http.NoBody)
	r.Header.Set(outboxhttp.TraceHeader, "0196b0c5-6a00-7000-8000-000000000001")
	outboxhttp.Trace(outboxhttp.TraceConfig{}, orders).ServeHTTP(httptest.NewRecorder(), r)
	// Output: level=INFO msg="order placed" trace_id=0196b0c5-6a00-7000-8000-000000000001
}

// Probes ask the relays and consumers of this process, and neither PostgreSQL nor Kafka.
func ExampleReady() {
	var relay *outbox.Relay // yours
	var consumer *outbox.Consumer
	mux := http.NewServeMux()
	mux.Handle("GET /livez", outboxhttp.Live(outboxhttp.Relay(relay), outboxhttp.Consumer(consumer)))
	mux.Handle("GET /readyz", outboxhttp.Ready(outboxhttp.Relay(relay), outboxhttp.Consumer(consumer)))
}
