package nats_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	natsgo "github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/examples/nats"
	"github.com/outboxgo/outbox/internal/testenv"
)

// paid is an event of an account: its n-th.
type paid struct {
	Account string    `json:"account"`
	N       int       `json:"n"`
	At      time.Time `json:"at"`
}

func (e paid) OccurredAt() time.Time { return e.At }
func (e paid) account() string       { return e.Account }

// forwarded is a paid of which the forwarder knows the type alone.
type forwarded struct{ nats.Payload }

const topic = "account-events"

// broker is a server of NATS in a process of its own.
type broker struct {
	t         *testing.T
	dir, port string
	process   *exec.Cmd
}

func newBroker(t *testing.T) *broker {
	t.Helper()
	free, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := strconv.Itoa(free.Addr().(*net.TCPAddr).Port)
	require.NoError(t, free.Close())
	b := &broker{t: t, dir: t.TempDir(), port: port}
	b.start()
	t.Cleanup(b.kill)
	return b
}

func (b *broker) url() string { return "nats://127.0.0.1:" + b.port }

func (b *broker) start() {
	b.t.Helper()
	b.process = exec.Command(os.Args[0])
	b.process.Env = append(os.Environ(), dirVar+"="+b.dir, portVar+"="+b.port)
	b.process.Stderr = os.Stderr
	require.NoError(b.t, b.process.Start())
}

// kill ends the server without a warning.
func (b *broker) kill() {
	_ = b.process.Process.Kill()
	_ = b.process.Wait()
}

func newRecorder(t *testing.T, db *pgxpool.Pool, schema string) *outbox.Recorder {
	t.Helper()
	require.NoError(t, outbox.Migrate(t.Context(), db, outbox.MigrateConfig{Schema: schema}))
	events, err := outbox.NewRegistry("bank", outbox.Event("bank.account.paid.v1", "Account", paid.account), outbox.AllowRaw())
	require.NoError(t, err)
	rec, err := outbox.NewRecorder(events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	return rec
}

// forwardedEvents returns the registry of the forwarder.
func forwardedEvents(t *testing.T) *outbox.Registry {
	t.Helper()
	events, err := outbox.NewRegistry("bank", outbox.Event("bank.account.paid.v1", "Account", forwarded.AggregateID))
	require.NoError(t, err)
	return events
}

// Every event is in the stream once, and those of an account in their order, although the server is killed
// again and again.
func TestForward(t *testing.T) {
	db, schema := testenv.Schema(t)
	rec := newRecorder(t, db, schema)
	b := newBroker(t)
	conn, err := nats.Connect(b.url())
	require.NoError(t, err)
	defer conn.Close()
	js, err := jetstream.New(conn)
	require.NoError(t, err)
	var stream jetstream.Stream
	require.Eventually(t, func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		stream, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "ACCOUNTS", Subjects: []string{topic}, Duplicates: 10 * time.Minute})
		return err == nil
	}, testenv.Patience, 50*time.Millisecond, "no stream: %v", err)

	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Retry: outbox.RetryPolicy{MaxRetryWait: time.Second}, From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
	cfg.Schema, cfg.Retry.RetryWait, cfg.Logger = schema, 50*time.Millisecond, slog.New(slog.DiscardHandler)
	cfg.Retry.RetriesFor = func(error) int { return 10_000 } // an outage of NATS may last
	w, err := outbox.NewWorker(db, forwardedEvents(t), "nats", cfg, nats.Forward[forwarded]("FORWARDED", js))
	require.NoError(t, err)
	testenv.Run(t, w.Run)

	const accounts, each, kills = 10, 40, 3
	for n := 1; n <= each; n++ {
		require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
			for a := range accounts {
				if err := rec.Record(t.Context(), tx, paid{fmt.Sprint("a", a), n, time.Now()}); err != nil {
					return err
				}
			}
			return nil
		}))
		w.Waker().Wake()
		if n%(each/(kills+1)) == 0 {
			b.kill()
			b.start()
		}
	}
	var done, again int
	require.Eventually(t, func() bool {
		require.NoError(t, db.QueryRow(t.Context(), "SELECT count(*) FILTER (WHERE status = 'DONE'), count(*) FILTER (WHERE attempt_count > 1) FROM "+
			pgx.Identifier{schema, "event_delivery"}.Sanitize()).Scan(&done, &again))
		return done == accounts*each
	}, testenv.Patience, 50*time.Millisecond)
	require.Positive(t, again, "nothing was published again: the kills came when all was quiet")

	found, last := map[string]bool{}, map[string]int{}
	for seq := uint64(1); ; seq++ {
		msg, err := stream.GetMsg(t.Context(), seq)
		if err != nil {
			require.ErrorIs(t, err, jetstream.ErrMsgNotFound)
			break
		}
		var e paid
		require.NoError(t, json.Unmarshal(msg.Data, &e))
		require.False(t, found[msg.Header.Get("ce-id")], "event %s is there twice", msg.Header.Get("ce-id"))
		found[msg.Header.Get("ce-id")] = true
		require.Equal(t, last[e.Account]+1, e.N, "the order of %s", e.Account)
		last[e.Account] = e.N
		require.Equal(t, []string{"1.0", "bank.account.paid.v1", "bank", e.Account, e.Account, "application/json"}, []string{
			msg.Header.Get("ce-specversion"), msg.Header.Get("ce-type"), msg.Header.Get("ce-source"), msg.Header.Get("ce-subject"),
			msg.Header.Get("ce-partitionkey"), msg.Header.Get("Content-Type"),
		})
	}
	require.Len(t, found, accounts*each)
}

