package consumer

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/check"
	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/eventheader"
	"github.com/outboxgo/outbox/internal/handling"
)

// logged returns a configuration, and the lines of its log that contain a text.
func logged(cfg Rules) (Rules, func(text string) []string) {
	var log bytes.Buffer
	if cfg.Rules == nil {
		cfg.Rules = &handling.Rules{}
	}
	cfg.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	return cfg, func(text string) []string {
		return slices.Collect(func(yield func(string) bool) {
			for line := range strings.Lines(log.String()) {
				if strings.Contains(line, text) && !yield(line) {
					return
				}
			}
		})
	}
}

// withHeaders returns a record with more headers, or others in place of those that it has.
func withHeaders(r *kgo.Record, headers ...string) *kgo.Record {
	for i := 0; i < len(headers); i += 2 {
		r.Headers = slices.DeleteFunc(r.Headers, func(h kgo.RecordHeader) bool { return h.Key == headers[i] })
		r.Headers = append(r.Headers, header(headers[i], headers[i+1]))
	}
	return r
}

// A hook that panics used to end the process. It is logged by its name, and the consumer
// goes on.
func TestConsumerHooksPanic(t *testing.T) {
	t.Parallel()
	boom := func() { panic("no such metric") }
	cfg, lines := logged(Rules{Rules: &handling.Rules{
		Hooks: handling.Hooks{
			Handled:      func(*envelope.Received, string, time.Duration) { boom() },
			Repeated:     func(*envelope.Received, string) { boom() },
			Failed:       func(*envelope.Received, string, error, bool) { boom() },
			DeadLettered: func(*envelope.Received, string, string, error) { boom() },
			Unknown:      func(*envelope.Received) { boom() },
		},
		Retry: handling.RetryPolicy{RetriesFor: func(error) int { panic("no such metric") }, MaxRetries: -1},
	}})
	s := newPartitionFixture(t, cfg)
	s.handlers = map[string]string{"b": "----"}
	records := s.arrive("a", "b", "c", "d")
	records[2] = records[0]
	withHeaders(records[3], "ce_type", "test.play.ended.v1")
	s.worker.handle(records)
	require.Equal(t, []string{"a1 b1: rolled back", "a1: committed", "b1: rolled back", "dead letter b after 1: handler", ": committed"}, s.log)
	require.EqualValues(t, 4, s.worker.next.Offset)
	for _, name := range []string{"Hooks.Handled", "Hooks.Repeated", "Hooks.Failed", "Hooks.DeadLettered", "Hooks.Unknown", "RetriesFor"} {
		require.Len(t, lines(`level=ERROR msg="outbox: `+name+` has panicked" error="panic: no such metric"`), 1, name)
	}
}

// What ends its goroutine, as testify's require does when it fails, used to end the work on
// the partition for good.
func TestHostEndsItsGoroutine(t *testing.T) {
	t.Parallel()
	cfg, lines := logged(Rules{Rules: &handling.Rules{
		Hooks: handling.Hooks{
			Handled:      func(*envelope.Received, string, time.Duration) { runtime.Goexit() },
			Repeated:     func(*envelope.Received, string) { runtime.Goexit() },
			Failed:       func(*envelope.Received, string, error, bool) { runtime.Goexit() },
			DeadLettered: func(*envelope.Received, string, string, error) { runtime.Goexit() },
			Unknown:      func(*envelope.Received) { runtime.Goexit() },
		},
		Retry: handling.RetryPolicy{RetriesFor: func(error) int { runtime.Goexit(); return 0 }, MaxRetries: -1},
	}, Decode: func(r *kgo.Record) (*envelope.Message, error) {
		if string(r.Key) == "c" {
			runtime.Goexit()
		}
		return DecodeCloudEvent(r)
	}})
	s := newPartitionFixture(t, cfg)
	s.handlers = map[string]string{"b": "----"}
	records := s.arrive("a", "b", "c", "d", "e")
	withHeaders(records[4], "ce_type", "test.play.ended.v1")
	s.worker.handle(append(records, records[0]))
	require.Contains(t, s.log, "dead letter b after 1: handler")
	require.Contains(t, s.log, "dead letter c after 0: undecodable")
	require.Len(t, s.noted, 2, "%v", s.log)
	for _, name := range []string{"Hooks.Handled", "Hooks.Repeated", "Hooks.Failed", "Hooks.DeadLettered", "Hooks.Unknown", "RetriesFor"} {
		require.Len(t, lines(`level=ERROR msg="outbox: `+name+` has panicked"`), 1, name)
	}
}

