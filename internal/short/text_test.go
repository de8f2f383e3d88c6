package short_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/short"
)

// A line has no character that begins another one or changes the order of characters, and at most so many bytes.
func TestLine(t *testing.T) {
	t.Parallel()
	const limit = 100
	for text, want := range map[string]string{
		"":                                     "",
		"Order 7, ünïcode ✅":                   "Order 7, ünïcode ✅",
		"a\r\nb\tc\x00d\x1b[2Je\u0085f\x7fg":   "a··b·c·d·[2Je·f·g",
		"a\u2028b\u2029c\u202ed\u200be\ufefff": "a·b·c·d·e·f",
		"a\xffb":                               "a\uFFFDb",
		strings.Repeat("x", 100):               strings.Repeat("x", 100),
		strings.Repeat("x", 101):               strings.Repeat("x", 85) + "… (101 bytes)",
		strings.Repeat("\n", 100):              strings.Repeat("·", 42) + "… (100 bytes)",
		strings.Repeat("\u2028", 1<<20):        strings.Repeat("·", 33) + "… (3145728 bytes)",
		strings.Repeat("✅", 1<<20):             strings.Repeat("✅", 27) + "… (3145728 bytes)",
	} {
		line := short.Line(text, limit)
		require.Equal(t, want, line)
		require.LessOrEqual(t, len(line), limit)
	}
}
