// Package outage logs outages: once when something begins to fail, and once when it
// works again.
package outage

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox/internal/wait"
)

// Log logs the outages of one thing that is tried until it works. It is safe for
// concurrent use.
type Log struct {
	log     *slog.Logger
	what    string
	mu      sync.Mutex
	quiet   bool // the current outage is not logged, nor its end
	backoff wait.Backoff
	current atomic.Pointer[Failure] // nil: it works
}

// Failure is an outage that has not ended.
type Failure struct {
	Err   error     // of the last try
	Since time.Time // when the first try failed
	Last  time.Time // when the last try failed
}

// NewLog returns the log of what, which begins the sentences that are logged:
// "PostgreSQL fails, trying until it works".
func NewLog(log *slog.Logger, what string) *Log { return &Log{log: log, what: what} }

// What returns the name that was given to [NewLog].
func (l *Log) What() string { return l.what }

// Report takes the result of a try. It logs the first failure, with attrs, and the
// first success after it.
func (l *Log) Report(err error, attrs ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := l.current.Load()
	switch {
	case err == nil && before != nil:
		if !l.quiet {
			l.log.Warn("outbox: "+l.what+" works again", "after", time.Since(before.Since).Round(time.Millisecond))
		}
		l.current.Store(nil)
		l.backoff.Reset()
	case err != nil && before == nil:
		if !l.quiet {
			l.log.Warn("outbox: "+l.what+" fails, trying until it works", append(attrs, "error", err)...)
		}
		now := time.Now()
		l.current.Store(&Failure{Err: err, Since: now, Last: now})
	case err != nil:
		l.current.Store(&Failure{Err: err, Since: before.Since, Last: time.Now()})
	}
}

// Abandon ends an outage whose end will not be seen: nothing is tried any more, because of what why says.
func (l *Log) Abandon(why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if before := l.current.Swap(nil); before != nil && !l.quiet {
		l.log.Warn("outbox: "+l.what+" has failed, and is not tried any more: "+why, "since", before.Since, "last", before.Last, "error", before.Err)
	}
	l.backoff.Reset()
}

// Current returns the outage, or nil if the last try succeeded.
func (l *Log) Current() *Failure { return l.current.Load() }

// Backoff returns the wait before the next try, see [wait.Backoff].
func (l *Log) Backoff() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.backoff.Next()
}

// IsTLS reports whether an error is that of a TLS handshake in which one side has rejected the other, and not for want
// of a connection.
func IsTLS(err error) bool {
	return isOf[tls.RecordHeaderError](err) || isOf[tls.AlertError](err) || isOf[*tls.CertificateVerificationError](err) ||
		isOf[x509.UnknownAuthorityError](err) || isOf[x509.HostnameError](err) || isOf[x509.CertificateInvalidError](err)
}

func isOf[T error](err error) bool {
	_, ok := errors.AsType[T](err)
	return ok
}
