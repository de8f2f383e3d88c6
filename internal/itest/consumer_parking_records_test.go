package itest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	kafkaclient "github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxdlq"
)

// rewind has a group without members begin again at an offset of a partition.
func (s *parkingFixture) rewind(t testing.TB, partition int32, offset int64) {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(s.brokers...))
	require.NoError(t, err)
	defer client.Close()
	offsets := map[kafkaclient.Partition]int64{{Topic: s.topic, Number: partition}: offset}
	require.Eventually(t, func() bool {
		return kafkaclient.CommitGroupOffsets(background, client, s.group, offsets) == nil
	}, testenv.Patience, 50*time.Millisecond)
}

// A record that cannot be read or has no handler is DEAD without an attempt. After an operator
// retries it, it is read again.
func TestUnreadableRecordIsParked(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"undecodable", "unknown"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			s := newParkingFixture(t, 1)
			var fixed atomic.Bool
			cfg := s.config(t)
			cfg.Unknown = outbox.DeadLetterUnknown
			cfg.Decode = func(r *kgo.Record) (*outbox.Message, error) {
				m, err := outbox.DecodeCloudEvent(r)
				if err == nil && strings.Contains(string(r.Value), "bad") && !fixed.Load() {
					if what == "undecodable" {
						return nil, errors.New("cannot be read")
					}
					m.Type = "test.unknown.v1"
				}
				return m, err
			}
			handlers := []outbox.Handler{s.handler("Handle", "COUNTED", nil), s.handler("HandleNoTx", "SEEN", nil)}
			stop := testenv.Run(t, s.groupConsumer(t, s.group, cfg, handlers...).Run)
			s.send(t, s.sale("bad", 1), s.sale("good", 1), s.sale("bad", 2))
			class := map[string]string{"undecodable": "undecodable", "unknown": "unknown_type"}[what]
			for _, r := range s.deadLetters(t, 2) {
				h := deadLetterHeaders(r)
				require.Equal(t, []string{"0", "", class}, []string{h["dlq_attempts"], h["dlq_action"], h["dlq_error_class"]})
			}
			s.awaitStatuses(t, "", "DEAD 2")
			s.awaitJournal(t, "COUNTED", "good", 1)
			s.awaitOffset(t, 0, 3)

			stop() // it comes again: once is enough
			s.rewind(t, 0, 0)
			testenv.Run(t, s.groupConsumer(t, s.group, cfg, handlers...).Run)
			s.awaitOffset(t, 0, 3)
			s.awaitStatuses(t, "", "DEAD 2")

			s.retryDead(t, 2) // too early
			for _, r := range s.deadLetters(t, 4)[2:] {
				h := deadLetterHeaders(r)
				require.Equal(t, []string{"0", "", class}, []string{h["dlq_attempts"], h["dlq_action"], h["dlq_error_class"]})
			}
			s.awaitStatuses(t, "", "DEAD 2")
			fixed.Store(true)
			s.retryDead(t, 2)
			s.awaitStatuses(t, "", "DONE 2")
			s.awaitJournal(t, "COUNTED", "bad", 2)
			s.awaitJournal(t, "SEEN", "bad", 2)
		})
	}
}

