package main

import (
	"context"
	"errors"
	"net/http"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxotel"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/otlptranslator"
	exporter "go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/trace/noop"
)

// telemetry has the metrics of the service, as the dashboard and the alerts
// ask for them. The example observability has traces as well.
type telemetry struct {
	*outboxotel.Telemetry
	meters  *metric.MeterProvider
	scraped http.Handler // /metrics
}

func newTelemetry() (*telemetry, error) {
	registry := prometheus.NewRegistry()
	reader, err := exporter.New(exporter.WithRegisterer(registry), exporter.WithoutScopeInfo(),
		exporter.WithTranslationStrategy(otlptranslator.UnderscoreEscapingWithSuffixes)) // what every Prometheus reads
	if err != nil {
		return nil, err
	}
	t := &telemetry{meters: metric.NewMeterProvider(metric.WithReader(reader)), scraped: promhttp.HandlerFor(registry, promhttp.HandlerOpts{})}
	t.Telemetry, err = outboxotel.New(outboxotel.Config{MeterProvider: t.meters, TracerProvider: noop.NewTracerProvider()})
	return t, err
}

// watch adds what the database and Kafka say.
func (t *telemetry) watch(a *app, groups ...*outbox.Consumer) error {
	return errors.Join(t.WatchDatabase(a.db, a.id), t.WatchConsumers(groups...))
}

func (t *telemetry) shutdown(ctx context.Context) error {
	return errors.Join(t.Close(), t.meters.Shutdown(ctx))
}
