// Package jsonb knows what PostgreSQL's jsonb accepts, and how large it prints it.
package jsonb

import (
	"encoding/json"
	"errors"
	"fmt"
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

// Check returns the size of a JSON text as jsonb prints it, in bytes and rounded up, or
// why jsonb would reject it. jsonb prints numbers in full, 1e300
// as 301 digits, so a short text can be a large payload.
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
			n, err := ScanString(b[i:])
			if err != nil {
				return 0, err
			}
			i, size = i+n, size+n
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
		}
		size++
		i++
	}
	return size, nil
}

// ScanString returns the length of the valid JSON string that b begins with,
// or an error for an escape that jsonb rejects.
func ScanString(b []byte) (int, error) {
	for i := 1; ; i++ {
		switch b[i] {
		case '"':
			return i + 1, nil
		case '\\':
			i++
			if b[i] != 'u' {
				continue
			}
			r := hex4(b[i+1:])
			i += 4
			switch {
			case r == 0:
				return 0, check.ErrNUL
			case 0xDC00 <= r && r < 0xE000:
				return 0, fmt.Errorf(`%w: lone surrogate \u%04x`, check.ErrJSON, r)
			case 0xD800 <= r && r < 0xDC00:
				if b[i+1] != '\\' || b[i+2] != 'u' || hex4(b[i+3:])&^0x3FF != 0xDC00 {
					return 0, fmt.Errorf(`%w: lone surrogate \u%04x`, check.ErrJSON, r)
				}
				i += 6
			}
		}
	}
}

// hex4 reads four hexadecimal digits; a valid JSON text has them there.
func hex4(b []byte) int {
	r := 0
	for _, c := range b[:min(4, len(b))] {
		switch {
		case '0' <= c && c <= '9':
			r = r<<4 | int(c-'0')
		case 'a' <= c|0x20 && c|0x20 <= 'f':
			r = r<<4 | int(c|0x20-'a'+10)
		}
	}
	return r
}

var errNumber = errors.New("number out of range")

// scanNumber returns the length of the valid JSON number that b begins with and
// the length of its decimal expansion.
func scanNumber(b []byte) (n, printed int, err error) {
	var integer, fraction, zeros int // digits before and behind the point; leading zeros among them
	significant, inFraction := false, false
	exponent, negative := 0, false
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
	return n, len("-.") + digits + scale, nil
}
