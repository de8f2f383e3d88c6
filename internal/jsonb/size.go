package jsonb

import (
	"fmt"
	"strconv"

	"github.com/outboxgo/outbox/internal/check"
)

// How much jsonb can hold. While PostgreSQL reads an array or an object, it doubles a list of at most 1 GB
// (MaxAllocSize), whose entries have 32 bytes for an element, and 72 for a member, repeated keys included. What it
// stores has at most 256 MiB (JENTRY_OFFLENMASK).
const (
	maxElements = 1 << 24
	maxMembers  = 1 << 23
	maxStored   = 1<<28 - 1

	// A text that is not longer exceeds none of them: an element takes two bytes at least, a member five. For no text
	// does jsonb store more than six times as many bytes, as for [0,0,…].
	neverTooLarge = 2 * maxElements
)

// container is an array or an object that has been begun.
type container struct{ commas, most int }

// checkStored returns an error if jsonb cannot hold a text that it could read otherwise.
func checkStored(b []byte) error {
	stored, err := storedSize(b)
	if err == nil && stored > maxStored {
		err = fmt.Errorf("%w: jsonb would take %d bytes for it, at most %d", check.ErrJSON, stored, maxStored)
	}
	return err
}

// storedSize returns how many bytes jsonb takes for an array or an object at most: each number and each string counts
// as if it were padded to four bytes, and repeated keys count. It fails for one with too many values.
func storedSize(b []byte) (int, error) {
	const entry, header = 4, 4 // bytes for each value and each key, and for an array or an object
	within := make([]container, 1, maxDepth+1)
	stored := 0
	for i := 0; i < len(b); i++ {
		in := &within[len(within)-1]
		switch c := b[i]; {
		case c == '"':
			n, _, _ := scanString(b[i:])
			stored += entry + padded(n-len(`""`))
			i += n - 1
		case c == '-' || '0' <= c && c <= '9':
			n, _, _ := scanNumber(b[i:])
			stored += entry + storedNumber(b[i:i+n])
			i += n - 1
		case c == '[':
			stored += entry + header
			within = append(within, container{most: maxElements})
		case c == '{':
			stored += entry + header
			within = append(within, container{most: maxMembers})
		case c == ']' || c == '}':
			within = within[:len(within)-1]
		case c == ',':
			if in.commas++; in.commas >= in.most {
				return 0, fmt.Errorf("%w: an array of more than %d elements, or an object of more than %d members", check.ErrJSON, maxElements, maxMembers)
			}
		case c == 't' || c == 'n':
			stored += entry
			i += len("true") - 1
		case c == 'f':
			stored += entry
			i += len("false") - 1
		}
	}
	return stored - entry, nil // the outermost value has no entry
}

// padded rounds a size up to a multiple of four bytes.
func padded(n int) int { return (n + 3) &^ 3 }

// storedNumber returns the size of a valid JSON number as PostgreSQL's numeric: a header, and two bytes for every four
// decimal digits, counted from the point, between its first digit and its last one that are not 0.
func storedNumber(number []byte) int {
	whole, fraction, exponent := 0, 0, 0
	first, last := -1, -1 // digits that are not 0, by place
	inFraction := false
scan:
	for i, c := range number {
		switch c {
		case '.':
			inFraction = true
		case 'e', 'E':
			exponent, _ = strconv.Atoi(string(number[i+1:]))
			break scan
		case '-':
		default:
			if c != '0' {
				if last = whole + fraction; first < 0 {
					first = last
				}
			}
			if inFraction {
				fraction++
			} else {
				whole++
			}
		}
	}
	digits, weight := 0, 0
	if first >= 0 {
		weight = (whole - 1 - first + exponent) >> 2
		digits = weight - (whole-1-last+exponent)>>2 + 1
	}
	const size, short, long = 4, 2, 4 // of the varlena, and of the header
	if max(0, fraction-exponent) > 63 || weight < -64 || weight > 63 {
		return padded(size + long + 2*digits)
	}
	return padded(size + short + 2*digits)
}
