package main

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/testenv"
)

// asProgram makes the test binary run as the program, for tests that start a process.
const asProgram = "OUTBOX_TEST_AS_PROGRAM"

// TestMain fails if a goroutine is left when all tests have ended.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	goleak.VerifyTestMain(testenv.Main(m))
}
