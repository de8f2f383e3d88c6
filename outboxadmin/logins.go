package outboxadmin

import (
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/outboxgo/outbox/internal/check"
)

const (
	// loginPause is how long an address has at most one line in the log.
	loginPause = time.Minute
	// maxAddresses bounds the addresses that have lines of their own within loginPause.
	maxAddresses = 100
	// otherAddresses stands for those above maxAddresses.
	otherAddresses = "others"
	// maxLogged is how many characters of a name, or of the header of a proxy, a line has.
	maxLogged = 100
)

// logins logs requests that are not authorized: the first one of an address at once, and later ones with their count,
// at most once a minute. So the log shows who guesses passwords, and does not grow with the guesses.
type logins struct {
	log *slog.Logger

	mu     sync.Mutex
	failed map[string]*failedLogins // by address; of the last loginPause
}

// failedLogins are the requests of an address that are not logged yet.
type failedLogins struct {
	count  int
	latest []any // attributes
}

func newLogins(log *slog.Logger) *logins {
	return &logins{log: log, failed: map[string]*failedLogins{}}
}

// fail counts a request.
func (l *logins) fail(r *http.Request, err error) {
	address, _, splitErr := net.SplitHostPort(r.RemoteAddr)
	if splitErr != nil {
		address = printable(r.RemoteAddr)
	}
	name, _, _ := r.BasicAuth()
	latest := []any{slog.String("name", printable(name)), slog.Any("error", err)}
	if proxy := r.Header.Get("X-Forwarded-For"); proxy != "" {
		latest = append(latest, slog.String("forwarded", printable(proxy)))
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed[address] == nil && len(l.failed) >= maxAddresses {
		address = otherAddresses
	}
	if known := l.failed[address]; known != nil {
		known.count, known.latest = known.count+1, latest
		return
	}
	l.failed[address] = &failedLogins{}
	l.write(address, 1, latest)
}

// write writes a line, and has the next one of the address wait.
func (l *logins) write(address string, count int, latest []any) {
	l.log.Warn("outboxadmin: not authorized", append([]any{slog.String("address", address), slog.Int("count", count)}, latest...)...)
	time.AfterFunc(loginPause, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		waiting := l.failed[address]
		if waiting.count == 0 {
			delete(l.failed, address)
			return
		}
		l.failed[address] = &failedLogins{}
		l.write(address, waiting.count, waiting.latest)
	})
}

// printable returns the beginning of a text in one line.
func printable(text string) string {
	var b strings.Builder
	for i, r := range []rune(text[:min(len(text), 4*maxLogged)]) {
		if i == maxLogged {
			break
		}
		if check.IsHidden(r) {
			r = '·'
		}
		b.WriteRune(r)
	}
	return b.String()
}
