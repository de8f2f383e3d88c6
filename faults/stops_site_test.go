package faults

import (
	"context"
	"fmt"
	"hash/fnv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/absent"
	"github.com/outboxgo/outbox/internal/oracle"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// stopsSite is a site whose events go to several topics, each key to one: good
// takes everything, late does not exist at first and missing until the end, short
// wants one replica more than there is, and limited takes small events only.
type stopsSite struct {
	*site
	*crew
	relays                       *pgxpool.Pool
	late, missed, short, limited string
	readers                      map[string]*oracle.Reader // by topic
	versions                     map[string]int64          // of the keys of bursts
	operators                    *operators
	lockedAt                     map[string]int // events, and at how many stops operators had locked their rows
	besideOpen                   int            // stops beside an open transaction of an operator
}

// The events of all topics but the good one, whose are [oracle.Event].
type (
	lateEvent    struct{ oracle.Event }
	missedEvent  struct{ oracle.Event }
	shortEvent   struct{ oracle.Event }
	limitedEvent struct{ oracle.Event }
)

const (
	limit    = 64 << 10  // bytes that the limited topic takes
	overSize = 100 << 10 // bytes of what it rejects
	bigSize  = 900_000   // bytes of the largest events
)

func newStopsSite(t *testing.T) *stopsSite {
	t.Helper()
	s := &stopsSite{readers: map[string]*oracle.Reader{}, versions: map[string]int64{}, lockedAt: map[string]int{}}
	s.crew = newCrew(t)
	server := startServer(t, nil)
	s.site = newSiteBeside(t, server, server.URL(), s.startKafka(t, nil).Brokers())
	s.late, s.missed, s.short, s.limited = s.topic+"-late", s.topic+"-missed", s.topic+"-short", s.topic+"-limited"
	s.relays = s.pool(t)
	s.operators = newOperators(s.site)
	for _, topic := range []string{s.topic, s.late, s.missed, s.short, s.limited} {
		s.readers[topic] = s.followTopic(t, topic)
	}
	s.create(t, s.topic)
	require.NoError(t, absent.CreateTopic(s.ctx, s.brokers, s.short, 3, map[string]string{"min.insync.replicas": "2"}))
	s.create(t, s.limited, "max.message.bytes", fmt.Sprint(limit))
	events, err := outbox.NewRegistry("faults",
		outbox.Event("test.fault.happened.v1", "Key", oracle.Event.Aggregate).Topic(s.topic),
		outbox.Event("test.late.happened.v1", "Key", lateEvent.Aggregate).Topic(s.late),
		outbox.Event("test.missed.happened.v1", "Key", missedEvent.Aggregate).Topic(s.missed),
		outbox.Event("test.short.happened.v1", "Key", shortEvent.Aggregate).Topic(s.short),
		outbox.Event("test.limited.happened.v1", "Key", limitedEvent.Aggregate).Topic(s.limited))
	require.NoError(t, err)
	s.rec, err = outbox.NewRecorder(events, outbox.RecorderConfig{})
	require.NoError(t, err)
	return s
}

func (s *stopsSite) create(t *testing.T, topic string, settings ...string) {
	t.Helper()
	testenv.CreateTopic(t, s.brokers, topic, 3, settings...)
}

// write lets writers commit until stop is called.
func (s *stopsSite) write(t *testing.T, seed uint64) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	stopped, done := make(chan struct{}), make(chan error, 1)
	go func() {
		done <- oracle.Write(ctx, oracle.Writers{
			DB: s.db, Schema: "public", Seed: seed, Record: s.record, Events: 1 << 30, Stop: stopped,
			Writers: 4, Keys: 200, Pause: 50 * time.Millisecond, Open: 1,
		})
		close(done)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	s.awaitHistory(t)
	return func() {
		close(stopped)
		require.NoError(t, <-done)
	}
}

// awaitHistory waits until writers have made their tables.
func (s *stopsSite) awaitHistory(t *testing.T) {
	t.Helper()
	require.True(t, s.await(t, testenv.Patience, func() (made bool) {
		require.NoError(t, s.db.QueryRow(s.ctx, `SELECT to_regclass('oracle_history') IS NOT NULL`).Scan(&made))
		return made
	}), "writers do not begin")
}

// burst records n small events at once.
func (s *stopsSite) burst(t *testing.T, n int) {
	t.Helper()
	if n == 0 {
		return
	}
	events, ids := make([]oracle.Event, n), make([]string, n)
	for i := range events {
		key := fmt.Sprintf("burst-%d", i%500)
		s.versions[key]++
		ids[i] = uuid.NewString()
		events[i] = oracle.Event{ID: ids[i], Key: key, Version: s.versions[key]}
	}
	require.NoError(t, pgx.BeginFunc(s.ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(s.ctx, `INSERT INTO oracle_history SELECT unnest($1::text[])`, ids); err != nil {
			return err
		}
		return s.record(s.ctx, tx, events...)
	}))
}

