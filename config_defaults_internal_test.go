package outbox

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

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
	} {
		checked += checkDefaults(t, documented, name, reflect.ValueOf(cfg))
	}
	require.GreaterOrEqual(t, checked, 55)
}

func checkDefaults(t *testing.T, documented map[string]string, config string, cfg reflect.Value) (checked int) {
	t.Helper()
	for i := range cfg.NumField() {
		if cfg.Type().Field(i).Anonymous {
			checked += checkDefaults(t, documented, cfg.Type().Field(i).Name, cfg.Field(i))
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
