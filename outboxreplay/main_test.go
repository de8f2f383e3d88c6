package outboxreplay_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/testenv"
)

// TestMain fails if a goroutine is left when all tests have ended.
func TestMain(m *testing.M) {
	if os.Getenv(childVar) != "" {
		startUntilKilled()
		return
	}
	goleak.VerifyTestMain(testenv.Main(m))
}
