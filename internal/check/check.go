// Package check validates names, texts and fields of configurations. Its errors are
// those that the package outbox exports.
package check

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// The package outbox exports these under the same names and describes them there.
var (
	ErrUnregistered = errors.New("is not registered")
	ErrDuplicate    = errors.New("is registered already")
	ErrMalformed    = errors.New("is malformed")
	ErrEmpty        = errors.New("is empty")
	ErrTooLong      = errors.New("is too long")
	ErrNUL          = errors.New("holds a NUL character")
	ErrUTF8         = errors.New("is not valid UTF-8")
	ErrJSON         = errors.New("is JSON that PostgreSQL refuses")
	ErrTime         = errors.New("is not a usable time")
	ErrNilArgument  = errors.New("must not be nil")

	ErrRunning = errors.New("another call of Run is running")
)

// Text returns why s cannot be stored in a column of limit characters, or nil.
func Text(s string, limit int) error {
	switch {
	case s == "":
		return ErrEmpty
	case !utf8.ValidString(s):
		return ErrUTF8
	case strings.IndexByte(s, 0) >= 0:
		return ErrNUL
	}
	if len(s) > limit {
		if n := utf8.RuneCountInString(s); n > limit {
			return fmt.Errorf("%w: %d characters, at most %d", ErrTooLong, n, limit)
		}
	}
	return nil
}

// MaxReason is how many characters of a reason outbox_audit takes.
const MaxReason = 10_000

// Audit returns an error that names each field of who acts, and why, that outbox_audit does not take, as
// outbox_check_audit has it. The names of the fields begin with prefix, and the reason has at most so many characters.
func Audit(prefix, operator, reason string, most int) error {
	var errs []error
	if err := Operator(operator); err != nil {
		errs = append(errs, fmt.Errorf("field %sOperator %w", prefix, err))
	}
	err := Text(reason, most)
	if err == nil && !IsReadable(reason) {
		err = fmt.Errorf("%w: it has no letter and no digit", ErrEmpty)
	}
	if err != nil {
		errs = append(errs, fmt.Errorf("field %sReason %w", prefix, err))
	}
	return errors.Join(errs...)
}

// Operator checks the name of an operator: it has a letter or a digit, and no character that prints nothing or breaks
// the line.
func Operator(name string) error {
	const maxOperator = 100
	if err := Text(name, maxOperator); err != nil {
		return err
	}
	for _, r := range name {
		if IsHidden(r) {
			return fmt.Errorf("%w: %U is not printable", ErrMalformed, r)
		}
	}
	if !IsReadable(name) {
		return fmt.Errorf("%w: it has no letter and no digit", ErrEmpty)
	}
	return nil
}

// IsReadable reports whether a text has a letter or a digit that can be seen.
func IsReadable(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return (unicode.IsLetter(r) || unicode.IsDigit(r)) && !IsHidden(r) })
}

// IsHidden reports whether a character prints nothing, though it is no space.
func IsHidden(r rune) bool {
	return r != ' ' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Co, unicode.Z, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector)
}

// Attribute is [Text] for attributes of CloudEvents, which contain neither control
// characters nor noncharacters. A text of blanks is rejected like an empty one: the
// official SDK for Go removes blanks at both ends.
func Attribute(s string, limit int) error {
	if err := Text(s, limit); err != nil {
		return err
	}
	for _, r := range s {
		if unicode.IsControl(r) || r&0xFFFE == 0xFFFE || 0xFDD0 <= r && r <= 0xFDEF {
			return fmt.Errorf("%w: %U is not for attributes of CloudEvents", ErrMalformed, r)
		}
	}
	if strings.TrimSpace(s) == "" {
		return fmt.Errorf("%w: it is blank", ErrMalformed)
	}
	return nil
}

// Time accepts the times that RFC 3339, and so CloudEvents, can represent.
func Time(t time.Time) error {
	if t.IsZero() {
		return fmt.Errorf("%w: zero", ErrTime)
	}
	if y := t.UTC().Year(); y < 1 || y > 9999 {
		return fmt.Errorf("%w: year %d", ErrTime, y)
	}
	return nil
}

