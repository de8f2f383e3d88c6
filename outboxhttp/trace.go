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

// TraceHeader is the header that [Trace] reads and writes by default.
const TraceHeader = "X-Trace-Id"

// TraceConfig tunes [Trace]. The zero value is ready for production.
type TraceConfig struct {
	// Header is the header of request and response. Empty means X-Trace-Id.
	Header string
	// NewID returns an id for a request without a valid one: at most 255 characters, no control characters. Nil means
	// [NewTraceID].
	NewID func() string
}

// Trace gives each request a trace id: the one in its header, or else a new one. It sets
// the same header of the response before it calls the handler, and the trace id of the
// request's context, see [outbox.WithTraceID]. So events that are recorded with
// this context carry the trace id, the contexts of consumers' handlers have it, and a
// logger with [LogTrace] adds it to log lines. Where the context has no correlation id, the trace
// id becomes that too, see [outbox.WithCorrelationID].
//
// An id in a request is valid if the header is there once and has 1 to 128 letters,
// digits and characters of -_.:/+=@ only, because it is written into logs and headers.
// Put Trace around all handlers that log.
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
		ctx := outbox.WithTraceID(r.Context(), id)
		if outbox.CorrelationID(ctx) == "" {
			ctx = outbox.WithCorrelationID(ctx, id)
		}
		next.ServeHTTP(w, r.WithContext(ctx))
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

// TraceHeaders is for [outbox.RecorderConfig].Headers: it sends the trace id also as the
// Kafka header x-trace-id, for consumers that read it there. Events have it as
// ce_traceid in any case. RelayConfig.TraceHeader does the same for all that a relay sends.
func TraceHeaders(ctx context.Context, _ outbox.DomainEvent) map[string]string {
	id := traceID(ctx)
	if id == "" {
		return nil
	}
	return map[string]string{"x-trace-id": id}
}

// traceID returns the trace id of a context, or the correlation id, which is all that
// events have that were recorded by a release without trace ids.
func traceID(ctx context.Context) string {
	return cmp.Or(outbox.TraceID(ctx), outbox.CorrelationID(ctx))
}

const (
	traceEpoch  = 1_577_836_800_000 // 2020-01-01, in ms of Unix: until 2089 ids fit a bigint
	traceRandom = 22                // bits below the time
)

// lastTraceID is the newest id of this process.
var lastTraceID atomic.Uint64

// NewTraceID returns 16 upper-case hexadecimal digits that sort by time: 42 bits are the
// milliseconds since 2020, which [TraceIDTime] reads, and 22 bits are random. In one
// process no two ids are the same, and each is above the one before. If two processes
// each generate an id in the same millisecond, the ids are the same with a probability
// of about one in four million.
func NewTraceID() string {
	fresh := uint64(time.Now().UnixMilli()-traceEpoch)<<traceRandom | rand.Uint64N(1<<traceRandom)
	for {
		last := lastTraceID.Load()
		// In the same millisecond as the last id, or if the clock was set back, the
		// next id is the next number.
		id := max(fresh, last+1)
		if lastTraceID.CompareAndSwap(last, id) {
			return fmt.Sprintf("%016X", id)
		}
	}
}

// ErrNoTraceID is returned by [TraceIDTime] for an id that is not of [NewTraceID].
var ErrNoTraceID = errors.New("outboxhttp: not a trace id with a time")

// TraceIDTime returns when [NewTraceID] generated an id, to the millisecond.
func TraceIDTime(id string) (time.Time, error) {
	const digits = 16
	n, err := strconv.ParseUint(id, 16, 64)
	if err != nil || len(id) != digits || strings.ToUpper(id) != id {
		return time.Time{}, fmt.Errorf("%w: %.100q", ErrNoTraceID, id)
	}
	return time.UnixMilli(int64(n>>traceRandom) + traceEpoch).UTC(), nil
}
