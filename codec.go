package outbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"strings"
	"unicode/utf8"
)

// Codec encodes the payloads of an event type and decodes them again.
//
// Payloads whose content type is exactly application/json are stored as jsonb:
// they can be queried, and PostgreSQL rewrites key order, spaces and numbers.
// Payloads of any other content type are stored and sent byte for byte.
type Codec struct {
	// ContentType is the media type of what Encode returns, for example
	// application/protobuf. At most 100 characters.
	ContentType string
	// Encode returns the payload of an event, which is a value of the registered
	// Go type, never a pointer to it.
	Encode func(event any) ([]byte, error)
	// Decode reads a payload into event, a pointer to the registered Go type.
	Decode func(data []byte, event any) error
}

// jsonType is the content type whose payloads are stored as jsonb.
const jsonType = "application/json"

// JSON is the default codec: encoding/json, stored as jsonb. It refuses strings
// that are not valid UTF-8 with [ErrUTF8], where encoding/json would replace
// the bad bytes silently; only what a MarshalJSON of the event's own has replaced
// itself is beyond it.
func JSON() Codec {
	return Codec{ContentType: jsonType, Encode: encodeJSON, Decode: json.Unmarshal}
}

func (c Codec) check() error {
	if err := checkAttribute(c.ContentType, maxContentType); err != nil {
		return err
	}
	media, _, err := mime.ParseMediaType(c.ContentType)
	if err != nil || !strings.Contains(media, "/") || strings.TrimSpace(c.ContentType) != c.ContentType {
		return fmt.Errorf("%q %w: want a media type", c.ContentType, ErrMalformed)
	}
	if strings.HasPrefix(media, "application/cloudevents") {
		// In binary mode readers would take the payload for the whole event.
		return fmt.Errorf("%q %w: it says that the payload is a CloudEvent", c.ContentType, ErrMalformed)
	}
	if c.Encode == nil || c.Decode == nil {
		return fmt.Errorf("codec function %w", ErrNil)
	}
	return nil
}

func encodeJSON(event any) ([]byte, error) {
	b, err := json.Marshal(event)
	if err != nil {
		return nil, err
	}
	// json.Marshal writes the escape for U+FFFD only in place of a bad byte; a
	// real U+FFFD is written as it is. A json.RawMessage may hold the escape
	// rightly, so the value itself decides.
	if hasReplacement(b) && hasBadText(event) {
		return nil, ErrUTF8
	}
	return b, nil
}

// hasReplacement reports whether b holds \ufffd.
func hasReplacement(b []byte) bool {
	const escape = `\ufffd`
	for i := 0; i+len(escape) <= len(b); i++ {
		if b[i] == '\\' {
			if string(b[i:i+len(escape)]) == escape {
				return true
			}
			i++ // an escaped backslash does not begin an escape
		}
	}
	return false
}

// What jsonb can hold. The digits are numeric's: 131072 before the point and
// 16383 after it (PostgreSQL manual, "Numeric Types"). The depth is our own and
// stays well below the one at which PostgreSQL's stack limit of 2 MB ends a parse.
const (
	maxIntegerDigits  = 131072
	maxFractionDigits = 16383
	maxDepth          = 1000
	maxExponent       = 1<<30 - 1 // refused by some versions whatever the digits, also in 0e…
)

// checkJSONB returns the size of a JSON text as jsonb prints it, in bytes and
// rounded up, or why jsonb would refuse it. jsonb prints numbers in full, 1e300
// as 301 digits, so a short text can be a large payload.
func checkJSONB(b []byte) (int, error) {
	if !utf8.Valid(b) {
		return 0, ErrUTF8
	}
	if !json.Valid(b) {
		return 0, fmt.Errorf("%w: not JSON at all", ErrJSON)
	}
	size, depth := 0, 0
	for i := 0; i < len(b); {
		switch c := b[i]; {
		case c == '"':
			n, err := scanString(b[i:])
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
				return 0, fmt.Errorf("%w: nested deeper than %d", ErrJSON, maxDepth)
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

// scanString returns the length of the valid JSON string that b begins with,
// or an error for an escape that jsonb refuses.
func scanString(b []byte) (int, error) {
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
				return 0, ErrNUL
			case 0xDC00 <= r && r < 0xE000:
				return 0, fmt.Errorf(`%w: lone surrogate \u%04x`, ErrJSON, r)
			case 0xD800 <= r && r < 0xDC00:
				if b[i+1] != '\\' || b[i+2] != 'u' || hex4(b[i+3:])&^0x3FF != 0xDC00 {
					return 0, fmt.Errorf(`%w: lone surrogate \u%04x`, ErrJSON, r)
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
		return 0, 0, fmt.Errorf("%w: %w", ErrJSON, errNumber)
	}
	if negative {
		exponent = -exponent
	}
	digits, scale := 1, max(0, fraction-exponent)
	if significant {
		digits = max(1, integer-zeros+exponent)
	}
	if digits > maxIntegerDigits || scale > maxFractionDigits {
		return 0, 0, fmt.Errorf("%w: %w", ErrJSON, errNumber)
	}
	return n, len("-.") + digits + scale, nil
}
