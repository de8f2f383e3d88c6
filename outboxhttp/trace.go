package outboxhttp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/outboxgo/outbox"
)

// TraceHeader is the header that [Trace] reads and writes unless told otherwise.
const TraceHeader = "X-Trace-Id"

// TraceConfig tunes [Trace]. The zero value is ready for production.
type TraceConfig struct {
	// Header names the header of request and response. Empty means X-Trace-Id.
	Header string
	// NewID makes the id of a request that brought none, or none to be trusted. What
	// it returns is not looked at: at most 255 characters, without control characters,
	// is what events take. Nil means [NewTraceID].
	NewID func() string
}

// Trace gives each request a trace id: the one in its header, or else a new one. The
// response has it in the same header, from the start, and the context of the request
// as its correlation id, see [outbox.WithCorrelationID]: so events that are recorded
// under it carry it, consumers find it in the contexts of their handlers, and a
// logger over [LogTrace] adds it to lines.
//
// Taken is what comes once and has 1 to 128 letters, digits and characters of
// -_.:/+=@ only, for it goes into logs and headers. Put Trace around everything that
// logs.
func Trace(cfg TraceConfig, next http.Handler) http.Handler {
	cfg.Header = cmp.Or(cfg.Header, TraceHeader)
	if cfg.NewID == nil {
		cfg.NewID = NewTraceID
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var id string
		if brought := r.Header.Values(cfg.Header); len(brought) == 1 && isTraceID(brought[0]) {
			id = brought[0]
		} else {
			id = cfg.NewID()
		}
		w.Header().Set(cfg.Header, id)
		next.ServeHTTP(w, r.WithContext(outbox.WithCorrelationID(r.Context(), id)))
	})
}

const maxTraceID = 128

func isTraceID(s string) bool {
	if s == "" || len(s) > maxTraceID {
		return false
	}
	for _, c := range []byte(s) {
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte("-_.:/+=@", c) >= 0:
		default:
			return false
		}
	}
	return true
}

// TraceHeaders is for [outbox.RecorderConfig].Headers: it sends the trace id as the
// Kafka header x-trace-id too, for consumers that look for it there. As
// ce_correlationid it travels without this.
func TraceHeaders(ctx context.Context, _ outbox.DomainEvent) map[string]string {
	id := outbox.CorrelationID(ctx)
	if id == "" {
		return nil
	}
	return map[string]string{"x-trace-id": id}
}

const (
	traceEpoch  = 1_577_836_800_000 // 2020-01-01, in ms of Unix: until 2089 ids fit a bigint
	traceRandom = 22                // bits below the time
)

// lastTraceID is the newest that this process has made.
var lastTraceID atomic.Uint64

// NewTraceID returns 16 upper-case hexadecimal digits that sort by time: 42 bits are
// milliseconds since 2020, of which [TraceIDTime] makes a time again, and 22 are by
// chance. Of one process no two are the same, and each is above the one before; two
// processes can make the same one, about once in four million for each millisecond in
// which both make one.
func NewTraceID() string {
	fresh := uint64(time.Now().UnixMilli()-traceEpoch)<<traceRandom | rand.Uint64N(1<<traceRandom)
	for {
		last := lastTraceID.Load()
		// In the millisecond of the last one, and when the clock was set back, it is
		// the next number.
		id := max(fresh, last+1)
		if lastTraceID.CompareAndSwap(last, id) {
			return fmt.Sprintf("%016X", id)
		}
	}
}

// ErrNoTraceID is returned by [TraceIDTime] for what [NewTraceID] did not make.
var ErrNoTraceID = errors.New("outboxhttp: not a trace id with a time")

// TraceIDTime returns when [NewTraceID] made an id, to the millisecond.
func TraceIDTime(id string) (time.Time, error) {
	const digits = 16
	n, err := strconv.ParseUint(id, 16, 64)
	if err != nil || len(id) != digits || strings.ToUpper(id) != id {
		return time.Time{}, fmt.Errorf("%w: %.100q", ErrNoTraceID, id)
	}
	return time.UnixMilli(int64(n>>traceRandom) + traceEpoch).UTC(), nil
}
