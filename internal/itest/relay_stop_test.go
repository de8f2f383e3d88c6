package itest

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
)

// These tests have a real broker and the options of a client as franz-go sets them: with
// others, it waits less.

// newPlacesFixture has a topic of a real broker, and a reader of it.
func newPlacesFixture(t *testing.T) (*relayFixture, *oracle.Reader) {
	t.Helper()
	h := newRelayFixture(t)
	testenv.RealBrokers(t)
	testenv.CreateTopic(t, h.brokers, h.topic, 1, "max.message.bytes", "1000000")
	return h, h.follow(t)
}

// elsewhere returns a fixture whose events go to another topic.
func (h *relayFixture) elsewhere(t *testing.T, topic string) *relayFixture {
	t.Helper()
	other := *h
	other.topic = topic
	registry, err := outbox.NewRegistry("test", outbox.Event("test.oracle.happened.v1", "Key", oracle.Event.Aggregate).Topic(topic))
	require.NoError(t, err)
	other.rec, err = outbox.NewRecorder(registry, outbox.RecorderConfig{Schema: h.schema})
	require.NoError(t, err)
	return &other
}

// missing returns a fixture whose events go to a topic that does not exist.
func (h *relayFixture) missing(t *testing.T) *relayFixture {
	return h.elsewhere(t, "missing-"+uuid.NewString())
}

// plainRelay returns a relay with no option of franz-go but the brokers.
func (h *relayFixture) plainRelay(t *testing.T, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	cfg.Schema = h.schema
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	relay, err := outbox.NewRelay(h.db, []kgo.Opt{kgo.SeedBrokers(h.brokers...)}, cfg)
	require.NoError(t, err)
	return relay
}

// keyed returns one event for each of n keys.
func keyed(prefix string, n int) []oracle.Event {
	events := make([]oracle.Event, n)
	for i := range events {
		events[i] = numbered(fmt.Sprintf("%s-%d", prefix, i), 1, 1)[0]
	}
	return events
}

// stopWithin cancels a relay and requires that it is back soon.
func stopWithin(t *testing.T, d time.Duration, stop func()) {
	t.Helper()
	began := time.Now()
	stop()
	require.Less(t, time.Since(began), d, "Run was not back in time")
}

// requireOnce requires that each event arrives once, also after another relay has run,
// which sends again whatever the stopped one left.
func (h *relayFixture) requireOnce(t *testing.T, reader *oracle.Reader, events ...oracle.Event) {
	t.Helper()
	testenv.Run(t, h.plainRelay(t, quick).Run)
	requireArrival(t, reader, events...)
	last := numbered("last", 1, 1)
	h.commit(t, last...)
	requireArrival(t, reader, last...)
	arrived, err := reader.Arrived()
	require.NoError(t, err)
	times := map[string]int{}
	for _, e := range arrived {
		times[e.ID]++
	}
	repeated := 0
	for _, e := range events {
		if times[e.ID] > 1 {
			repeated++
		}
	}
	require.Zero(t, repeated, "events were sent again after a stop")
}

// An event above the limit of its topic, at the head of a batch, is sent after the
// others. If the relay is stopped in between, the others are not sent again.
func TestStopBehindLargeEventRepeatsNothing(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	h.setTopic(t, "max.message.bytes", "2000")
	good := keyed("good", 99)
	h.commit(t, append([]oracle.Event{poison("bad", 1)}, good...)...)
	relay, ended, hook := h.stoppable(t)
	hook.arm(1)
	testenv.Run(t, relay)
	<-hook.done
	stopWithin(t, 2*time.Second, ended)
	h.requireOnce(t, reader, good...)
}

