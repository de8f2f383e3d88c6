package rules

import (
	"cmp"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/configdoc"
)

var update = flag.Bool("update", false, "write docs/configuration.md")

const configurationIntro = `# Configuration

Every field of every configuration, from the comments in the source. All zero values are ready for production, unless a field is required. Without another
default, a slice, map or function is empty, and a bool is false. Durations are Go's ` + "`time.Duration`" + `. A constructor refuses a negative value unless its field says otherwise,
and its error names every bad field.

Many configurations have ` + "`Schema`" + `, the schema of the tables of outbox; default: public. It is not repeated below.
`

// configurations come first in docs/configuration.md, in the order an event lives; the
// others follow.
var configurations = []string{
	"RecorderConfig", "RelayConfig", "BreakerConfig", "RetentionConfig", "AlertConfig", "HandlerConfig", "RetryPolicy", "ConsumerConfig", "WorkerConfig", "WakerConfig", "MigrateConfig",
}

// docs/configuration.md is what the comments say. After a change of one,
// go test -run TestConfigurationDoc ./internal/rules -update writes it anew.
func TestConfigurationDoc(t *testing.T) {
	t.Parallel()
	const path = "docs/configuration.md"
	var b strings.Builder
	b.WriteString(configurationIntro)
	dirs, err := filepath.Glob("outbox*")
	require.NoError(t, err)
	for _, dir := range append([]string{"."}, slices.DeleteFunc(dirs, isFile)...) {
		structs, err := configdoc.Structs(dir)
		require.NoError(t, err)
		slices.SortStableFunc(structs, func(a, b configdoc.Struct) int { return cmp.Compare(place(a), place(b)) })
		for _, s := range structs {
			writeConfig(t, &b, strings.TrimPrefix(dir, "."), s)
		}
	}
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(b.String()), 0o644))
	}
	doc, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, b.String(), string(doc), "run go test -run TestConfigurationDoc ./internal/rules -update")
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err != nil || !info.IsDir()
}

// place is where a configuration stands on the page.
func place(s configdoc.Struct) int {
	if i := slices.Index(configurations, s.Name); i >= 0 {
		return i
	}
	return len(configurations)
}

func writeConfig(t *testing.T, b *strings.Builder, dir string, s configdoc.Struct) {
	t.Helper()
	fields := slices.DeleteFunc(s.Fields, func(f configdoc.Field) bool {
		return f.Text == "Schema holds the tables of outbox." && f.Default == "public"
	})
	if len(fields) == 0 {
		return // the introduction has it
	}
	fmt.Fprintf(b, "\n## %s.%s\n\n%s\n\n", cmp.Or(dir, "outbox"), s.Name, strings.ReplaceAll(s.Text, " The zero value is ready for production.", ""))
	for _, f := range fields {
		known := impliedDefault(f)
		require.True(t, known || f.Default != "", "the comment of %s.%s does not end with the default", s.Name, f.Name)
		fmt.Fprintf(b, "- **%s** `%s`. %s", f.Name, f.Type, withoutName(f))
		switch {
		case f.Default == "required":
			b.WriteString(" Required.")
		case f.Default != "" && f.Default != "none":
			fmt.Fprintf(b, " Default: %s.", f.Default)
		}
		b.WriteString("\n")
	}
}

// withoutName returns the comment of a field as a sentence of a list whose entries begin with the name of the field.
func withoutName(f configdoc.Field) string {
	text, found := strings.CutPrefix(f.Text, f.Name+" ")
	if !found {
		return f.Text
	}
	if strings.HasPrefix(text, "are ") {
		return f.Text
	}
	text = strings.TrimPrefix(text, "is ")
	return strings.ToUpper(text[:1]) + text[1:]
}

// impliedDefault reports whether the comment of a field need not say its default.
func impliedDefault(f configdoc.Field) bool {
	return f.Type == "bool" || strings.HasSuffix(f.Type, "Config") || strings.HasSuffix(f.Type, "Hooks") ||
		strings.HasPrefix(f.Type, "[]") || strings.HasPrefix(f.Type, "map[")
}
