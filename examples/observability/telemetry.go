package main

import (
	"context"
	"errors"
	"net/http"

	"github.com/outboxgo/outbox/outboxotel"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/otlptranslator"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
)

// telemetry is what a service has of OpenTelemetry.
type telemetry struct {
	*outboxotel.Telemetry
	meters  *metric.MeterProvider
	tracers *sdk.TracerProvider
	scraped http.Handler // /metrics
}

// newTelemetry makes the providers. Without config.spans spans go nowhere, but trace
// ids travel all the same. In a service, send them to a collector, and sample: one
// span for each of 5,000 events in a batch is not free.
func newTelemetry(cfg config) (*telemetry, error) {
	registry := prometheus.NewRegistry()
	reader, err := exporter.New(exporter.WithRegisterer(registry), exporter.WithoutScopeInfo(),
		exporter.WithTranslationStrategy(otlptranslator.UnderscoreEscapingWithSuffixes)) // what every Prometheus reads
	if err != nil {
		return nil, err
	}
	about := resource.NewSchemaless(semconv.ServiceName("observability"))
	t := &telemetry{
		meters:  metric.NewMeterProvider(metric.WithReader(reader), metric.WithResource(about)),
		scraped: promhttp.HandlerFor(registry, promhttp.HandlerOpts{EnableOpenMetrics: true}),
	}
	spans := []sdk.TracerProviderOption{sdk.WithResource(about)}
	if cfg.spans != nil {
		spans = append(spans, sdk.WithBatcher(cfg.spans))
	}
	t.tracers = sdk.NewTracerProvider(spans...)
	t.Telemetry, err = outboxotel.New(outboxotel.Config{MeterProvider: t.meters, TracerProvider: t.tracers, Interval: cfg.interval, StaleAfter: cfg.stale})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// shutdown sends what is left.
func (t *telemetry) shutdown(ctx context.Context) error {
	return errors.Join(t.Close(), t.tracers.Shutdown(ctx), t.meters.Shutdown(ctx))
}

// traced makes a span for each request, in the trace that the caller names. A service
// would have this from go.opentelemetry.io/contrib/…/otelhttp.
func (t *telemetry) traced(next http.Handler) http.Handler {
	tracer := t.tracers.Tracer("github.com/outboxgo/outbox/examples/observability")
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
		ctx, span := tracer.Start(ctx, r.Pattern, trace.WithSpanKind(trace.SpanKindServer))
		defer span.End()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}