// The record that a handler gets from a row is the one that came from Kafka.
func TestParkedRecordIsTheSame(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	type seen struct {
		record   *kgo.Record
		event    sale
		metadata outbox.Metadata
	}
	var mu sync.Mutex
	read, got := map[int64][]*kgo.Record{}, map[int64][]seen{}
	cfg := s.config(t)
	cfg.Retry.MaxOutage = -1
	cfg.Decode = func(r *kgo.Record) (*outbox.Message, error) {
		mu.Lock()
		defer mu.Unlock()
		read[r.Offset] = append(read[r.Offset], r)
		if len(r.Value) > 0 {
			if m, err := outbox.DecodeCloudEvent(r); err == nil {
				return m, nil
			}
		}
		return &outbox.Message{ID: fmt.Sprint("at ", r.Offset), Source: "bare", Type: saleType, ContentType: "application/json", Data: []byte(`{"product":"bare","amount":1}`)}, nil
	}
	h := outbox.OncePer(outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		all := got[m.Kafka.Offset]
		if len(all) < m.Attempt { // the first one may be called for twice: in a batch that fails, and alone
			got[m.Kafka.Offset] = append(all, seen{read[m.Kafka.Offset][len(read[m.Kafka.Offset])-1], e, m})
		}
		if m.Attempt < 3 {
			return errPlay
		}
		return s.write(ctx, tx, "COUNTED", e)
	}), func(e sale, m outbox.Metadata) (string, string) { return "sale", fmt.Sprint(m.Kafka.Offset) })
	binary := []byte{0, 0xff, 0xfe, '"', '\\', 0xc3, 0x28}
	plain := func(change func(*kgo.Record)) *kgo.Record {
		r := s.sale("k", 1)
		change(r)
		return r
	}
	records := []*kgo.Record{
		plain(func(*kgo.Record) {}),
		plain(func(r *kgo.Record) { r.Value = nil }),
		plain(func(r *kgo.Record) { r.Value = []byte{} }),
		plain(func(r *kgo.Record) { r.Key = nil }),
		plain(func(r *kgo.Record) { r.Key = []byte{} }),
		plain(func(r *kgo.Record) { r.Key = binary }),
		plain(func(r *kgo.Record) { r.Key = bytes.Repeat([]byte("k"), 100_000) }),
		plain(func(r *kgo.Record) {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: string(binary), Value: binary}, kgo.RecordHeader{Key: "none"}, kgo.RecordHeader{Key: "", Value: []byte{}},
				kgo.RecordHeader{Key: "twice", Value: []byte("1")}, kgo.RecordHeader{Key: "twice", Value: []byte("2")})
		}),
		plain(func(r *kgo.Record) { r.Headers[1].Value = append([]byte("id "), binary...) }),
		plain(func(r *kgo.Record) { r.Headers[1].Value = []byte(strings.Repeat("é", 200)) }),
		plain(func(r *kgo.Record) { r.Headers[1].Value = []byte(strings.ToUpper(uuid.NewString())) }),
		plain(func(r *kgo.Record) {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: "ce_subject", Value: []byte(strings.Repeat("s", 1000))}, kgo.RecordHeader{Key: "ce_time", Value: []byte("0001-01-01T00:00:00Z")})
		}),
		plain(func(r *kgo.Record) { r.Timestamp = time.UnixMilli(0) }),
		plain(func(r *kgo.Record) { r.Value = fmt.Appendf(nil, `{"product":%q,"amount":1}`, random(900_000)) }),
	}
	for i, r := range records {
		r.Timestamp = r.Timestamp.Truncate(time.Millisecond)
		if i > 0 && len(r.Key) > 0 && string(r.Key) == "k" {
			r.Key = fmt.Append(nil, "k-", i)
		}
	}
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, h).Run)
	s.send(t, records...)
	s.awaitOffset(t, 0, int64(len(records)))
	s.awaitStatuses(t, "COUNTED", fmt.Sprint("DONE ", len(records)))
	mu.Lock()
	defer mu.Unlock()
	for i, sent := range records {
		all := got[int64(i)]
		require.Len(t, all, 3, "record %d", i)
		for n, one := range all {
			r := one.record
			require.True(t, sent.Timestamp.Equal(r.Timestamp), "record %d: %v %v", i, sent.Timestamp, r.Timestamp)
			require.Equal(t, []any{sent.Topic, int32(0), int64(i), all[0].record.LeaderEpoch}, []any{r.Topic, r.Partition, r.Offset, r.LeaderEpoch})
			require.True(t, bytes.Equal(sent.Value, r.Value) && (sent.Value == nil) == (r.Value == nil), "value of record %d", i)
			require.Equal(t, all[0].record.Key, r.Key, "record %d", i)
			require.True(t, bytes.Equal(sent.Key, r.Key) && (sent.Key == nil) == (r.Key == nil), "key of record %d: %q %q", i, sent.Key, r.Key)
			require.Equal(t, all[0].record.Headers, r.Headers, "record %d", i)
			require.Equal(t, all[0].event, one.event)
			first, m := all[0].metadata, one.metadata
			require.Equal(t, *first.Kafka, *m.Kafka)
			require.Equal(t, n+1, m.Attempt)
			require.True(t, first.Time.Equal(m.Time))
			require.Equal(t, []any{first.ID, first.Source, first.Type, first.Subject, first.ContentType, first.Extensions, first.Topic(), first.Key()},
				[]any{m.ID, m.Source, m.Type, m.Subject, m.ContentType, m.Extensions, m.Topic(), m.Key()})
		}
	}
	require.Equal(t, len(records), s.number(t, `SELECT count(*)::int FROM {s}.journal`))
}

