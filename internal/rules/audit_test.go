package rules

import (
	"encoding/json"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
)

// Whatever writes into outbox_audit uses an action of tables.AuditActions, which is what the page offers. The
// description of the API, the help of the command line and the comment of the column name them all.
func TestAuditActionsAgree(t *testing.T) {
	t.Parallel()
	insert := regexp.MustCompile(`(?s)INSERT INTO (?:@schema@|\{schema\})\.outbox_audit\s*\([^)]*\)\s*(.*?)(?:\n\s*FROM|;|` + "`" + `)`)
	action := regexp.MustCompile(`'([a-z-]+)'`)
	written := map[string]bool{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (path == "examples" || d.Name() == "internal" && strings.HasPrefix(path, "outboxadmin") || path != "." && strings.HasPrefix(d.Name(), ".")):
			return fs.SkipDir
		case d.IsDir(), strings.HasSuffix(path, "_test.go"), filepath.Ext(path) != ".go" && filepath.Ext(path) != ".sql":
			return nil
		}
		for _, m := range insert.FindAllStringSubmatch(read(t, path), -1) {
			found := action.FindStringSubmatch(m[1])
			require.NotNil(t, found, "%s: %s", path, m[0])
			written[found[1]] = true
		}
		return nil
	}))
	for name := range written {
		require.Contains(t, tables.AuditActions, name)
	}
	require.Len(t, written, len(tables.AuditActions), "of %q", tables.AuditActions)

	var api struct {
		Components struct {
			Schemas struct {
				Audit struct {
					Properties struct {
						Action struct{ Enum []string }
					}
				}
			}
		}
	}
	require.NoError(t, json.Unmarshal([]byte(read(t, "outboxadmin/openapi.json")), &api))
	for _, place := range []struct{ name, text string }{
		{"openapi.json", strings.Join(api.Components.Schemas.Audit.Properties.Action.Enum, " ")},
		{"outboxops.AuditEntry", between(t, read(t, "outboxops/audit.go"), "	// Action is one of these:", "	Action string")},
		{"the comment of the column", between(t, read(t, "migrations/0005_operators_and_audit.sql"), "COMMENT ON COLUMN outbox_audit.action IS", "COMMENT ON COLUMN outbox_audit.reason")},
		{"docs/cli.md", between(t, read(t, "docs/cli.md"), "\n## outbox audit\n", "\n## ")},
	} {
		words := regexp.MustCompile(`[a-z]+(-[a-z]+)*`).FindAllString(place.text, -1)
		var missing []string
		for _, name := range tables.AuditActions {
			if !slices.Contains(words, name) {
				missing = append(missing, name)
			}
		}
		if len(missing) > 0 {
			t.Errorf("not in %s: %q", place.name, missing)
		}
	}
}

// between returns the text between two others.
func between(t *testing.T, text, before, after string) string {
	t.Helper()
	_, text, found := strings.Cut(text, before)
	require.True(t, found, before)
	text, _, found = strings.Cut(text, after)
	require.True(t, found, after)
	return text
}