// record is an oracle.Record.
func (s *stopsSite) record(ctx context.Context, tx pgx.Tx, events ...oracle.Event) error {
	all := make([]outbox.DomainEvent, len(events))
	for i, e := range events {
		all[i] = forTopic(e)
	}
	return s.rec.Record(ctx, tx, all...)
}

// forTopic chooses the topic of an event by its key, and sometimes makes the event
// large: one of the limited topic larger than that takes.
func forTopic(e oracle.Event) outbox.DomainEvent {
	chance := hashOf(e.ID)
	switch hashOf(e.Key) % 10 {
	case 0:
		return lateEvent{e}
	case 1:
		return missedEvent{e}
	case 2:
		return shortEvent{e}
	case 3, 4:
		if chance%30 == 0 && !strings.HasPrefix(e.Key, "burst") {
			e.Filler = oracle.Text(overSize)
		}
		return limitedEvent{e}
	default:
		if chance%150 == 0 {
			e.Filler = oracle.Text(bigSize)
		}
		return e
	}
}

func hashOf(text string) uint32 {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(text)) // never fails
	return hash.Sum32()
}

// lift makes all topics take everything, and all that waits due.
func (s *stopsSite) lift(t *testing.T) {
	t.Helper()
	s.create(t, s.missed)
	s.configure(t, s.short, "min.insync.replicas", "1")
	s.configure(t, s.limited, "max.message.bytes", fmt.Sprint(2*bigSize))
	_, err := s.db.Exec(s.ctx, `UPDATE outbox_failed SET next_retry_at = now() WHERE status IN ('waiting', 'failed')`)
	require.NoError(t, err)
}

// configure changes a setting of a topic.
func (s *stopsSite) configure(t *testing.T, topic, name, value string) {
	t.Helper()
	change := kmsg.NewIncrementalAlterConfigsRequestResource()
	change.ResourceType, change.ResourceName = kmsg.ConfigResourceTypeTopic, topic
	change.Configs = []kmsg.IncrementalAlterConfigsRequestResourceConfig{{Name: name, Value: &value}}
	request := kmsg.NewPtrIncrementalAlterConfigsRequest()
	request.Resources = append(request.Resources, change)
	response, err := request.RequestWith(s.ctx, s.admin(t))
	require.NoError(t, err)
	require.NoError(t, kerr.ErrorForCode(response.Resources[0].ErrorCode))
}

// missing returns how many of the committed events have arrived in no topic.
func (s *stopsSite) missing(committed map[string]struct{}) (n int) {
	for id := range committed {
		if !s.has(id) {
			n++
		}
	}
	return n
}

func (s *stopsSite) has(id string) bool {
	for _, reader := range s.readers {
		if reader.Has(id) {
			return true
		}
	}
	return false
}

// arrived returns all that is in the topics, in the order of each key, and where it is.
func (s *stopsSite) arrived(t *testing.T) (all []oracle.Event, places []oracle.Place) {
	t.Helper()
	for topic, reader := range s.readers {
		ends, err := oracle.Ends(s.ctx, s.brokers, topic)
		require.NoError(t, err)
		require.True(t, s.await(t, testenv.Patience, func() bool { return reader.CaughtUp(ends) }), "the reader of %s lags behind", topic)
		arrived, err := reader.Arrived()
		require.NoError(t, err)
		all = append(all, arrived...)
		places = append(places, reader.Places()[:len(arrived)]...)
	}
	return all, places
}
