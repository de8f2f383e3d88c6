package testenv

import (
	"os"
	"testing"
)

// QuickVar is set by `make test`, which leaves out the tests that call [Long].
const QuickVar = "OUTBOX_TEST_QUICK"

// Long marks a test that takes more than 5 s alone, or that belongs to a suite of faults. `make test` skips
// such a test with a message; `make test-all` runs it. Without `make` it runs.
func Long(t testing.TB) {
	t.Helper()
	if Quick() {
		t.Skip("left for make test-all")
	}
}

// Quick reports whether `make test` runs the tests.
func Quick() bool { return os.Getenv(QuickVar) != "" }
