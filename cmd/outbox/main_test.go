package main

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/testenv"
)

// asProgram makes the test binary be the program, for what calls it from outside.
const asProgram = "OUTBOX_TEST_AS_PROGRAM"

// TestMain fails if a goroutine is left when all tests have ended.
func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	goleak.VerifyTestMain(testenv.Main(m))
}
