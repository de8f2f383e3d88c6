package rules

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// conflictsWithoutTarget are files whose statement may ignore a row for any unique index, and why.
var conflictsWithoutTarget = map[string]string{
	"outboxarchive/table.go": "the primary key is the identity of the row, and the only unique index; roles of relays may not read its columns",
}

// A statement that ignores rows names the constraint that justifies it. Without a target it also ignores a row whose
// generated id exists, and what the row says is lost.
func TestConflictsNameTheirConstraint(t *testing.T) {
	t.Parallel()
	anyConflict := regexp.MustCompile(`(?i)ON CONFLICT\s+DO NOTHING`)
	found := map[string]bool{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (path == "examples" || path != "." && strings.HasPrefix(d.Name(), ".")):
			return fs.SkipDir
		case d.IsDir(), strings.HasSuffix(path, "_test.go"), filepath.Ext(path) != ".go" && filepath.Ext(path) != ".sql":
			return nil
		}
		if anyConflict.MatchString(read(t, path)) {
			require.Contains(t, conflictsWithoutTarget, path, "ON CONFLICT without a target")
			found[path] = true
		}
		return nil
	}))
	require.Len(t, found, len(conflictsWithoutTarget), "an exception that is not needed any more")
}
