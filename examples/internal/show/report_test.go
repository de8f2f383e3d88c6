package show

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A number that may still change is wrong only in a run that has finished.
func TestConclude(t *testing.T) {
	t.Parallel()
	late, early := Equal("read", 1, "written", 2).AtEnd(), Equal("written", 2, "asked for", 3)
	for _, tt := range []struct {
		name     string
		lines    Equations
		finished bool
		err      error
		want     string
	}{
		{"right", Equations{Equal("read", 2, "written", 2), None("repeats", 0)}, true, nil, "\nAll is well.\n"},
		{"right, although the run did not finish", Equations{Equal("read", 2, "written", 2)}, false, nil, "\nAll is well.\n"},
		{"wrong", Equations{late}, true, ErrWrong, "written  wrong\n\nThe numbers do not add up.\n"},
		{"not finished", Equations{late, None("open", 1).AtEnd()}, false, ErrUnfinished, "none  not finished yet\n\nThe run ended before all was done"},
		{"wrong, and not finished", Equations{early, late}, false, ErrWrong, "asked for  wrong\n       1  read  "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var out strings.Builder
			require.ErrorIs(t, tt.lines.Conclude(&out, tt.finished, "All is well."), tt.err)
			require.Contains(t, out.String(), tt.want)
		})
	}
}
