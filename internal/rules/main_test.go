// Package rules has the tests of what holds for the whole repository: imports and sizes of packages,
// words, configurations, and what the documents say. They run in the root of the repository.
package rules

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/testenv"
)

// TestMain runs the tests in the root of the repository, and fails if a goroutine is left.
func TestMain(m *testing.M) {
	if err := os.Chdir("../.."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	goleak.VerifyTestMain(testenv.Main(m))
}