// Schema rejects the name of a schema that PostgreSQL would truncate or not accept.
func Schema(schema string) error {
	if schema == "$user" { // in a search_path that means the role, however quoted
		return fmt.Errorf("field Schema %w: %q is no name", ErrMalformed, schema)
	}
	return Identifier("Schema", schema)
}

// Identifier rejects the name of an object that PostgreSQL would truncate or not accept.
func Identifier(field, name string) error {
	const limit = 63 // bytes
	if err := Text(name, limit); err != nil {
		return fmt.Errorf("field %s %w", field, err)
	}
	if len(name) > limit {
		return fmt.Errorf("field %s %w: %d bytes, at most %d", field, ErrTooLong, len(name), limit)
	}
	return nil
}

var topicName = regexp.MustCompile(`^[A-Za-z0-9._-]{1,249}$`)

// Topic checks the name of a topic against Kafka's rules.
func Topic(name string) error {
	if !topicName.MatchString(name) || strings.Trim(name, ".") == "" {
		return fmt.Errorf("%.250q %w: at most 249 of a-z A-Z 0-9 . _ -", name, ErrMalformed)
	}
	return nil
}

var dottedName = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+$`)

// HasTopic reports whether [TopicOf] can derive a topic from an event type: it has a
// second segment.
func HasTopic(eventType string) bool { return dottedName.MatchString(eventType) }

// TopicOf derives a topic from the second segment of an event type.
func TopicOf(eventType string) string {
	_, rest, _ := strings.Cut(eventType, ".")
	domain, _, _ := strings.Cut(rest, ".")
	return domain + "-events"
}

// Limits of payloads in bytes, as PostgreSQL prints them.
const (
	// DefaultMaxPayload leaves 16 KiB for headers and key, both below the default of
	// Kafka's message.max.bytes (1 MiB) and of franz-go's ProducerBatchMaxBytes
	// (1,000,012).
	DefaultMaxPayload = 960 << 10
	MaxMaxPayload     = 100 << 20 // socket.request.max.bytes of a broker
	// MaxEventBytes bounds an event of outbox that is read: the largest payload, and as much room for headers as a
	// record may have by default.
	MaxEventBytes = MaxMaxPayload + 1<<20
)

// EachPositive checks the durations of a field of a configuration.
func EachPositive(field string, of map[string]time.Duration) error {
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(of)) {
		if of[key] <= 0 {
			errs = append(errs, fmt.Errorf("field %s of %q is %v: must be above 0", field, key, of[key]))
		}
	}
	return errors.Join(errs...)
}

// NotNegative checks a field of a configuration.
func NotNegative[N int | int64 | time.Duration](field string, n N) error {
	if n < 0 {
		return fmt.Errorf("field %s is %v: must not be negative", field, n)
	}
	return nil
}

// NotAbove checks a field of a configuration against its limit.
func NotAbove(field string, n, limit int) error {
	if n > limit {
		return fmt.Errorf("field %s is %d: at most %d", field, n, limit)
	}
	return nil
}

// IsNil reports whether v is nil or an interface that holds a nil pointer.
func IsNil(v any) bool {
	if v == nil {
		return true
	}
	rv := reflect.ValueOf(v)
	return rv.Kind() == reflect.Pointer && rv.IsNil()
}

// AsSame sets target, which is one of [errors.As], to err if it points to a pointer to a type with the fields of
// T. Packages under internal/ have error types of their own, and the package outbox exports types with the same
// fields: with this, [errors.As] finds them at any depth.
func AsSame[T any](err *T, target any) bool {
	to := reflect.ValueOf(target).Elem()
	from := reflect.ValueOf(err)
	if to.Kind() != reflect.Pointer || !from.CanConvert(to.Type()) {
		return false
	}
	to.Set(from.Convert(to.Type()))
	return true
}