// Events that are sent one by one do not keep a relay from stopping, and those that were
// sent are not sent again.
func TestStopWhileSendingOneByOne(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	relay, ended, hook := h.stoppable(t)
	first := keyed("first", 20) // enough for the relay to ask for the limit of the topic
	h.commit(t, first...)
	testenv.Run(t, relay)
	requireArrival(t, reader, first...)
	h.setTopic(t, "max.message.bytes", "2000") // which the relay does not notice for a minute
	events := keyed("good", 1000)
	hook.arm(20)
	h.commit(t, append([]oracle.Event{poison("bad", 1)}, events...)...)
	<-hook.done
	stopWithin(t, 2*time.Second, ended)
	h.requireOnce(t, reader, events...)
}

// A relay stops although events wait for a topic that is missing.
func TestStopWhileTopicIsMissing(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	missing := h.missing(t)
	relay, ended, _ := h.stoppable(t)
	testenv.Run(t, relay)
	missing.commit(t, keyed("known", 1)...)
	h.awaitStatuses(t, map[string]int{"waiting": 1})
	missing.commit(t, keyed("early", 10)...)
	good := keyed("good", 50)
	h.commit(t, good...)
	missing.commit(t, keyed("late", 10)...)
	time.Sleep(200 * time.Millisecond) // now they are on their way
	stopWithin(t, 2*time.Second, ended)
	h.requireOnce(t, reader, good...)
}

// A relay stops although many large events are under way, over a slow network.
func TestStopWhileLargeEventsAreUnderWay(t *testing.T) {
	t.Parallel()
	h, reader := newPlacesFixture(t)
	large := keyed("large", 30)
	for i := range large {
		large[i].Filler = strings.Repeat("x", 500_000)
	}
	h.commit(t, large...)
	relay, ended, hook := h.stoppable(t, kgo.Dialer(slowly(3<<20)), kgo.ProducerBatchCompression(kgo.NoCompression()))
	hook.arm(2)
	testenv.Run(t, relay)
	<-hook.done
	stopWithin(t, 2*time.Second, ended)
	require.False(t, reader.Has(large[29].ID), "it was stopped too late")
	h.requireOnce(t, reader, large...)
}

// stoppable returns a relay, a function that stops it and waits for it, and a hook that
// begins to stop it after some batches.
func (h *relayFixture) stoppable(t *testing.T, opts ...kgo.Opt) (run func(context.Context) error, stop func(), hook *afterBatches) {
	t.Helper()
	ctx, cancel := context.WithCancel(background)
	hook = &afterBatches{then: cancel, done: make(chan struct{})}
	cfg := quick
	cfg.Schema, cfg.Logger = h.schema, slog.New(slog.DiscardHandler)
	relay, err := outbox.NewRelay(h.db, append([]kgo.Opt{kgo.SeedBrokers(h.brokers...), kgo.WithHooks(hook)}, opts...), cfg)
	require.NoError(t, err)
	ended := make(chan struct{})
	run = func(context.Context) error { defer close(ended); return relay.Run(ctx) }
	return run, func() { cancel(); <-ended }, hook
}

// afterBatches calls a function when Kafka has accepted some batches.
type afterBatches struct {
	left atomic.Int32 // 0: it is not armed
	then func()
	done chan struct{}
}

func (a *afterBatches) arm(batches int32) { a.left.Store(batches) }

// OnProduceBatchWritten implements [kgo.HookProduceBatchWritten].
func (a *afterBatches) OnProduceBatchWritten(kgo.BrokerMetadata, string, int32, kgo.ProduceBatchMetrics) {
	if a.left.Load() > 0 && a.left.Add(-1) == 0 {
		a.then()
		close(a.done)
	}
}

// slowly dials connections that write so many bytes a second.
func slowly(bytes int) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, address)
		return &slowConn{conn, bytes}, err
	}
}

type slowConn struct {
	net.Conn
	bytes int // a second
}

func (c *slowConn) Write(b []byte) (int, error) {
	time.Sleep(time.Duration(len(b)) * time.Second / time.Duration(c.bytes))
	return c.Conn.Write(b)
}
