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

Every field of every configuration, from the comments in the source; a test keeps this page so. All zero values are ready for production,
unless a field is required. Durations are Go's ` + "`time.Duration`" + `. A constructor refuses a negative value unless its field says otherwise, and
its error names every bad field.
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
	fmt.Fprintf(b, "\n## %s.%s\n\n%s\n\n| field | type | default | meaning |\n|---|---|---|---|\n", cmp.Or(dir, "outbox"), s.Name, s.Text)
	for _, f := range s.Fields {
		if f.Default == "" {
			f.Default = defaultOf(f)
		}
		require.NotEmpty(t, f.Default, "the comment of %s.%s does not end with the default", s.Name, f.Name)
		fmt.Fprintf(b, "| `%s` | `%s` | %s | %s |\n", f.Name, f.Type, cell(f.Default), cell(f.Text))
	}
}

// defaultOf is the default of a field whose comment need not say it.
func defaultOf(f configdoc.Field) string {
	switch {
	case strings.HasSuffix(f.Type, "Config"):
		return "see there"
	case strings.HasSuffix(f.Type, "Hooks"), strings.HasPrefix(f.Type, "[]"), strings.HasPrefix(f.Type, "map["):
		return "none"
	case f.Type == "bool":
		return "false"
	}
	return ""
}

func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }
