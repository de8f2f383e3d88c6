package itest

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
)

// jump is an event that only the new release of a service has. It goes to the action of step, as the next step.
type jump struct {
	Account string `json:"account"`
	N       int    `json:"n"`
}

func (j jump) account() string     { return j.Account }
func (jump) OccurredAt() time.Time { return time.Now() }

// twoReleases is a group of workers of two releases: the old one has COUNTED for steps, the new one also for jumps.
type twoReleases struct {
	*workerFixture
	old, latest *outbox.Registry
}

func newTwoReleases(t *testing.T) *twoReleases {
	f := &twoReleases{workerFixture: newWorkerFixture(t)}
	var err error
	f.old = f.events
	f.latest, err = outbox.NewRegistry("bank", outbox.Event("bank.account.stepped.v1", "Account", step.account),
		outbox.Event("bank.account.jumped.v1", "Account", jump.account))
	require.NoError(t, err)
	f.rec, err = outbox.NewRecorder(f.latest, outbox.RecorderConfig{Schema: f.schema})
	require.NoError(t, err)
	return f
}

func (f *twoReleases) run(of *outbox.Registry, cfg outbox.WorkerConfig) (stop func()) {
	f.t.Helper()
	f.events = of
	handlers := []outbox.Handler{f.effects("COUNTED", nil)}
	if of == f.latest {
		handlers = append(handlers, outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, j jump, _ outbox.Metadata) error {
			_, err := tx.Exec(ctx, f.sql(`INSERT INTO {schema}.effect (action, account, n) VALUES ('COUNTED', $1, $2)`), j.Account, j.N)
			return err
		}))
	}
	_, stop = f.start(cfg, handlers...)
	return stop
}

// mixed records n events of each account. Every other one is a jump, which only the new release has.
func (f *twoReleases) mixed(first, n int, accounts ...string) {
	f.t.Helper()
	require.NoError(f.t, pgx.BeginFunc(f.t.Context(), f.db, func(tx pgx.Tx) error {
		var events []outbox.DomainEvent
		for i := first; i < first+n; i++ {
			for _, account := range accounts {
				if i%2 == 0 {
					events = append(events, jump{account, i})
				} else {
					events = append(events, step{account, i})
				}
			}
		}
		return f.rec.Record(f.t.Context(), tx, events...)
	}))
	for _, wake := range f.wake {
		wake()
	}
}

const unknownRows = `SELECT count(*) FROM {schema}.event_delivery WHERE last_error_code IN ('unknown_type', 'unknown_action')`

// The old release claims no row of a type that only the new release has. It made such rows DEAD.
func TestOldReleaseTouchesNoNewTypes(t *testing.T) {
	t.Parallel()
	t.Run("workers", func(t *testing.T) {
		t.Parallel()
		f := newTwoReleases(t)
		cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 50 * time.Millisecond}
		cfg.Unknown = outbox.DeadLetterUnknown
		f.run(f.latest, cfg)
		f.eventually(`SELECT count(*) FROM {schema}.event_subscription`, 1)
		f.run(f.old, cfg)
		accounts := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}
		const steps = 20
		for n := 1; n <= steps; n++ {
			f.mixed(n, 1, accounts...)
		}
		f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status IN ('DONE', 'DEAD')`, steps*len(accounts))
		require.Zero(t, f.count(unknownRows), "of %d", steps*len(accounts))
		f.await(steps * len(accounts))
		f.requireOrder()
	})
	t.Run("workers after a rollback", func(t *testing.T) {
		t.Parallel()
		f := newTwoReleases(t)
		cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: 20 * time.Millisecond}
		stop := f.run(f.latest, cfg)
		f.mixed(1, 2, "a")
		f.await(2)
		stop()
		stop = f.run(f.old, cfg)
		f.mixed(3, 4, "a", "b") // 3 of each account goes on, all others wait behind 4
		f.commit(step{"marker", 1})
		f.eventually(`SELECT count(*) FROM {schema}.effect WHERE account = 'marker'`, 1)
		f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'DONE'`, 5)
		f.commit(step{"marker", 2}) // a later claim of the old release
		f.eventually(`SELECT count(*) FROM {schema}.effect WHERE account = 'marker'`, 2)
		require.Zero(t, f.count(unknownRows))
		require.Equal(t, 2, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PENDING' AND attempt_count = 0`))
		require.Equal(t, 4, f.count(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PARKED' AND attempt_count = 0`))
		stop()
		f.run(f.latest, cfg)
		f.await(12)
		require.Zero(t, f.count(unknownRows))
	})
	for _, name := range []string{"a consumer", "an older Decode"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testOldConsumer(t, name == "an older Decode")
		})
	}
}

const returnType = "test.sale.returned.v1"

// returned is an event that only the new release of a consumer has.
type returned struct {
	Product string `json:"product"`
	Amount  int    `json:"amount"`
}

func (r returned) productID() string   { return r.Product }
func (returned) OccurredAt() time.Time { return time.Unix(1, 0) }