// A record that comes again is parked once, whatever became of it. A handler without a transaction has it again when
// it is done.
func TestParkedRecordComesAgain(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	var open atomic.Bool
	fails := func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		switch {
		case e.Product == "dead":
			return outbox.Permanent(errPlay)
		case !open.Load() && e.Product == "late":
			return errPlay
		}
		return nil
	}
	handlers := []outbox.Handler{s.handler("Handle", "COUNTED", fails), s.handler("HandleNoTx", "SEEN", fails)}
	sent := []*kgo.Record{s.sale("late", 1), s.sale("dead", 1), s.sale("late", 2), s.sale("good", 1), s.sale("good", 1)}
	sent[4].Headers = sent[3].Headers // the same event
	s.send(t, sent...)
	for range 3 {
		stop := testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), handlers...).Run)
		s.awaitOffset(t, 0, 5)
		for _, action := range []string{"COUNTED", "SEEN"} {
			s.awaitStatuses(t, action, "DEAD 1 PARKED 1 PENDING 1")
		}
		stop()
		require.Equal(t, "0", s.text(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE status = 'PROCESSING'`))
		s.rewind(t, 0, 0)
	}
	open.Store(true)
	stop := testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), handlers...).Run)
	// What comes again while its row is being done may get one more, if nothing says that it is done.
	awaitOpen := func(n int) {
		require.Eventually(t, func() bool {
			return s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE action = 'SEEN' AND status IN ('PENDING', 'PARKED', 'PROCESSING')`) == n
		}, testenv.Patience, 10*time.Millisecond)
	}
	s.awaitOffset(t, 0, 5)
	awaitOpen(0)
	s.awaitStatuses(t, "COUNTED", "DEAD 1 DONE 2")
	stop()
	require.Equal(t, []int{1, 2}, s.journal(t, "COUNTED", "late"))
	require.Equal(t, []int{1}, s.journal(t, "COUNTED", "good"))
	s.deadLetters(t, 2)

	s.rewind(t, 0, 0) // what is done and fails now is parked again, if nothing says that it is done
	open.Store(false)
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), handlers...).Run)
	awaitOpen(2)
	s.awaitOffset(t, 0, 5)
	open.Store(true)
	awaitOpen(0)
	require.Equal(t, "DEAD 1 DONE 2", s.statuses(t, "COUNTED"))
	require.Equal(t, []int{1, 2}, s.journal(t, "COUNTED", "late"))
	s.deadLetters(t, 2)
}