// A decoder, a codec, an upcaster or the key of OncePer that panics makes a dead letter of
// its event, as a handler does.
func TestHostPanicsOnAnEvent(t *testing.T) {
	t.Parallel()
	acted := handle("ACTED", func(context.Context, pgx.Tx, played, envelope.Received) error { return nil })
	for name, tt := range map[string]struct {
		cfg     Rules
		handler *handling.Handler
		want    string
	}{
		"Decode": {Rules{Decode: func(*kgo.Record) (*envelope.Message, error) { panic("lost") }}, acted, "dead letter a after 0: undecodable"},
		"OncePer": {Rules{Rules: &handling.Rules{Retry: handling.RetryPolicy{MaxRetries: -1}}},
			oncePer(acted, func(played, envelope.Received) (string, string) { panic("lost") }), "dead letter a after 1: panic"},
		"Codecs": {Rules{Rules: &handling.Rules{Codecs: []handling.Codec{{ContentType: "text/plain",
			Decode: func(context.Context, []byte, any) error { panic("lost") }}}}},
			acted, "dead letter a after 0: undecodable"},
	} {
		s := newPartitionFixture(t, tt.cfg, tt.handler)
		records := s.arrive("a")
		if len(s.worker.cfg.Codecs) > 0 {
			withHeaders(records[0], "content-type", "text/plain")
		}
		s.worker.handle(records)
		require.Equal(t, tt.want, s.log[len(s.log)-1], name)
	}
}

// A correlation id that no event can be recorded with used to make every handler that
// records fail. It is dropped.
func TestBadCorrelationID(t *testing.T) {
	t.Parallel()
	var got []string
	cfg, lines := logged(Rules{})
	s := newPartitionFixture(t, cfg, handle("RECORDED", func(ctx context.Context, _ pgx.Tx, e played, m envelope.Received) error {
		id := envelope.Carried(ctx, envelope.CorrelationKey)
		got = append(got, id+m.Extensions[eventheader.Correlation])
		if id == "" {
			return nil
		}
		return check.Attribute(id, envelope.MaxCorrelationID) // as a Recorder checks it
	}))
	records := s.arrive("a", "b", "c", "d")
	for i, id := range []string{strings.Repeat("x", 300), "a\nb", "\u0085", "fine"} {
		withHeaders(records[i], "ce_correlationid", id)
	}
	s.worker.handle(records)
	require.Empty(t, s.records, "%v", s.log)
	require.Equal(t, []string{"", "", "", "finefine"}, got)
	require.Len(t, lines("level=WARN"), 1, "not for each event")
}

// A replay for an action that was renamed, or for a type that is gone, is a dead letter
// again, and says so. It used to be passed over.
func TestReplayForNobody(t *testing.T) {
	t.Parallel()
	var reported []string
	cfg, lines := logged(Rules{Rules: &handling.Rules{Hooks: handling.Hooks{
		DeadLettered: func(m *envelope.Received, action, _ string, err error) {
			reported = append(reported, m.Type+" "+action+": "+err.Error())
		},
	}}})
	s := newPartitionFixture(t, cfg)
	records := s.arrive("a", "b", "c")
	withHeaders(records[0], deadletter.ReplayGroup, "g", deadletter.ReplayAction, "RENAMED")
	withHeaders(records[1], deadletter.ReplayGroup, "g", deadletter.ReplayAction, "ACTED", "ce_type", "test.play.gone.v1")
	withHeaders(records[2], deadletter.ReplayGroup, "another", deadletter.ReplayAction, "RENAMED")
	s.worker.handle(records)
	require.Equal(t, []string{"dead letter a after 0: unknown_action", "dead letter b after 0: unknown_type"}, s.log)
	for i, action := range []string{"RENAMED", "ACTED"} {
		require.Contains(t, s.records[i].Headers, header(deadletter.Action, action), "so that it can be sent back once more")
	}
	require.Equal(t, []string{
		`test.play.acted.v1 RENAMED: outbox: test.play.acted.v1: replay_action "RENAMED" is not registered: no handler has this action, it may have been renamed`,
		`test.play.gone.v1 ACTED: outbox: test.play.gone.v1: type is not registered`,
	}, reported)
	require.Len(t, lines(`level=ERROR msg="outbox: event is dead, an operator has to decide"`), 2)
}

