package exactly

import (
	"context"
	"crypto/rand"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/plain"

	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/testenv"
)

// fixture is a relay's topics.
type fixture struct {
	brokers []string
	events  string
	cfg     Config
	going   *sync.WaitGroup
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	testenv.Long(t)
	f := &fixture{brokers: testenv.RealBrokers(t), going: new(sync.WaitGroup)}
	name := "exactly-" + uuid.NewString()
	f.events = name + "-events"
	testenv.CreateTopic(t, f.brokers, f.events, 3)
	opts := kafka.TransactionOpts(testenv.KafkaOpts(f.brokers), 10*time.Second)
	f.cfg = Config{Opts: append(opts, kafka.FlushOpts(opts)...), Topic: name + "-cursor", Key: "default", ID: name, Go: func(do func()) { f.going.Go(do) }}
	t.Cleanup(f.going.Wait)
	return f
}

// start returns a sender that has started, and what it has read.
func (f *fixture) start(t *testing.T) (*Sender, Record) {
	t.Helper()
	s := NewSender(f.cfg)
	t.Cleanup(s.Close)
	newest, _, err := s.Start(f.ctx(t), true)
	require.NoError(t, err)
	return s, newest
}

func (f *fixture) ctx(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	t.Cleanup(cancel)
	return ctx
}

// send sends a transaction with an event and a cursor record of the same number. It stays open.
func (f *fixture) send(t *testing.T, s *Sender, number int64) *Transaction {
	t.Helper()
	tx, err := s.Begin(f.ctx(t))
	require.NoError(t, err)
	errs, err := tx.Send(f.ctx(t), f.records(t, s, number))
	require.NoError(t, err)
	require.Equal(t, []error{nil, nil}, errs)
	return tx
}

func (f *fixture) records(t *testing.T, s *Sender, number int64) []kgo.Record {
	t.Helper()
	r, err := s.CursorRecord(Record{Number: number, Row: number, Token: "t"})
	require.NoError(t, err)
	return []kgo.Record{{Topic: f.events, Partition: int32(number % 3), Key: fmt.Append(nil, number), Value: fmt.Append(nil, number)}, r}
}

// visible returns the events that a reader of committed records sees.
func (f *fixture) visible(t *testing.T, s *Sender) (events []string) {
	t.Helper()
	r := kafka.NewReader(s.Client())
	spans, err := r.Spans(f.ctx(t), f.events, nil)
	require.NoError(t, err)
	for _, span := range spans {
		for span.Next < span.End {
			records, err := r.Read(f.ctx(t), &span)
			require.NoError(t, err)
			for _, r := range records {
				events = append(events, string(r.Value))
			}
		}
	}
	return events
}

// A start ends what a process that is gone has left open, and the process that comes back can commit nothing.
func TestFence(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	first, newest := f.start(t)
	require.Zero(t, newest)
	require.NoError(t, f.send(t, first, 1).Commit(f.ctx(t)).Wait(f.ctx(t)))
	open := f.send(t, first, 2)

	second, newest := f.start(t)
	require.Equal(t, int64(1), newest.Number, "the open transaction is aborted")
	require.NoError(t, f.send(t, second, 2).Commit(f.ctx(t)).Wait(f.ctx(t)))
	err := open.Commit(f.ctx(t)).Wait(f.ctx(t))
	require.Error(t, err)
	require.True(t, kafka.IsAnswer(err), "Kafka denies the commit: %v", err)
	_, err = first.Begin(f.ctx(t))
	require.Error(t, err, "nothing is sent after a denied commit")

	third, newest := f.start(t)
	require.Equal(t, int64(2), newest.Number)
	f.requireVisible(t, third, []string{"1", "2"})
}

