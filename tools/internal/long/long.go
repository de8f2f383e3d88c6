// Package long marks tests of this module that `make test` leaves for `make test-all`. The
// other modules have testenv.Long for that.
package long

import (
	"os"
	"testing"
)

// Test leaves a test out if `make test` runs it, and says so.
func Test(t testing.TB) {
	t.Helper()
	if os.Getenv("OUTBOX_TEST_QUICK") != "" {
		t.Skip("left for make test-all")
	}
}
