package consumer

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/starts"
)

// A new handler reads from offset 3 on what others have handled up to offset 10. Kafka has lost the records from offset
// 6 on and has written new ones there. All handlers get these.
func TestGapOfTruncatedLog(t *testing.T) {
	t.Parallel()
	upTo := func(first int) (numbers []int) {
		for n := first; n <= 12; n++ {
			numbers = append(numbers, n)
		}
		return numbers
	}
	for name, tt := range map[string]struct {
		committed, epoch int32 // of the record before offset 10, and of the records from offset 6 on
		found            bool  // the client has found the loss
		old              int   // the first offset for the old handler
		want             []string
	}{
		"nothing is lost":                {1, 1, false, 10, []string{"committed 10 of epoch 1"}},
		"no epoch is known":              {-1, 2, false, 10, []string{"committed 10 of epoch -1"}},
		"records have a newer epoch":     {1, 2, false, 6, []string{"lost records before 10, from 6 on", "gaps from 6 on", "committed 6 of epoch 2"}},
		"the client has found the loss":  {1, 2, true, 6, []string{"committed 6 of epoch 2"}},
		"and the old epoch is not known": {-1, 2, true, 6, []string{"committed 6 of epoch 2"}},
	} {
		for _, batch := range []int{1, 3, 100} {
			t.Run(name+", in batches of "+strconv.Itoa(batch), func(t *testing.T) {
				t.Parallel()
				got := map[string][]int{}
				handler := func(action string) *handling.Handler {
					return handle(action, func(_ context.Context, _ pgx.Tx, e played, _ envelope.Received) error {
						n, err := strconv.Atoi(e.Name)
						got[action] = append(got[action], n)
						return err
					})
				}
				s := newPartitionFixture(t, Rules{}, handler("OLD"), handler("NEW"))
				w := s.worker
				w.begin(starts.Beginning{EpochOffset: kgo.EpochOffset{Epoch: tt.committed, Offset: 10}, Gaps: []starts.Gap{
					{Handler: starts.Handler{Topic: w.partition.Topic, Action: "NEW", EventType: playedType}, Number: w.partition.Number, From: 3},
				}})
				records := s.arrive("3", "4", "5", "6", "7", "8", "9", "10", "11", "12")
				for _, r := range records {
					if r.Offset, r.LeaderEpoch = r.Offset+3, 1; r.Offset >= 6 {
						r.LeaderEpoch = tt.epoch
					}
				}
				if tt.found {
					w.truncated(&kgo.ErrDataLoss{ConsumedTo: 8, ResetTo: 6, ResetToEpoch: tt.epoch})
				}
				for part := range slices.Chunk(records, batch) {
					w.handle(w.handleMissed(part))
				}
				require.Equal(t, map[string][]int{"OLD": upTo(tt.old), "NEW": upTo(3)}, got)
				lines := slices.DeleteFunc(s.log, func(line string) bool {
					return !strings.HasPrefix(line, "lost ") && !strings.HasPrefix(line, "gaps ") && !strings.HasPrefix(line, "committed ")
				})
				require.Equal(t, tt.want, lines)
				require.EqualValues(t, tt.old, w.committedOffset())
			})
		}
	}
}

// Kafka has written records in place of lost ones, before the offset at which this member has begun. The handlers of
// the group that it lacks miss them, which is noted before one of them is handled, also in an outage of PostgreSQL.
func TestRecordsWrittenAnewAreNoted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{})
		w := s.worker
		w.begin(starts.Beginning{EpochOffset: kgo.EpochOffset{Epoch: 1, Offset: 10}})
		go w.run()
		w.add(s.arrive("old"))
		synctest.Wait()
		s.opens = "oo"
		for _, from := range []int64{8, 6} {
			w.truncated(&kgo.ErrDataLoss{ConsumedTo: 10, ResetTo: from, ResetToEpoch: 2})
		}
		w.add(s.arrive("new"))
		time.Sleep(time.Minute)
		w.add(s.arrive("later"))
		synctest.Wait()
		w.finish()
		<-w.ended
		require.Equal(t, []string{"old1: committed", "gaps from 6 on", "gaps from 6 on", "gaps from 6 on", "new1: committed", "later1: committed"}, s.log)
	})
}

// A worker that is stopped before that is noted handles none of the records.
func TestRecordsWrittenAnewAreNotHandledUnnoted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newPartitionFixture(t, Rules{})
		s.opens = strings.Repeat("o", 1000)
		s.worker.truncated(&kgo.ErrDataLoss{ConsumedTo: 10, ResetTo: 6, ResetToEpoch: 2})
		go s.worker.run()
		s.worker.add(s.arrive("new"))
		time.Sleep(time.Minute)
		s.worker.finish()
		<-s.worker.ended
		require.NotContains(t, s.log, "new1: committed")
		_, advanced := s.worker.uncommitted()
		require.False(t, advanced)
	})
}
