package outboxsql_test

import (
	"testing"

	"go.uber.org/goleak"
)

// TestMain fails if a goroutine is left when all tests have ended: that of a [sql.DB], for example.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
