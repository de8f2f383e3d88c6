package deadletter

import (
	"crypto/sha256"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"
)

// A record that was sent back is a copy of its dead letter, and any other record is none, whatever their headers say.
func FuzzReplay(f *testing.F) {
	f.Add([]byte("k"), []byte("v"), "ce_id", []byte("1"), "orders-0-17", "orders", "sales", "MAIL")
	f.Add([]byte(nil), []byte{}, "replay_from", []byte("a-1-2-3"), "a--1-2", "a", "", "")
	f.Add([]byte("\x00\x00"), []byte(nil), "Dlq_Group", []byte("x"), "t-2147483648-1", "..", "g\"", "a b")
	f.Fuzz(func(t *testing.T, key, value []byte, name string, header []byte, from, topic, group, action string) {
		at, offset, err := parseOrigin(from)
		if err == nil {
			require.True(t, at.Topic != "" && at.Number >= 0 && offset >= 0)
			again, next, err := parseOrigin(Origin(at.Topic, at.Number, offset))
			require.NoError(t, err)
			require.Equal(t, at, again)
			require.Equal(t, offset, next)
			require.Equal(t, at.Topic, TopicOf(from))
		} else {
			require.Less(t, len(err.Error()), 1_000)
		}
		original := &kgo.Record{Topic: topic, Key: key, Value: value, Headers: []kgo.RecordHeader{{Key: name, Value: header}}}
		dead, replay := *original, *original
		text := func(name, value string) kgo.RecordHeader { return kgo.RecordHeader{Key: name, Value: []byte(value)} }
		dead.Headers = append(slices.Clone(original.Headers), text(OriginalTopic, topic), text(OriginalPartition, "0"), text(OriginalOffset, "17"),
			text(Group, group), text(Action, action), text(ReplayOf, ""), text(OriginalDigest, ""), text(ValueOmitted, ""))
		replay.Headers = append(slices.Clone(original.Headers), text(ReplayOf, topic+"-0-17"), text(ReplayGroup, group), text(ReplayAction, action))
		digest := Digest(original)
		require.Len(t, digest, 2*sha256.Size)
		require.Equal(t, digest, Digest(&dead))
		require.Equal(t, digest, Digest(&replay))
		known := rememberedOf(&dead)
		said := lastOwn(&replay)
		require.True(t, isCopy(&replay, said, known))

		for _, other := range []func(r *kgo.Record){
			func(r *kgo.Record) { r.Topic += "x" },
			func(r *kgo.Record) { r.Key = append(slices.Clone(r.Key), 0) },
			func(r *kgo.Record) { r.Value = append(slices.Clone(r.Value), 0) },
			func(r *kgo.Record) { r.Headers = append(slices.Clone(r.Headers), text("x", "")) },
			func(r *kgo.Record) {
				r.Key, r.Value = append(slices.Clone(r.Key), r.Value...), nil
				r.Headers = append(slices.Clone(r.Headers), text("", ""))
			},
		} {
			forged := replay
			other(&forged)
			require.False(t, isCopy(&forged, said, known))
		}
		for _, header := range []string{ReplayGroup, ReplayAction, ReplayOf} {
			forged := replay
			forged.Headers = append(slices.Clone(replay.Headers), text(header, said[header]+"x"))
			require.False(t, isCopy(&forged, lastOwn(&forged), known))
		}
		require.False(t, isCopy(&replay, said, remembered{}))
		require.Equal(t, IsOwn(name), IsOwn(strings.ToUpper(name)) && IsOwn(strings.ToLower(name)))
	})
}