// testOldConsumer parks events in the new release of a consumer, and has only the old release run then. With decode,
// the old release has the type that the new Decode returns for these events, and its own Decode returns another one.
func testOldConsumer(t *testing.T, decode bool) {
	const sales = 50
	s := newParkingFixture(t, 1)
	old := s.events
	latest, err := outbox.NewRegistry("shop", outbox.Event(saleType, "Product", sale.productID).Topic(s.topic),
		outbox.Event(returnType, "Product", returned.productID).Topic(s.topic))
	require.NoError(t, err)
	var fail atomic.Bool
	fail.Store(true)
	failing := func(context.Context, pgx.Tx, sale, outbox.Metadata) error {
		if fail.Load() {
			return errPlay
		}
		return nil
	}
	newest := outbox.Handle("COUNTED", func(ctx context.Context, tx pgx.Tx, r returned, _ outbox.Metadata) error {
		if fail.Load() {
			return errPlay
		}
		return s.write(ctx, tx, "COUNTED", sale{Product: r.Product, Amount: r.Amount})
	})
	cfg, old1 := s.config(t), s.config(t)
	if decode { // the new release calls returns sales; the old one does not know what they are
		old1.Decode = outbox.DecodeCloudEvent
		cfg.Decode = func(r *kgo.Record) (*outbox.Message, error) {
			m, err := outbox.DecodeCloudEvent(r)
			if m != nil {
				m.Type = saleType
			}
			return m, err
		}
	}
	start := func(of *outbox.Registry, cfg outbox.ConsumerConfig, handlers ...outbox.Handler) (stop func()) {
		s.events = of
		return testenv.Run(t, s.groupConsumer(t, s.group, cfg, handlers...).Run)
	}
	stop := start(latest, cfg, s.handler("Handle", "COUNTED", failing), newest)
	records := []*kgo.Record{s.sale("marker", 1)}
	for n := 1; n <= sales; n++ {
		r := s.sale("a", n)
		r.Headers[3].Value = []byte(returnType)
		records = append(records, r)
	}
	s.send(t, records...)
	s.awaitOffset(t, 0, sales+1)
	stop()
	fail.Store(false)
	require.Equal(t, fmt.Sprint("PARKED ", sales-1, " PENDING 2"), s.statuses(t, "COUNTED"))

	log := new(testenv.Buffer)
	old1.Logger = slog.New(slog.NewTextHandler(log, nil))
	stop = start(old, old1, s.handler("Handle", "COUNTED", nil))
	s.awaitJournal(t, "COUNTED", "marker", 1) // the old release has claimed what it has handlers for
	s.send(t, s.sale("marker", 2))
	s.awaitJournal(t, "COUNTED", "marker", 2)
	require.Equal(t, fmt.Sprint("DONE 1 PARKED ", sales-1, " PENDING 1"), s.statuses(t, "COUNTED"), s.parked(t))
	if !decode {
		const waits = "no process of the group has a handler for them"
		require.Eventually(t, func() bool { return strings.Contains(log.String(), waits) }, testenv.Patience, 10*time.Millisecond)
		require.Equal(t, 1, strings.Count(log.String(), waits), log.String())
	}
	stop()

	start(latest, cfg, s.handler("Handle", "COUNTED", failing), newest)
	s.awaitJournal(t, "COUNTED", "a", sales)
	require.NotContains(t, s.statuses(t, "COUNTED"), "DEAD")
}

// A process that makes a delivery due which it has no handler for notifies the one that has. That one would poll a
// minute later.
func TestHeadForAnotherReleaseIsClaimedAtOnce(t *testing.T) {
	t.Parallel()
	f := newTwoReleases(t)
	began, end := make(chan struct{}), make(chan struct{})
	release := sync.OnceFunc(func() { close(end) })
	cfg := outbox.WorkerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}, PollInterval: time.Minute, Lease: 3 * time.Second}
	f.events = f.old
	f.start(cfg, f.effects("COUNTED", func(s step, _ outbox.Metadata) error {
		close(began)
		<-end
		return nil
	}))
	t.Cleanup(release)
	f.mixed(1, 1, "a")
	<-began
	f.run(f.latest, cfg)
	f.eventually(`SELECT count(*) FROM {schema}.event_subscription, jsonb_object_keys(routes)`, 2)
	f.mixed(2, 1, "a")
	f.eventually(`SELECT count(*) FROM {schema}.event_delivery WHERE status = 'PARKED'`, 1)
	// Both processes know each other, and the new one has looked for due deliveries.
	f.eventually(`SELECT count(*) FROM {schema}.event_member AS a, {schema}.event_member AS b WHERE a.member <> b.member AND a.renewed_at > b.started_at`, 2)
	release()
	released := time.Now()
	f.await(2)
	require.Less(t, time.Since(released), 20*time.Second)
	f.requireOrder()
}

// A consumer that dead-letters events of unknown types passes one to the process of its group that has a handler.
func TestUnknownTypeGoesToTheReleaseThatHasIt(t *testing.T) {
	t.Parallel()
	s := newParkingFixture(t, 1)
	cfg := s.config(t)
	cfg.Unknown = outbox.DeadLetterUnknown
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, s.handler("Handle", "COUNTED", nil)).Run)
	s.send(t, s.sale("a", 1))
	s.awaitJournal(t, "COUNTED", "a", 1) // the old release has the partition
	var err error
	s.events, err = outbox.NewRegistry("shop", outbox.Event(returnType, "Product", returned.productID).Topic(s.topic))
	require.NoError(t, err)
	testenv.Run(t, s.groupConsumer(t, s.group, cfg, outbox.Handle("RETURNED", func(ctx context.Context, tx pgx.Tx, r returned, _ outbox.Metadata) error {
		return s.write(ctx, tx, "RETURNED", sale{Product: r.Product, Amount: r.Amount})
	})).Run)
	require.Eventually(t, func() bool { return s.number(t, `SELECT count(*) FROM {s}.event_member`) == 2 }, testenv.Patience, 10*time.Millisecond)
	var records []*kgo.Record
	for n := range 5 {
		r := s.sale("b", n+1)
		r.Headers[3].Value = []byte(returnType)
		records = append(records, r)
	}
	s.send(t, records...)
	s.awaitStatuses(t, "", "DONE 5")
	s.awaitJournal(t, "RETURNED", "b", 5)
}
