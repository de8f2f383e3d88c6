package main

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/outboxgo/outbox/examples/transactions/internal/shoptest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTransactions(t *testing.T) { shoptest.Test(t, open) }