// requireVisible waits until a reader sees events, and no others.
func (f *fixture) requireVisible(t *testing.T, s *Sender, events []string) {
	t.Helper()
	require.Eventually(t, func() bool {
		seen := f.visible(t, s)
		slices.Sort(seen)
		return slices.Equal(events, seen)
	}, testenv.Patience, 10*time.Millisecond, "Kafka writes the markers after it has confirmed the commit")
}

// Transactions of both ids are under way at once. The second one is committed only after the first one is, and not at
// all if the first one is denied.
func TestTwoIDsInTurn(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, _ := f.start(t)
	first := f.send(t, s, 1)
	c1 := first.Commit(f.ctx(t))
	c2 := f.send(t, s, 2).Commit(f.ctx(t))
	require.NoError(t, c2.Wait(f.ctx(t)))
	select {
	case <-c1.Done():
		require.NoError(t, c1.Wait(f.ctx(t)))
	default:
		require.Fail(t, "the first is confirmed before the second")
	}

	third := f.send(t, s, 3)
	require.Equal(t, 0, third.id)
	f.fenceOnly(t, 0)
	c3 := third.Commit(f.ctx(t))
	c4 := f.send(t, s, 4).Commit(f.ctx(t))
	require.Error(t, c3.Wait(f.ctx(t)))
	require.Error(t, c4.Wait(f.ctx(t)), "the fourth transaction must not be committed without the third")

	after, newest := f.start(t)
	require.Equal(t, int64(2), newest.Number)
	f.requireVisible(t, after, []string{"1", "2"})
}

// fenceOnly initializes one of the two ids.
func (f *fixture) fenceOnly(t *testing.T, i int) {
	t.Helper()
	client, err := kgo.NewClient(append(f.cfg.Opts, kgo.TransactionalID(f.cfg.IDs()[i]))...)
	require.NoError(t, err)
	defer client.Close()
	_, _, err = client.ProducerID(f.ctx(t))
	require.NoError(t, err)
}

// The newest record is found behind more aborted ones than are read at first, and beside those of another relay.
func TestReadToTheEnd(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, _ := f.start(t)
	require.NoError(t, f.send(t, s, 1).Commit(f.ctx(t)).Wait(f.ctx(t)))
	for n := range int64(firstLook) {
		require.NoError(t, f.send(t, s, 2+n).Abort(f.ctx(t)))
	}
	other := *f
	other.cfg.Key, other.cfg.ID = "other", f.cfg.ID+"-other"
	o, newest := other.start(t)
	require.Zero(t, newest)
	require.NoError(t, f.send(t, o, 7).Commit(f.ctx(t)).Wait(f.ctx(t)))
	_, newest = f.start(t)
	require.Equal(t, Record{Number: 1, Row: 1, Token: "t"}, newest)

	hides := f.send(t, o, 8)
	ctx, cancel := context.WithTimeout(f.ctx(t), 3*time.Second) // less than a transaction may last
	defer cancel()
	_, _, err := NewSender(f.cfg).startOnce(ctx)
	require.ErrorIs(t, err, ErrOpen)
	require.NoError(t, hides.Abort(f.ctx(t)))
	_, newest = f.start(t)
	require.Equal(t, int64(1), newest.Number)
}

// Another relay has a transaction open in the topic at any time. A start waits for the end of those that it has found.
func TestReadBesideABusyRelay(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	s, _ := f.start(t)
	require.NoError(t, f.send(t, s, 1).Commit(f.ctx(t)).Wait(f.ctx(t)))
	other := *f
	other.cfg.Key, other.cfg.ID = "other", f.cfg.ID+"-other"
	o, _ := other.start(t)
	open := f.send(t, o, 7)
	type result struct {
		newest Record
		err    error
	}
	started := make(chan result, 1)
	f.going.Go(func() {
		newest, _, err := NewSender(f.cfg).startOnce(f.ctx(t))
		started <- result{newest, err}
	})
	for n := int64(8); ; n++ {
		time.Sleep(200 * time.Millisecond)
		next := open.Commit(f.ctx(t))
		open = f.send(t, o, n) // before the commit is confirmed
		require.NoError(t, next.Wait(f.ctx(t)))
		select {
		case r := <-started:
			require.NoError(t, r.err)
			require.Equal(t, int64(1), r.newest.Number)
			require.NoError(t, open.Abort(f.ctx(t)))
			return
		default:
		}
	}
}

