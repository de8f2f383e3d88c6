package outbox

import (
	"context"
	"fmt"
	"maps"
	"math"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/configdoc"
	"github.com/outboxgo/outbox/internal/watch"
)

// The comment of a field names the default that the code has.
func TestDefaultsAreDocumented(t *testing.T) {
	t.Parallel()
	structs, err := configdoc.Structs(".")
	require.NoError(t, err)
	documented := map[string]string{}
	for _, s := range structs {
		for _, f := range s.Fields {
			documented[s.Name+"."+f.Name] = f.Default
		}
	}
	checked := 0
	for name, cfg := range map[string]any{
		"RecorderConfig": RecorderConfig{}.withDefaults(), "RelayConfig": RelayConfig{}.withDefaults(), "BreakerConfig": BreakerConfig{}.withDefaults(),
		"RetentionConfig": RetentionConfig{}.withDefaults(), "AlertConfig": watch.Settings{}.WithDefaults(), "ConsumerConfig": ConsumerConfig{}.withDefaults(), "WorkerConfig": WorkerConfig{}.withDefaults(),
		"RetryPolicy": HandlerConfig{}.withDefaults().Retry,
	} {
		checked += checkDefaults(t, documented, name, reflect.ValueOf(cfg))
	}
	require.GreaterOrEqual(t, checked, 43)
}

func checkDefaults(t *testing.T, documented map[string]string, config string, cfg reflect.Value) (checked int) {
	t.Helper()
	for i := range cfg.NumField() {
		if cfg.Type().Field(i).Anonymous {
			checked += checkDefaults(t, ofEach(documented, config), cfg.Type().Field(i).Name, cfg.Field(i))
			continue
		}
		name := config + "." + cfg.Type().Field(i).Name
		want := ""
		switch v := cfg.Field(i).Interface().(type) {
		case time.Duration:
			want = v.String()
		case int, int64, float64, string:
			want = fmt.Sprint(v)
		}
		said := documented[name]
		if want == "" || said == "required" {
			continue
		}
		require.Equal(t, want, parseDefault(t, said, cfg.Field(i).Type()), "%s: the comment says %q", name, said)
		checked++
	}
	return checked
}

// ofEach returns the defaults of the fields that a configuration embeds: "4 for a worker and no bound for a consumer"
// is 4 in a WorkerConfig and 0 in a ConsumerConfig.
func ofEach(documented map[string]string, config string) map[string]string {
	of := maps.Clone(documented)
	for name, said := range documented {
		worker, consumer, differ := strings.Cut(said, " for a worker and ")
		switch {
		case differ && config == "WorkerConfig":
			of[name] = worker
		case differ && strings.HasPrefix(consumer, "no bound ") && strings.HasSuffix(consumer, " for a consumer"):
			of[name] = "0"
		}
	}
	return of
}

// parseDefault reads a default as comments write it: 500 ms, 7 days, 983,040 (960 KiB).
func parseDefault(t *testing.T, text string, typ reflect.Type) string {
	t.Helper()
	if typ.Kind() == reflect.String {
		return text
	}
	number, rest, _ := strings.Cut(text, " ")
	number = strings.ReplaceAll(number, ",", "")
	if typ != reflect.TypeFor[time.Duration]() {
		return number
	}
	n, err := strconv.Atoi(number)
	require.NoError(t, err, text)
	unit, _, _ := strings.Cut(rest, " ")
	units := map[string]time.Duration{
		"ms": time.Millisecond, "s": time.Second, "min": time.Minute, "h": time.Hour, "days": 24 * time.Hour,
	}
	require.Contains(t, units, unit, text)
	return (time.Duration(n) * units[unit]).String()
}

func TestBreakerConfig(t *testing.T) {
	t.Parallel()
	require.Equal(t, BreakerConfig{Window: 10, FailureRate: 0.5, OpenFor: 30 * time.Second},
		BreakerConfig{}.withDefaults())
	errorOf := func(c BreakerConfig) error { return c.withDefaults().validate() }
	require.NoError(t, errorOf(BreakerConfig{}))
	require.NoError(t, errorOf(BreakerConfig{Window: 1, FailureRate: 1, OpenFor: 1}))

	err := errorOf(BreakerConfig{Window: -1, FailureRate: -0.1, OpenFor: -1})
	for _, field := range []string{"Window", "FailureRate", "OpenFor"} {
		require.ErrorContains(t, err, "field Breaker."+field+" is -")
	}
	require.ErrorContains(t, errorOf(BreakerConfig{Window: 10_001}), "field Breaker.Window is 10001: at most 10000")
	require.ErrorContains(t, BreakerConfig{}.validate(), "field Breaker.FailureRate is 0")
	for _, rate := range []float64{1.01, math.NaN(), math.Inf(1)} {
		require.ErrorContains(t, errorOf(BreakerConfig{FailureRate: rate}), "field Breaker.FailureRate is ")
	}
}

func TestRetentionConfig(t *testing.T) {
	t.Parallel()
	require.Equal(t, RetentionConfig{PublishedFor: 7 * day, CursorsFor: 7 * day, ResolvedFor: 30 * day, HandledFor: 31 * day, AuditedFor: 365 * day, DeliveredFor: 7 * day}, RetentionConfig{}.withDefaults())
	require.NoError(t, RetentionConfig{}.withDefaults().validate())
	require.NoError(t, RetentionConfig{PublishedFor: Forever, CursorsFor: Forever, ResolvedFor: Forever, HandledFor: Forever, AuditedFor: Forever, DeliveredFor: Forever}.withDefaults().validate())

	err := RetentionConfig{PublishedFor: -1, CursorsFor: -1, ResolvedFor: -1, HandledFor: -1, AuditedFor: -1, DeliveredFor: -1}.validate()
	for _, field := range []string{"PublishedFor", "CursorsFor", "ResolvedFor", "HandledFor", "AuditedFor", "DeliveredFor"} {
		require.ErrorContains(t, err, "field Retention."+field+" is -1")
	}
	none := func(context.Context, pgx.Tx, []ArchivedEvent) error { return nil }
	require.ErrorContains(t, RetentionConfig{PublishedFor: Forever, Archive: none}.withDefaults().validate(), "field Retention.Archive is set")
	_, err = NewRelay(nil, nil, RelayConfig{Retention: RetentionConfig{PublishedFor: -1}})
	require.ErrorContains(t, err, "field Retention.PublishedFor is -1ns")

	rules := RetentionConfig{}.withDefaults().rules()
	require.Equal(t, 10*time.Minute, rules.Interval())
	require.Equal(t, 50*time.Millisecond, rules.PauseAfter(time.Millisecond))
	require.Equal(t, 4*time.Second, rules.PauseAfter(time.Second), "it gives way")
	rules.ResolvedFor = time.Second
	require.Equal(t, 100*time.Millisecond, rules.Interval(), "a tenth of the shortest duration")
	rules.ResolvedFor = 1
	require.Equal(t, 5*time.Millisecond, rules.Interval())
	require.Equal(t, 5*time.Millisecond, rules.PauseAfter(0))
}

func TestRetryDefaults(t *testing.T) {
	t.Parallel()
	cfg := RelayConfig{}.withDefaults()
	require.Equal(t, 5*time.Second, cfg.RetryInterval)
	require.Equal(t, RetryPolicy{MaxRetries: 10, RetryWait: time.Second, MaxRetryWait: 300 * time.Second}, cfg.Retry)
	require.Equal(t, BreakerConfig{Window: 10, FailureRate: 0.5, OpenFor: 30 * time.Second}, cfg.Breaker)
}