// stream keeps what is published.
type stream struct {
	jetstream.Publisher
	messages chan *natsgo.Msg
}

// PublishMsg implements [jetstream.Publisher].
func (s stream) PublishMsg(_ context.Context, msg *natsgo.Msg, _ ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	s.messages <- msg
	return &jetstream.PubAck{}, nil
}

// An event is forwarded as it was recorded, whatever the forwarder knows of its type, with its headers; and a tombstone
// without data.
func TestForwardAsRecorded(t *testing.T) {
	db, schema := testenv.Schema(t)
	rec := newRecorder(t, db, schema)
	require.NoError(t, pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
		return rec.Record(t.Context(), tx,
			outbox.With(outbox.RawEvent{EventType: "bank.account.paid.v1", AggregateID: "a1", Time: time.Now(), Payload: []byte(`{"account": "<a1>", "new": 12345678901234567890}`)},
				outbox.EventOptions{Headers: map[string]string{"tenant": "t1"}}),
			outbox.With(paid{Account: "a2", At: time.Now()}, outbox.EventOptions{Tombstone: true}))
	}))
	s := stream{messages: make(chan *natsgo.Msg, 2)}
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{Schema: schema, From: outbox.FromStart, Logger: slog.New(slog.DiscardHandler)}, PollInterval: 20 * time.Millisecond}
	w, err := outbox.NewWorker(db, forwardedEvents(t), "nats", cfg, nats.Forward[forwarded]("FORWARDED", s))
	require.NoError(t, err)
	testenv.Run(t, w.Run)
	got := map[string]*natsgo.Msg{}
	for range 2 {
		select {
		case msg := <-s.messages:
			got[msg.Header.Get("ce-subject")] = msg
		case <-time.After(testenv.Patience):
			require.Fail(t, "not forwarded", "%v", got)
		}
	}
	require.Equal(t, `{"new": 12345678901234567890, "account": "<a1>"}`, string(got["a1"].Data))
	require.Equal(t, []string{"t1", "application/json", ""}, []string{got["a1"].Header.Get("tenant"), got["a1"].Header.Get("Content-Type"), got["a1"].Header.Get("ce-tombstone")})
	require.Empty(t, got["a2"].Data)
	require.Equal(t, []string{"", "true"}, []string{got["a2"].Header.Get("Content-Type"), got["a2"].Header.Get("ce-tombstone")})
}
