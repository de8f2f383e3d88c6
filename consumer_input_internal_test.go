package outbox

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/eventheader"
)

// logged returns a configuration, and the lines of its log that contain a text.
func logged(cfg ConsumerConfig) (ConsumerConfig, func(text string) []string) {
	var log bytes.Buffer
	cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
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
	cfg, lines := logged(ConsumerConfig{HandlerConfig: HandlerConfig{
		Hooks: ConsumerHooks{
			Handled:      func(Metadata, string, time.Duration) { boom() },
			Repeated:     func(Metadata, string) { boom() },
			Failed:       func(Metadata, string, error) { boom() },
			DeadLettered: func(Metadata, string, string, error) { boom() },
			Unknown:      func(Metadata) { boom() },
		},
		RetriesFor: func(error) int { panic("no such metric") },
		MaxRetries: -1,
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
	cfg, lines := logged(ConsumerConfig{HandlerConfig: HandlerConfig{
		Hooks: ConsumerHooks{
			Handled:      func(Metadata, string, time.Duration) { runtime.Goexit() },
			Repeated:     func(Metadata, string) { runtime.Goexit() },
			Failed:       func(Metadata, string, error) { runtime.Goexit() },
			DeadLettered: func(Metadata, string, string, error) { runtime.Goexit() },
			Unknown:      func(Metadata) { runtime.Goexit() },
		},
		RetriesFor: func(error) int { runtime.Goexit(); return 0 },
		MaxRetries: -1,
	}, Decode: func(r *kgo.Record) (*Message, error) {
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

// No hook is forgotten.
func TestEveryHookIsContained(t *testing.T) {
	t.Parallel()
	var hooks ConsumerHooks
	all := reflect.ValueOf(&hooks).Elem()
	for i := range all.NumField() {
		all.Field(i).Set(reflect.MakeFunc(all.Field(i).Type(), func([]reflect.Value) []reflect.Value { panic("no such metric") }))
	}
	contained := map[string]bool{}
	hooks = hooks.guarded(func(name string) func(func()) {
		return func(call func()) { require.Panics(t, call); contained[name] = true }
	})
	for i := range all.NumField() {
		name, hook := all.Type().Field(i).Name, all.Field(i)
		args := make([]reflect.Value, hook.Type().NumIn())
		for n := range args {
			args[n] = reflect.Zero(hook.Type().In(n))
		}
		hook.Call(args)
		require.True(t, contained[name], name)
	}
}

// A decoder, a codec, an upcaster or the key of OncePer that panics makes a dead letter of
// its event, as a handler does.
func TestHostPanicsOnAnEvent(t *testing.T) {
	t.Parallel()
	acted := Handle("ACTED", func(context.Context, pgx.Tx, played, Metadata) error { return nil })
	for name, tt := range map[string]struct {
		cfg     ConsumerConfig
		handler Handler
		want    string
	}{
		"Decode": {ConsumerConfig{Decode: func(*kgo.Record) (*Message, error) { panic("lost") }}, acted, "dead letter a after 0: undecodable"},
		"OncePer": {ConsumerConfig{HandlerConfig: HandlerConfig{MaxRetries: -1}},
			OncePer(acted, func(played, Metadata) (string, string) { panic("lost") }), "dead letter a after 1: panic"},
		"Codecs": {ConsumerConfig{HandlerConfig: HandlerConfig{Codecs: []Codec{{ContentType: "text/plain",
			Encode: func(context.Context, any) ([]byte, error) { return nil, nil }, Decode: func(context.Context, []byte, any) error { panic("lost") }}}}},
			acted, "dead letter a after 0: undecodable"},
	} {
		s := newPartitionFixture(t, tt.cfg, tt.handler)
		records := s.arrive("a")
		if len(tt.cfg.Codecs) > 0 {
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
	var rec *Recorder
	cfg, lines := logged(ConsumerConfig{})
	s := newPartitionFixture(t, cfg, Handle("RECORDED", func(ctx context.Context, _ pgx.Tx, e played, m Metadata) error {
		_, err := rec.KafkaRecord(ctx, played{"next"})
		got = append(got, CorrelationID(ctx)+m.Extensions[eventheader.Correlation])
		return err
	}))
	rec, err := NewRecorder(s.events, RecorderConfig{})
	require.NoError(t, err)
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
	cfg, lines := logged(ConsumerConfig{HandlerConfig: HandlerConfig{Hooks: ConsumerHooks{
		DeadLettered: func(m Metadata, action, _ string, err error) {
			reported = append(reported, m.Type+" "+action+": "+err.Error())
		},
	}}})
	s := newPartitionFixture(t, cfg)
	records := s.arrive("a", "b", "c")
	withHeaders(records[0], ReplayGroup, "g", ReplayAction, "RENAMED")
	withHeaders(records[1], ReplayGroup, "g", ReplayAction, "ACTED", "ce_type", "test.play.gone.v1")
	withHeaders(records[2], ReplayGroup, "another", ReplayAction, "RENAMED")
	s.worker.handle(records)
	require.Equal(t, []string{"dead letter a after 0: unknown_action", "dead letter b after 0: unknown_type"}, s.log)
	for i, action := range []string{"RENAMED", "ACTED"} {
		require.Contains(t, s.records[i].Headers, header(DeadLetterAction, action), "so that it can be sent back once more")
	}
	require.Equal(t, []string{
		`test.play.acted.v1 RENAMED: outbox: test.play.acted.v1: replay_action "RENAMED" is not registered: no handler has this action, it may have been renamed`,
		`test.play.gone.v1 ACTED: outbox: test.play.gone.v1: type is not registered`,
	}, reported)
	require.Len(t, lines(`level=WARN msg="outbox: sent to the dead-letter topic"`), 2)
}

// A record that only says that it was sent back is for everybody. Its headers are seen
// neither by its decoder nor in its dead letter, from which a replay would take them over.
func TestForgedReplayIsForEverybody(t *testing.T) {
	t.Parallel()
	plain := PlainRecords{Type: "test.play.acted.v1", IDHeader: "none"}
	var ids []string
	cfg, lines := logged(ConsumerConfig{Decode: func(r *kgo.Record) (*Message, error) {
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
		withHeaders(r, ReplayGroup, "nobody", ReplayAction, "NONE", ReplayFrom, "x.dlq-0-0", "Replay_Of", "play-events-3-9", "dlq_group", "x")
	}
	s.forged = true
	s.worker.handle(records)
	require.Equal(t, []string{"a1: rolled back", "dead letter a after 1: permanent", "b1: committed"}, s.log)
	require.Equal(t, []string{"play-events-0-0", "play-events-0-1"}, ids)
	for _, h := range s.records[0].Headers {
		require.False(t, deadletter.IsReplay(h.Key), h.Key)
		require.False(t, h.Key == DeadLetterGroup && string(h.Value) == "x")
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
	s := newPartitionFixture(t, ConsumerConfig{})
	for _, name := range []string{ReplayGroup, "Replay_Of", ReplayFrom, DeadLetterGroup, "DLQ_anything"} {
		rec, err := NewRecorder(s.events, RecorderConfig{Headers: func(context.Context, DomainEvent) map[string]string { return map[string]string{name: "x"} }})
		require.NoError(t, err)
		_, err = rec.KafkaRecord(t.Context(), played{"a"})
		require.ErrorContains(t, err, "the name is reserved")

		m, err := DecodeCloudEvent(withHeaders(s.arrive("a")[0], "ce_"+name, "x", "ce_own", "y"))
		require.NoError(t, err)
		require.NotContains(t, m.Extensions, strings.ToLower(name))
		require.Equal(t, "y", m.Extensions["own"])
	}
}

// An event type of another version than the handlers have is named in the log once, and
// others at the level of details. Both used to be skipped without a word.
func TestSkippedTypesAreNamed(t *testing.T) {
	t.Parallel()
	cfg, lines := logged(ConsumerConfig{})
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
	require.Len(t, lines("type=test.scene.acted.v1"), 1)

	for i := range 2 * maxUnknownTypes {
		s.worker.processor.logSkipped(Metadata{Type: fmt.Sprint("test.play.acted.v", i)})
	}
	require.Len(t, lines("level=WARN"), maxUnknownTypes)
	require.Len(t, lines("no more are named"), 1)
}