// startOnce is Start for a sender that is used for nothing else.
func (s *Sender) startOnce(ctx context.Context) (Record, bool, error) {
	defer s.Close()
	return s.Start(ctx, false)
}

func incompressible() []byte {
	b := make([]byte, 5000)
	_, _ = rand.Read(b)
	return b
}

// A refused record aborts its transaction, and the sender goes on.
func TestRefusal(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	small := f.events + "-small"
	testenv.CreateTopic(t, f.brokers, small, 1, "max.message.bytes", "1000")
	s, _ := f.start(t)
	tx, err := s.Begin(f.ctx(t))
	require.NoError(t, err)
	records := append(f.records(t, s, 1), kgo.Record{Topic: small, Value: incompressible()})
	errs, err := tx.Send(f.ctx(t), records)
	require.NoError(t, err)
	require.NoError(t, errs[0])
	require.ErrorIs(t, errs[2], kerr.MessageTooLarge)
	require.NoError(t, tx.Abort(f.ctx(t)))
	require.NoError(t, f.send(t, s, 1).Commit(f.ctx(t)).Wait(f.ctx(t)))
	f.requireVisible(t, s, []string{"1"})

	tx, err = s.Begin(f.ctx(t)) // nothing of it is accepted
	require.NoError(t, err)
	errs, err = tx.Send(f.ctx(t), []kgo.Record{{Topic: small, Value: incompressible()}})
	require.NoError(t, err)
	require.ErrorIs(t, errs[0], kerr.MessageTooLarge)
	require.NoError(t, tx.Abort(f.ctx(t)))
	require.NoError(t, f.send(t, s, 2).Commit(f.ctx(t)).Wait(f.ctx(t)))
	f.requireVisible(t, s, []string{"1", "2"})
}

// A topic that does not keep the newest record, or has several partitions, is not used. A missing one is created only
// where there may be no record.
func TestTopic(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, _, err := NewSender(f.cfg).startOnce(f.ctx(t))
	require.ErrorIs(t, err, ErrNoTopic)
	f.start(t)
	for _, wrong := range []struct {
		name       string
		partitions int32
		policy     string
	}{{"several", 2, "compact"}, {"deleted", 1, "delete"}, {"both", 1, "compact,delete"}} {
		cfg := f.cfg
		cfg.Topic = f.cfg.Topic + wrong.name
		testenv.CreateTopic(t, f.brokers, cfg.Topic, wrong.partitions, "cleanup.policy", wrong.policy)
		_, _, err := NewSender(cfg).startOnce(f.ctx(t))
		require.ErrorIs(t, err, ErrTopic, wrong.name)
	}
}

// What is read from the topic is a record of ours.
func TestParseRecord(t *testing.T) {
	t.Parallel()
	for _, wrong := range []string{"", "x", "{}", `{"number":0,"row":1,"token":"t"}`, `{"number":1,"row":1}`} {
		_, err := parseRecord([]byte(wrong))
		require.Error(t, err, wrong)
	}
}

