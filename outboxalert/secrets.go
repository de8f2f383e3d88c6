package outboxalert

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/outboxgo/outbox/internal/short"
)

// secrets are texts that errors must not repeat, the longest first.
type secrets []string

// newSecrets leaves out texts of a few characters: they are no secret, and might be a part of any
// text.
func newSecrets(texts ...string) (s secrets) {
	for _, text := range texts {
		if len(text) > 3 {
			s = append(s, text, fmt.Sprintf("%q", text))
		}
	}
	slices.SortFunc(s, func(a, b string) int { return len(b) - len(a) })
	return s
}

// maxAnswer is how much of an answer or an error is repeated, in bytes.
const maxAnswer = 300

// mask leaves the secrets out of a text, and shortens it.
func (s secrets) mask(text string) string {
	for _, secret := range s {
		text = strings.ReplaceAll(text, secret, "xxxxx")
	}
	return short.Text(text, maxAnswer)
}

// maskErr does the same to an error.
func (s secrets) maskErr(err error) error { return &maskedError{s.mask(err.Error()), err} }

// maskedError has the text of an error without secrets, whatever a client or a server put into
// it.
type maskedError struct {
	text string
	error
}

func (e *maskedError) Error() string { return e.text }

// Is reports what the error is, without handing it out: its text has the secrets.
func (e *maskedError) Is(target error) bool { return errors.Is(e.error, target) }

// isLoopback reports whether a host is this machine itself.
func isLoopback(host string) bool {
	address, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && address.Unmap().IsLoopback()
}
