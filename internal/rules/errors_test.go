package rules

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// An error to test for has no prefix: the function that returns it adds one, and what it wraps would have it twice.
func TestSentinelsHaveNoPrefix(t *testing.T) {
	t.Parallel()
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (path == "examples" || path != "." && strings.HasPrefix(d.Name(), ".")):
			return fs.SkipDir
		case d.IsDir(), strings.HasSuffix(path, "_test.go"), filepath.Ext(path) != ".go":
			return nil
		}
		if strings.Contains(read(t, path), `errors.New("outbox: `) {
			t.Errorf("%s: a sentinel that begins with outbox:", path)
		}
		return nil
	}))
}