// A dead letter that is sent back has its row handled, once. One that an operator has resolved stays so, and of a row
// that is not DEAD, or is another group's, nothing happens.
func TestDeadLetterOfParkedEventIsReplayed(t *testing.T) {
	t.Parallel()
	testenv.RealBrokers(t)
	s := newParkingFixture(t, 1)
	var open atomic.Bool
	fails := func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if !open.Load() && e.Product != "good" {
			return outbox.Permanent(errPlay)
		}
		return nil
	}
	testenv.Run(t, s.groupConsumer(t, s.group, s.config(t), s.handler("Handle", "COUNTED", fails), s.handler("HandleNoTx", "SEEN", fails)).Run)
	other := *s
	other.group = "other-" + uuid.NewString()
	testenv.Run(t, other.groupConsumer(t, other.group, other.config(t), s.handler("Handle", "OTHER", nil)).Run)
	s.send(t, s.sale("a", 1), s.sale("resolved", 1), s.sale("good", 1))
	s.deadLetters(t, 4)
	for _, action := range []string{"COUNTED", "SEEN"} {
		s.awaitStatuses(t, action, "DEAD 2")
	}
	for _, product := range []string{"a", "resolved", "good"} {
		other.awaitJournal(t, "OTHER", product, 1)
	}
	open.Store(true)
	f := s.failures(t)
	filter := s.dead()
	filter.Key = "resolved"
	n, err := f.ResolveAll(background, filter, bulk, operator)
	require.NoError(t, err)
	require.Equal(t, 2, n)
	offset := int64(3)
	for range 2 { // and once more, when they are done
		report, err := outboxdlq.Replay(background, testenv.KafkaOpts(s.brokers), outboxdlq.ReplayConfig{Topic: s.topic + ".dlq"})
		require.NoError(t, err)
		require.Equal(t, 4, report.Sent)
		offset += 4
		s.awaitOffset(t, 0, offset)
		other.awaitOffset(t, 0, offset)
		s.awaitStatuses(t, "COUNTED", "DEAD 1 DONE 1")
		s.awaitStatuses(t, "SEEN", "DEAD 1 DONE 1")
	}
	require.Equal(t, []int{1}, s.journal(t, "COUNTED", "a"))
	require.Empty(t, s.journal(t, "COUNTED", "resolved"))
	require.Empty(t, s.journal(t, "SEEN", "resolved"))
	for _, product := range []string{"a", "resolved", "good"} {
		require.Equal(t, []int{1}, s.journal(t, "OTHER", product))
	}
	require.Equal(t, "0", s.text(t, `SELECT count(*)::text FROM {s}.event_delivery WHERE consumer_group = $1`, other.group))
	s.deadLetters(t, 4)
	require.Equal(t, 2, s.number(t, `SELECT count(*)::int FROM {s}.event_delivery WHERE status = 'DEAD' AND resolved_at IS NOT NULL`))
}

// A replay that comes while its row waits for the next attempt leaves it as it is.
func TestReplayOfWaitingEvent(t *testing.T) {
	t.Parallel()
	testenv.RealBrokers(t)
	s := newParkingFixture(t, 1)
	var attempts atomic.Int64
	cfg := s.config(t)
	cfg.Retry.MaxRetries, cfg.Retry.RetryWait, cfg.Retry.MaxRetryWait = 1, time.Millisecond, time.Millisecond
	cfg.Retry.MaxOutage = -1
	cfg.HoldDead = true
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", func(_ context.Context, _ pgx.Tx, e sale, _ outbox.Metadata) error {
		if sold(e) != "k 1" {
			return nil
		}
		if attempts.Add(1) > 2 {
			return outbox.RetryAfter(errPlay, time.Hour)
		}
		return errPlay
	})).Run)
	s.send(t, s.sale("k", 1), s.sale("k", 2))
	s.deadLetters(t, 1)
	s.awaitStatuses(t, "COUNTED", "DEAD 1 PARKED 1")
	for n := range 2 {
		_, err := outboxdlq.Replay(background, testenv.KafkaOpts(s.brokers), outboxdlq.ReplayConfig{Topic: s.topic + ".dlq"})
		require.NoError(t, err)
		s.awaitOffset(t, 0, int64(3+n))
		require.Eventually(t, func() bool { return s.parked(t) == "COUNTED PENDING 1 handler; COUNTED PARKED 0" }, testenv.Patience, 10*time.Millisecond)
	}
	require.EqualValues(t, 3, attempts.Load())
	require.Empty(t, s.journal(t, "COUNTED", "k"))
	require.True(t, slices.Equal([]string{"1"}, []string{s.text(t, `SELECT max(attempt_count)::text FROM {s}.event_delivery`)}))
}