// After some errors the client initializes its id by itself, and sends a record again. What it has sent before in the
// transaction is aborted then, and the rest must not be committed.
func TestTransactionInTwo(t *testing.T) {
	t.Parallel()
	k, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "first", "second"))
	require.NoError(t, err)
	t.Cleanup(k.Close)
	opts := []kgo.Opt{kgo.SeedBrokers(k.ListenAddrs()...), kgo.RecordPartitioner(kgo.ManualPartitioner())}
	opts = append(kafka.TransactionOpts(opts, 10*time.Second), kgo.ManualFlushing())
	s := NewSender(Config{Opts: opts, Topic: "cursor", Key: "default", ID: "id", Go: func(do func()) { do() }})
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	defer s.Close()
	_, _, err = s.Start(ctx, true)
	require.NoError(t, err)
	for range 2 { // so that each id has sent to the topic
		tx, err := s.Begin(ctx)
		require.NoError(t, err)
		errs, err := tx.Send(ctx, []kgo.Record{{Topic: "second"}})
		require.NoError(t, err)
		require.Equal(t, []error{nil}, errs)
		require.NoError(t, tx.Commit(ctx).Wait(ctx))
	}
	tx, err := s.Begin(ctx)
	require.NoError(t, err)
	errs, err := tx.Send(ctx, []kgo.Record{{Topic: "first"}})
	require.NoError(t, err)
	require.Equal(t, []error{nil}, errs)
	k.ControlKey(int16(kmsg.Produce), func(r kmsg.Request) (kmsg.Response, error, bool) {
		asked := r.(*kmsg.ProduceRequest)
		answer := asked.ResponseKind().(*kmsg.ProduceResponse)
		partition := kmsg.NewProduceResponseTopicPartition()
		partition.ErrorCode, partition.LogStartOffset = kerr.InvalidProducerEpoch.Code, 1000 // everything was removed
		topic := kmsg.NewProduceResponseTopic()
		topic.Topic, topic.TopicID = asked.Topics[0].Topic, asked.Topics[0].TopicID
		topic.Partitions = append(topic.Partitions, partition)
		answer.Topics = append(answer.Topics, topic)
		return answer, nil, true
	})
	errs, err = tx.Send(ctx, []kgo.Record{{Topic: "second"}})
	require.NoError(t, err)
	require.Equal(t, []error{nil}, errs, "the client has sent it again by itself")
	require.ErrorIs(t, tx.Commit(ctx).Wait(ctx), errInTwo)
}

// A client without rights on the transactional ids learns which it needs.
func TestMissingRights(t *testing.T) {
	t.Parallel()
	all := func(resource kmsg.ACLResourceType) kfake.ACL {
		return kfake.ACL{Resource: resource, Name: "*", Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: kmsg.ACLOperationAll, Allow: true}
	}
	topics, cluster := all(kmsg.ACLResourceTypeTopic), all(kmsg.ACLResourceTypeCluster)
	cluster.Name = "kafka-cluster"
	k, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.EnableSASL(), kfake.EnableACLs(), kfake.User("PLAIN", "u", "p", topics, cluster))
	require.NoError(t, err)
	t.Cleanup(k.Close)
	opts := []kgo.Opt{kgo.SeedBrokers(k.ListenAddrs()...), kgo.SASL(plain.Auth{User: "u", Pass: "p"}.AsMechanism())}
	s := NewSender(Config{Opts: kafka.TransactionOpts(opts, 10*time.Second), Topic: "cursor", Key: "default", ID: "outbox.1", Go: func(do func()) { do() }})
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Patience)
	defer cancel()
	defer s.Close()
	_, _, err = s.Start(ctx, true)
	require.ErrorIs(t, err, kerr.TransactionalIDAuthorizationFailed)
	require.ErrorContains(t, err, "the rights Write and Describe on the transactional ids that begin with outbox.1")
}

// The client has room for the largest cursor record.
func TestLargestRecord(t *testing.T) {
	t.Parallel()
	r := Record{Number: math.MaxInt64, Row: math.MaxInt64, Token: rand.Text(), Last: math.MaxInt64, Again: slices.Repeat([]int64{math.MaxInt64}, MaxAgain)}
	name := strings.Repeat("n", 10_000)
	s := NewSender(Config{Topic: "cursor"}.For(math.MaxInt64, name, name, name))
	record, err := s.CursorRecord(r)
	require.NoError(t, err)
	require.Less(t, len(record.Key)+len(record.Value), kafka.MaxCursorRecord)
}