// A record that only says that it was sent back is for everybody. Its headers are seen
// neither by its decoder nor in its dead letter, from which a replay would take them over.
func TestForgedReplayIsForEverybody(t *testing.T) {
	t.Parallel()
	plain := PlainRecords{Type: "test.play.acted.v1", IDHeader: "none"}
	var ids []string
	cfg, lines := logged(Rules{Decode: func(r *kgo.Record) (*envelope.Message, error) {
		r.Headers = slices.DeleteFunc(slices.Clone(r.Headers), func(h kgo.RecordHeader) bool { return strings.HasPrefix(h.Key, "ce_") })
		m, err := plain.Decode(r)
		if err == nil {
			ids = append(ids, m.ID)
			require.Empty(t, m.Extensions)
		}
		return m, err
	}})
	s := newPartitionFixture(t, cfg)
	s.handlers = map[string]string{"a": "pp"}
	records := s.arrive("a", "b")
	for _, r := range records {
		withHeaders(r, deadletter.ReplayGroup, "nobody", deadletter.ReplayAction, "NONE", deadletter.ReplayFrom, "x.dlq-0-0", "Replay_Of", "play-events-3-9", "dlq_group", "x")
	}
	s.forged = true
	s.worker.handle(records)
	require.Equal(t, []string{"a1: rolled back", "dead letter a after 1: permanent", "b1: committed"}, s.log)
	require.Equal(t, []string{"play-events-0-0", "play-events-0-1"}, ids)
	for _, h := range s.records[0].Headers {
		require.False(t, deadletter.IsReplay(h.Key), h.Key)
		require.False(t, h.Key == deadletter.Group && string(h.Value) == "x")
	}
	require.Len(t, lines("has the headers of a replay and is none"), 1, "not for each record")

	ids, s.forged = nil, false
	s.worker.handle(records)
	require.Empty(t, ids, "they are for another group")
}

// Headers of dead letters and replays get into no new event, neither from a decoded event,
// whose extensions a service may copy, nor otherwise.
func TestReplayHeadersAreNotRecorded(t *testing.T) {
	t.Parallel()
	s := newPartitionFixture(t, Rules{})
	for _, name := range []string{deadletter.ReplayGroup, "Replay_Of", deadletter.ReplayFrom, deadletter.Group, "DLQ_anything"} {
		require.ErrorContains(t, eventheader.Check(name, "x"), "the name is reserved")

		m, err := DecodeCloudEvent(withHeaders(s.arrive("a")[0], "ce_"+name, "x", "ce_own", "y"))
		require.NoError(t, err)
		require.NotContains(t, m.Extensions, strings.ToLower(name))
		require.Equal(t, "y", m.Extensions["own"])
	}
}

// An event type of another version than the handlers have is named in the log at WARN, and other types at INFO.
func TestSkippedTypesAreNamed(t *testing.T) {
	t.Parallel()
	cfg, lines := logged(Rules{})
	s := newPartitionFixture(t, cfg)
	records := s.arrive("a", "b", "c", "d", "e")
	for i, name := range []string{"test.play.acted.v2", "test.play.acted.v2", "test.play.acted.v10", "test.scene.acted.v1", "test.scene.acted.v1"} {
		withHeaders(records[i], "ce_type", name)
	}
	s.worker.handle(records)
	warned := lines("level=WARN")
	require.Len(t, warned, 2)
	require.Contains(t, warned[0], "type=test.play.acted.v2 handled=test.play.acted.v1")
	require.Contains(t, warned[1], "type=test.play.acted.v10 handled=test.play.acted.v1")
	named := lines("type=test.scene.acted.v1")
	require.Len(t, named, 1)
	require.Contains(t, named[0], "level=INFO")

	const maxUnknownTypes = 1000 // see handling
	for i := range 2 * maxUnknownTypes {
		s.worker.processor.LogSkipped(&envelope.Received{Type: fmt.Sprint("test.play.acted.v", i)})
	}
	require.Len(t, lines("level=WARN"), maxUnknownTypes)
	require.Len(t, lines("no more are named"), 1)
}
