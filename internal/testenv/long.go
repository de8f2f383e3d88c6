package testenv

import (
	"os"
	"testing"
)

// quick reports whether `make test` runs the tests.
func quick() bool { return os.Getenv("OUTBOX_TEST_QUICK") != "" }

// Long marks a test that takes more than 5 s alone, or that belongs to a suite of faults. `make test` skips
// such a test with a message; `make test-all` runs it. Without `make` it runs.
func Long(t testing.TB) {
	t.Helper()
	if quick() {
		t.Skip("left for make test-all")
	}
}

// Quick reports whether `make test` runs a test, which it then makes shorter.
func Quick(t testing.TB) bool {
	t.Helper()
	if quick() {
		t.Log("the whole length is left for make test-all")
	}
	return quick()
}
