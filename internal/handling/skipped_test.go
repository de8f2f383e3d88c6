package handling

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
)

// A type without a handler is a line once an hour, with the number of its events.
func TestSkippedTypesAreCounted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		p := &Processor{Log: slog.New(slog.NewTextHandler(&log, nil)), input: new(inputLog)} // no line at DEBUG
		lines := func() (found []string) {
			for line := range strings.Lines(log.String()) {
				_, about, _ := strings.Cut(line, "msg=")
				about, _, _ = strings.Cut(about, " event_id")
				found = append(found, about)
			}
			log.Reset()
			return found
		}
		skip := func(n int, name string) {
			for range n {
				p.LogSkipped(&envelope.Received{Type: name})
			}
		}
		skip(5, "test.a.v1")
		skip(2, "test.b.v1")
		const first = `"outbox: events of a type without a handler are skipped" type=`
		require.Equal(t, []string{first + "test.a.v1 events=1", first + "test.b.v1 events=1"}, lines())
		time.Sleep(skippedInterval - time.Second)
		skip(1, "test.a.v1")
		require.Empty(t, lines())
		time.Sleep(time.Second)
		skip(3, "test.a.v1")
		require.Equal(t, []string{first + "test.a.v1 events=6"}, lines())
		require.Equal(t, map[string]int64{"test.a.v1": 9, "test.b.v1": 2}, p.Skipped(10))
		require.Equal(t, map[string]int64{"test.a.v1": 9}, p.Skipped(1))
	})
}
