// Package short keeps errors and log lines short. They repeat what others have written into
// a table or a topic, and that may be megabytes.
package short

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Text returns a text of at most limit bytes, 100 or more. It cuts a longer text, but no character
// in two, and adds how long the text was: errors must not repeat the megabytes of a message.
func Text(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	end := fmt.Sprintf("… (%d bytes)", len(text))
	n := limit - len(end)
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n] + end
}

// Storable is [Text] as a column of PostgreSQL takes it: without NUL, and in UTF-8.
func Storable(text string, limit int) string {
	const replacement = string(utf8.RuneError)
	return strings.ReplaceAll(strings.ToValidUTF8(Text(text, limit), replacement), "\x00", replacement)
}
