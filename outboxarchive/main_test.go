package outboxarchive_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/testenv"
)

// TestMain fails if a goroutine is left when all tests have ended. In a process that a test started it
// archives until it is killed.
func TestMain(m *testing.M) {
	if os.Getenv(childVar) != "" {
		archiveUntilKilled()
		return
	}
	goleak.VerifyTestMain(testenv.Main(m))
}
