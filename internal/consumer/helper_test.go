package consumer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox/internal/deadletter"
	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/handling"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pauses"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/starts"
)

// played is an event whose handlers do what its play says.
type played struct{ Name string }

func (played) OccurredAt() time.Time { return time.Unix(1, 0) }

// playedType is the event type of [played].
const playedType = "test.play.acted.v1"

// partitionFixture is what a processor and a worker are given in place of PostgreSQL and Kafka.
// It plays their answers and notes what happens.
//
// A play has a sign for each call in turn; after its last one everything goes well.
type partitionFixture struct {
	t            *testing.T
	worker       *partitionWorker
	handlers     map[string]string // by event: + goes well, - fails, p fails for good, ! panics, x ends its goroutine, 4 is a conflict, f finds another server full, = changes settings, s stops the worker, a abandons it, z pauses the topic for an hour, Z does so and fails
	transactions string            // + goes well, d is a deadlock, o an outage, n cannot note anything, c a connection that is lost while others can be had
	sends        string            // + goes well, l is too large, u finds the topic unavailable

	sets    bool                      // the handler changes settings
	db      *pgxpool.Pool             // what is queued runs there; nil: it does not
	unused  bool                      // handlers do not use their transactions
	noted   map[handling.NoteKey]bool // committed
	current []string                  // calls of handlers in the transaction
	log     []string
	opens   string // + goes well, o is an outage
	commits int    // that were asked for
	forged  bool   // headers of replays
	paused  []bool
	records []*kgo.Record // dead letters
	resumed atomic.Bool   // the topic, since the last call of a handler
}

// next takes the next sign of a play.
func next(play *string) byte {
	if *play == "" {
		return '+'
	}
	sign := (*play)[0]
	*play = (*play)[1:]
	return sign
}

var errPlayed = errors.New("played")

func (s *partitionFixture) InTx(ctx context.Context, _ *handling.Activity, keys []handling.NoteKey, _ bool, queue func(*pgx.Batch), f func(handling.Tx, map[handling.NoteKey]bool) error) error {
	if s.db != nil {
		var b pgx.Batch
		queue(&b)
		require.NoError(s.t, s.db.SendBatch(ctx, &b).Close())
	}
	sign := next(&s.transactions)
	switch sign {
	case 'o':
		s.log = append(s.log, "no connection")
		return &handling.NoteError{Err: errPlayed}
	case 'n':
		s.log = append(s.log, "no notes")
		return &handling.NoteError{Err: &pgconn.PgError{Code: "57014"}}
	}
	before, result := maps.Clone(s.noted), "rolled back"
	fresh := s.markHandled(keys)
	s.current = nil
	defer func() { // also if a handler ends its goroutine
		for k := range fresh {
			delete(s.noted, k)
		}
		if result == "rolled back" {
			s.noted = before
		}
		s.log = append(s.log, strings.Join(s.current, " ")+": "+result)
		s.current = nil
	}()
	err := f(&playedTx{fixture: s}, fresh)
	switch {
	case err != nil:
	case sign == 'd':
		err = fmt.Errorf("commit: %w", &pgconn.PgError{Code: "40P01"})
	case sign == 'c':
		err = &handling.ConnectionError{Err: errPlayed}
	default:
		result = "committed"
	}
	return err
}

func (s *partitionFixture) markHandled(keys []handling.NoteKey) map[handling.NoteKey]bool {
	fresh := map[handling.NoteKey]bool{}
	for _, k := range keys {
		if !s.noted[k] {
			fresh[k], s.noted[k] = true, true
		}
	}
	return fresh
}

// playedTx is a transaction of a partitionFixture.
type playedTx struct {
	fixture *partitionFixture
	changed bool
}

func (tx *playedTx) Call(_ string, f func(pgx.Tx) error) error {
	err := f(nil)
	tx.changed = tx.changed || tx.fixture.sets
	tx.fixture.sets = false
	return err
}

func (tx *playedTx) ChangedSettings() bool { return tx.changed }
func (tx *playedTx) Used() bool            { return !tx.fixture.unused }
func (tx *playedTx) Own() pgx.Tx           { return nil }

func (s *partitionFixture) Now(context.Context) (time.Time, error) { return time.Now(), nil }

func (s *partitionFixture) Ping(context.Context) error {
	if strings.HasPrefix(s.transactions, "o") {
		return errPlayed
	}
	return nil
}

func (s *partitionFixture) pauseFetching(kafka.Partition)  { s.paused = append(s.paused, true) }
func (s *partitionFixture) resumeFetching(kafka.Partition) { s.paused = append(s.paused, false) }
func (s *partitionFixture) requestCommit()                 { s.commits++ }
func (s *partitionFixture) suspect(ctx context.Context, _ kafka.Partition, offset int64, stopped bool) (int, error) {
	s.log = append(s.log, fmt.Sprintf("suspect %d, stopped: %t, in time: %t", offset, stopped, ctx.Err() == nil))
	return 0, nil
}

