package outboxarchive_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/testenv"
)

// TestMain fails if a goroutine is left when all tests have ended. In a child process of a test, it
// archives until the process is killed.
func TestMain(m *testing.M) {
	if os.Getenv(childVar) != "" {
		archiveUntilKilled()
		return
	}
	goleak.VerifyTestMain(testenv.Main(m))
}
