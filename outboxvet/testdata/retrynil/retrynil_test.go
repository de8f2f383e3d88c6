package retrynil

import (
	"testing"

	"github.com/outboxgo/outbox"
)

func TestPermanent(t *testing.T) {
	if err := outbox.Permanent(nil); err != nil {
		t.Fatal(err)
	}
}