func (s *partitionFixture) proveHeld(_ context.Context, _ kafka.Partition, committed kgo.EpochOffset) error {
	s.log = append(s.log, fmt.Sprintf("committed %d of epoch %d", committed.Offset, committed.Epoch))
	return nil
}

func (s *partitionFixture) truncated(loss *kgo.ErrDataLoss) {
	s.log = append(s.log, fmt.Sprintf("lost records before %d, from %d on", loss.ConsumedTo, loss.ResetTo))
}

func (s *partitionFixture) openGaps(_ context.Context, _ kafka.Partition, from int64) error {
	s.log = append(s.log, fmt.Sprintf("gaps from %d on", from))
	if next(&s.opens) == 'o' {
		return errPlayed
	}
	return nil
}

func (s *partitionFixture) passGaps(context.Context, []starts.Gap, int64) error {
	return nil
}
func (s *partitionFixture) topicID(string) kafka.TopicID { return kafka.TopicID{} }

func (s *partitionFixture) checkReplays(_ context.Context, records []*kgo.Record) ([]deadletter.Answer, error) {
	answers := make([]deadletter.Answer, len(records))
	for i := range answers {
		if s.forged {
			answers[i].Err = deadletter.ErrNoReplay
		}
	}
	return answers, nil
}

func (s *partitionFixture) produce(_ context.Context, r *kgo.Record) error {
	switch next(&s.sends) {
	case 'l':
		return kerr.MessageTooLarge
	case 'u':
		return kerr.UnknownTopicOrPartition
	}
	s.log = append(s.log, strings.TrimSpace(fmt.Sprintf("dead letter %s after %s: %s %s", r.Key, headerOf(r, deadletter.Attempts), headerOf(r, deadletter.ErrorClass), headerOf(r, deadletter.ValueOmitted))))
	s.records = append(s.records, r)
	return nil
}

// pause pauses the topic for an hour.
func (s *partitionFixture) pause() {
	s.worker.limits.pauses.Pause(s.worker.partition.Topic)
	time.AfterFunc(time.Hour, func() {
		s.resumed.Store(true)
		s.worker.limits.pauses.Resume(s.worker.partition.Topic)
	})
}

// handle is what every handler does.
func (s *partitionFixture) handle(ctx context.Context, e played, m envelope.Received) error {
	if s.resumed.Swap(false) {
		s.log = append(s.log, "resumed")
	}
	s.current = append(s.current, fmt.Sprint(e.Name, m.Attempt))
	play := s.handlers[e.Name]
	sign := next(&play)
	s.handlers[e.Name] = play
	switch sign {
	case '-':
		return errPlayed
	case 'p':
		return handling.Permanent(errPlayed)
	case '!':
		panic("played")
	case 'x':
		runtime.Goexit()
	case '4':
		return &pgconn.PgError{Code: "40001"}
	case 'f':
		return &pgconn.PgError{Code: "53400"}
	case '=':
		s.sets = true
	case 'z':
		s.pause()
	case 'Z':
		s.pause()
		return errPlayed
	case 's':
		s.worker.finish()
	case 'a':
		s.worker.abandon()
		return ctx.Err()
	}
	return nil
}

// handle returns a handler of f with a transaction.
func handle[E any](action string, f func(ctx context.Context, tx pgx.Tx, event E, m envelope.Received) error) *handling.Handler {
	return &handling.Handler{Action: action, GoType: reflect.TypeFor[E](), Kind: handling.InTx, One: func(ctx context.Context, tx pgx.Tx, a *handling.Arrival) error {
		return f(ctx, tx, a.Event.(E), a.Meta)
	}}
}

// handleNoTx returns a handler of f without a transaction.
func handleNoTx[E any](action string, f func(ctx context.Context, event E, m envelope.Received) error) *handling.Handler {
	return &handling.Handler{Action: action, GoType: reflect.TypeFor[E](), Kind: handling.NoTx, One: func(ctx context.Context, _ pgx.Tx, a *handling.Arrival) error {
		return f(ctx, a.Event.(E), a.Meta)
	}}
}

// oncePer returns a copy of a handler whose action is done once for each key.
func oncePer[E any](h *handling.Handler, key func(event E, m envelope.Received) (aggregateType, aggregateID string)) *handling.Handler {
	one := *h
	one.KeyType = reflect.TypeFor[E]()
	one.Key = func(event any, about *envelope.Received) (string, string) { return key(event.(E), *about) }
	return &one
}

