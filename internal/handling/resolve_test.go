package handling

import (
	"context"
	"encoding/json"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
)

// codecOf returns a codec whose first calls return errors, and which counts its calls.
func codecOf(calls *int, errs ...error) Codec {
	return Codec{ContentType: "application/json", Decode: func(_ context.Context, data []byte, event any) error {
		*calls++
		if *calls <= len(errs) && errs[*calls-1] != nil {
			return errs[*calls-1]
		}
		return json.Unmarshal(data, event)
	}}
}

// While something that a codec needs is away, each handler of the event fails with that, and no attempt counts.
func TestCodecIsUnavailable(t *testing.T) {
	t.Parallel()
	unavailable := Unavailable(errPlayed)
	for kind, handlerOf := range map[string]func(string, func(context.Context, played, *envelope.Received) error) *Handler{
		"in a transaction": actionOf, "without a transaction": noTxOf,
		"once per name": func(action string, f func(context.Context, played, *envelope.Received) error) *Handler {
			h := actionOf(action, f)
			h.Key, h.KeyType = func(e any, _ *envelope.Received) (string, string) { return "Play", e.(played).Name }, h.GoType
			return h
		},
	} {
		t.Run(kind, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var handled []string
				f := newFixture(t, Rules{}, handlerOf("ACTED", func(_ context.Context, e played, _ *envelope.Received) error {
					handled = append(handled, e.Name)
					return nil
				}))
				decoded := 0
				f.processor.Routes.ByName[playedType].Kind.Codec = codecOf(&decoded, unavailable, unavailable)
				it := f.arrive("a")[0]
				require.Empty(t, it.Class)
				task := &it.Tasks[0]
				for range 2 {
					o := f.attempts.Try(task, f.processor.Rules.Retry, nil)
					require.Equal(t, Again, o.Result)
					require.True(t, o.Uncounted)
					require.Equal(t, "unavailable", o.Class)
					require.ErrorIs(t, o.Err, errPlayed)
					task.NoteFailure(o)
					time.Sleep(o.Wait)
				}
				require.Equal(t, 2, decoded, "the first attempt has the error of the first time")
				require.Empty(t, f.log, "no transaction for what cannot be decoded")
				o := f.attempts.Try(task, f.processor.Rules.Retry, nil)
				require.Equal(t, Done, o.Result, o.Err)
				require.Equal(t, 1, o.Attempt)
				require.Equal(t, []string{"a"}, handled)
			})
		})
	}
}

// Events that can be decoded do not wait for one that cannot be, and one that never can be is dead at once.
func TestCodecIsUnavailableInABatch(t *testing.T) {
	t.Parallel()
	f := newFixture(t, Rules{})
	decoded := 0
	f.processor.Routes.ByName[playedType].Kind.Codec = codecOf(&decoded, nil, Unavailable(errPlayed), nil, errors.New("not an event"))
	items := f.arrive("a", "b", "c")
	all := func(time.Duration) bool { return false }
	_, err := f.processor.ProcessBatch(t.Context(), inTx(items), all)
	n, failed := ItemsToRepeat(err, len(items), func(o *envelope.Origin) int { return int(o.Record.Offset) })
	require.Equal(t, 1, n)
	task := &items[1].Tasks[0]
	require.ErrorIs(t, failed.Of(*task), errPlayed)

	o := f.attempts.Try(task, f.processor.Rules.Retry, failed.Of(*task))
	require.True(t, o.Uncounted, o)
	task.NoteFailure(o)
	o = f.attempts.Try(task, f.processor.Rules.Retry, nil)
	require.Equal(t, Dead, o.Result)
	require.ErrorContains(t, o.Err, "not an event")
	require.Empty(t, f.log)
}
