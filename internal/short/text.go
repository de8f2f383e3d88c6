// Package short keeps errors, log lines and labels of metrics short. They repeat what others have written into
// a table or a topic, and that may be megabytes, or thousands of names.
package short

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Text returns a text of at most limit bytes, 100 or more. It cuts a longer text, but no character
// in two, and adds how long the text was: errors must not repeat the megabytes of a message.
func Text(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return cut(text, limit, len(text))
}

// cut returns a text of at most limit bytes which says how long the original was.
func cut(text string, limit, original int) string {
	end := fmt.Sprintf("… (%d bytes)", original)
	return first(text, limit-len(end)) + end
}

// first returns the first n bytes of a text, without the part of a character.
func first(text string, n int) string {
	if n >= len(text) {
		return text
	}
	for n > 0 && !utf8.RuneStart(text[n]) {
		n--
	}
	return text[:n]
}

// Line is [Text] as one line of what people read: each control, format and line-separator character is a "·". A name in
// an event can neither begin a line of its own nor change the order of what is around it.
func Line(text string, limit int) string {
	line := strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
			return '·'
		}
		return r
	}, first(text, limit))
	if len(text) <= limit && len(line) <= limit {
		return line
	}
	return cut(line, limit, len(text))
}

// Storable is [Text] as a column of PostgreSQL takes it: without NUL, and in UTF-8.
func Storable(text string, limit int) string {
	const replacement = string(utf8.RuneError)
	return strings.ReplaceAll(strings.ToValidUTF8(Text(text, limit), replacement), "\x00", replacement)
}