// The defaults of a consumer, as the package outbox documents them.
const (
	defaultRetries         = 3
	defaultRetryWait       = time.Second
	defaultMaxRetryWait    = time.Minute
	defaultSlowHandler     = 30 * time.Second
	defaultMaxPoll         = 100
	defaultMaxPollInterval = 5 * time.Minute
	defaultStopTimeout     = 5 * time.Second
	defaultMaxQueueBytes   = 64 << 20
)

// withDefaults returns rules in which nothing is zero that has a default.
func withDefaults(cfg Rules) Rules {
	cfg.MaxPoll = cmp.Or(cfg.MaxPoll, defaultMaxPoll)
	cfg.MaxQueueBytes = cmp.Or(cfg.MaxQueueBytes, defaultMaxQueueBytes)
	cfg.HeartbeatInterval = cmp.Or(cfg.HeartbeatInterval, defaultHeartbeat)
	cfg.SessionTimeout = cmp.Or(cfg.SessionTimeout, defaultSession)
	cfg.MaxPollInterval = cmp.Or(cfg.MaxPollInterval, defaultMaxPollInterval)
	if cfg.DeadLetterTopic == nil {
		cfg.DeadLetterTopic = deadletter.Topic
	}
	if cfg.Decode == nil {
		cfg.Decode = DecodeCloudEvent
	}
	var rules handling.Rules
	if cfg.Rules != nil {
		rules = *cfg.Rules
	}
	rules.Group = cmp.Or(rules.Group, "g")
	rules.Retry = rules.Retry.Over(handling.RetryPolicy{MaxRetries: defaultRetries, RetryWait: defaultRetryWait, MaxRetryWait: defaultMaxRetryWait})
	rules.HandlerTimeout = cmp.Or(rules.HandlerTimeout, cfg.MaxPollInterval/2)
	rules.SlowHandler = cmp.Or(rules.SlowHandler, defaultSlowHandler)
	rules.StopTimeout = cmp.Or(rules.StopTimeout, defaultStopTimeout)
	rules.JSON = jsonCodec
	rules.Log = short.Logger(cmp.Or(rules.Log, slog.New(slog.DiscardHandler)))
	cfg.Rules = &rules
	return cfg
}

var jsonCodec = handling.Codec{ContentType: "application/json", Decode: func(_ context.Context, data []byte, event any) error {
	return json.Unmarshal(data, event)
}}

// newPartitionFixture returns a fixture with a worker for these handlers.
func newPartitionFixture(t *testing.T, cfg Rules, handlers ...*handling.Handler) *partitionFixture {
	t.Helper()
	s := &partitionFixture{t: t, noted: map[handling.NoteKey]bool{}, handlers: map[string]string{}}
	if len(handlers) == 0 {
		handlers = []*handling.Handler{handle("ACTED", func(ctx context.Context, _ pgx.Tx, e played, m envelope.Received) error { return s.handle(ctx, e, m) })}
	}
	routes, err := handling.NewRoutes(handling.Sources{
		Kinds:    []handling.EventType{{Name: playedType, Topic: "play-events", GoType: reflect.TypeFor[played](), Codec: jsonCodec}},
		Handlers: handlers,
	})
	require.NoError(t, err)
	cfg = withDefaults(cfg)
	p := handling.NewProcessor(*cfg.Rules, routes, s)
	cfg.Rules = p.Rules
	limits := limits{budget: handling.NewBudget(cfg.MaxQueueBytes), pauses: pauses.NewSet()}
	s.worker = newPartitionWorker(kafka.Partition{Topic: "play-events", Number: 3}, &reader{processor: p, decode: cfg.Decode}, s, &cfg, limits, outage.NewLogs(cfg.Log))
	return s
}

// arrive returns the records of events, from offset 0 on.
func (s *partitionFixture) arrive(names ...string) (records []*kgo.Record) {
	s.t.Helper()
	for i, name := range names {
		payload, err := json.Marshal(played{name})
		require.NoError(s.t, err)
		e := envelope.Event{
			EventID: []byte(uuid.NewString()), EventType: []byte(playedType), Source: []byte("shop"), AggregateType: []byte("Play"), AggregateID: []byte(name),
			Payload: payload, IsJSON: true, ContentType: []byte(jsonCodec.ContentType), OccurredAt: envelope.AppendTime(nil, played{}.OccurredAt()),
		}
		topic, err := e.Destination()
		require.NoError(s.t, err)
		r := &kgo.Record{Topic: topic, Key: e.Key(), Offset: int64(i)}
		r.Value, err = e.Record(envelope.RecordForm{}, func(name string, value []byte) {
			r.Headers = append(r.Headers, kgo.RecordHeader{Key: name, Value: value})
		})
		require.NoError(s.t, err)
		records = append(records, r)
	}
	return records
}

// headerOf returns the value of a header of a record, "" without one.
func headerOf(r *kgo.Record, name string) string {
	for _, h := range r.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}
