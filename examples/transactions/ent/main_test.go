// Package ent tests the example for ent, _shop, which imports what ent generates from package schema.
package ent

import (
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// TestGenerated generates the code and runs the tests of the example, in the environment of this test.
func TestGenerated(t *testing.T) {
	testenv.Long(t)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll("_shop/ent")) })
	for _, args := range [][]string{
		{"generate", "./_shop"},
		{"test", "-count=1", "-short=" + strconv.FormatBool(testing.Short()), "./_shop"},
	} {
		out, err := exec.CommandContext(t.Context(), "go", args...).CombinedOutput()
		require.NoError(t, err, "%s", out)
		t.Logf("%s", out)
	}
}
