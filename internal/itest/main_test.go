// Package itest has the tests of the public API that need PostgreSQL or Kafka. The beginning of a
// file's name is its theme: record, relay, consumer, worker, handler, migrate, roles.
package itest

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/internal/testenv"
)

// TestMain fails if a goroutine is left when all tests have ended.
func TestMain(m *testing.M) { goleak.VerifyTestMain(testenv.Main(m)) }
