// Package jsonb knows what PostgreSQL's jsonb accepts, and how large it prints it.
package jsonb

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/outboxgo/outbox/internal/check"
)

// What jsonb can hold. The digits are numeric's: 131072 before the point and
// 16383 after it (PostgreSQL manual, "Numeric Types"). The depth is our own and
// stays well below the one at which PostgreSQL's stack limit of 2 MB ends a parse.
const (
	maxIntegerDigits  = 131072
	maxFractionDigits = 16383
	maxDepth          = 1000
	maxExponent       = 1<<30 - 1 // rejected by some versions whatever the digits, also in 0e…
)

// Check returns the size of a JSON text as jsonb prints it, in bytes, or why jsonb would
// reject it. jsonb prints numbers in full, 1e300 as 301 digits, so a short text can be a
// large payload. Of a key that an object has twice jsonb keeps the last; the size counts
// both.
func Check(b []byte) (int, error) {
	if !utf8.Valid(b) {
		return 0, check.ErrUTF8
	}
	if !json.Valid(b) {
		return 0, fmt.Errorf("%w: not JSON at all", check.ErrJSON)
	}
	size, depth := 0, 0
	for i := 0; i < len(b); {
		switch c := b[i]; {
		case c == '"':
			n, printed, err := scanString(b[i:])
			if err != nil {
				return 0, err
			}
			i, size = i+n, size+printed
			continue
		case c == '-' || '0' <= c && c <= '9':
			n, printed, err := scanNumber(b[i:])
			if err != nil {
				return 0, err
			}
			i, size = i+n, size+printed
			continue
		case c == '{' || c == '[':
			if depth++; depth > maxDepth {
				return 0, fmt.Errorf("%w: nested deeper than %d", check.ErrJSON, maxDepth)
			}
		case c == '}' || c == ']':
			depth--
		case c == ',' || c == ':':
			size++ // jsonb prints a space behind it
		case c == ' ' || c == '\t' || c == '\r' || c == '\n':
			size-- // and no others
		}
		size++
		i++
	}
	if len(b) > neverTooLarge {
		return size, checkStored(b)
	}
	return size, nil
}

// CheckString returns an error if the valid JSON string that b begins with holds an
// escape that jsonb rejects.
func CheckString(b []byte) error {
	_, _, err := scanString(b)
	return err
}

// scanString returns the length of the valid JSON string that b begins with, and the
// length of what jsonb prints for it: jsonb escapes control characters, quotes and
// backslashes only.
func scanString(b []byte) (n, printed int, err error) {
	for n, printed = 1, 1; ; n, printed = n+1, printed+1 {
		switch b[n] {
		case '"':
			return n + 1, printed + 1, nil
		case '\\':
			n++
			switch b[n] {
			case 'u':
				r, err := escapedRune(b[n+1:])
				if err != nil {
					return 0, 0, err
				}
				if n += 4; r > 0xFFFF {
					n += 6
				}
				printed += printedRune(r) - 1
			case '/':
			default:
				printed++
			}
		}
	}
}

// escapedRune returns the character of an escape whose digits b begins with; one above
// U+FFFF takes two escapes.
func escapedRune(b []byte) (rune, error) {
	r := hex4(b)
	switch {
	case r == 0:
		return 0, check.ErrNUL
	case !utf16.IsSurrogate(r):
		return r, nil
	case b[4] == '\\' && b[5] == 'u':
		if pair := utf16.DecodeRune(r, hex4(b[6:])); pair != utf8.RuneError {
			return pair, nil
		}
	}
	return 0, fmt.Errorf(`%w: lone surrogate \u%04x`, check.ErrJSON, r)
}

// printedRune is the length of a character as jsonb prints it.
func printedRune(r rune) int {
	switch {
	case strings.ContainsRune("\b\f\n\r\t\"\\", r):
		return len(`\n`)
	case r < ' ':
		return len(`\u0000`)
	}
	return utf8.RuneLen(r)
}

// hex4 reads four hexadecimal digits; a valid JSON text has them there.
func hex4(b []byte) rune {
	r := rune(0)
	for _, c := range b[:min(4, len(b))] {
		switch {
		case '0' <= c && c <= '9':
			r = r<<4 | rune(c-'0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			r = r<<4 | rune(c|0x20-'a'+10)
		}
	}
	return r
}

var errNumber = errors.New("number out of range")

// scanNumber returns the length of the valid JSON number that b begins with and
// the length of what jsonb prints for it, its decimal expansion.
func scanNumber(b []byte) (n, printed int, err error) {
	var integer, fraction, zeros int // digits before and behind the point; leading zeros among them
	significant, inFraction := false, false
	exponent, negative, minus := 0, false, b[0] == '-'
scan:
	for ; n < len(b); n++ {
		switch c := b[n]; {
		case c == '-':
		case c == '.':
			inFraction = true
		case '0' <= c && c <= '9':
			if inFraction {
				fraction++
			} else {
				integer++
			}
			if significant = significant || c != '0'; !significant {
				zeros++
			}
		case c == 'e' || c == 'E':
			for n++; n < len(b) && (b[n] == '+' || b[n] == '-' || '0' <= b[n] && b[n] <= '9'); n++ {
				switch {
				case b[n] == '-':
					negative = true
				case b[n] != '+':
					exponent = min(exponent*10+int(b[n]-'0'), maxExponent)
				}
			}
			break scan
		default:
			break scan
		}
	}
	if exponent == maxExponent {
		return 0, 0, fmt.Errorf("%w: %w", check.ErrJSON, errNumber)
	}
	if negative {
		exponent = -exponent
	}
	digits, scale := 1, max(0, fraction-exponent)
	if significant {
		digits = max(1, integer-zeros+exponent)
	}
	if digits > maxIntegerDigits || scale > maxFractionDigits {
		return 0, 0, fmt.Errorf("%w: %w", check.ErrJSON, errNumber)
	}
	printed = digits
	if scale > 0 {
		printed += len(".") + scale
	}
	if minus && significant {
		printed += len("-")
	}
	return n, printed, nil
}
