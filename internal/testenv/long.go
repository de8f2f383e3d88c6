package testenv

import (
	"os"
	"testing"
)

// quickVar is set by `make test`, which leaves out the tests that call [Long].
const quickVar = "OUTBOX_TEST_QUICK"

// Long marks a test that takes more than 5 s alone, or that belongs to a suite of faults. `make test` skips
// such a test with a message; `make test-all` runs it. Without `make` it runs.
func Long(t testing.TB) {
	t.Helper()
	if os.Getenv(quickVar) != "" {
		t.Skip("left for make test-all")
	}
}

// Quick reports whether `make test` runs a test, which it then makes shorter.
func Quick(t testing.TB) bool {
	t.Helper()
	quick := os.Getenv(quickVar) != ""
	if quick {
		t.Log("the whole length is left for make test-all")
	}
	return quick
}
