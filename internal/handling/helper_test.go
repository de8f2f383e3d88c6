package handling

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
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/guardtx"
)

const (
	playedType  = "test.play.acted.v1"
	playedTopic = "play-events"
)

// played is an event whose handler does what the play of its name says.
type played struct{ Name string }

var errPlayed = errors.New("played")

// fixture is a processor whose PostgreSQL and whose handler are played. It notes what happens.
//
// A play is a text with a sign for each call in turn. After the last sign every call goes well.
type fixture struct {
	t         *testing.T
	processor *Processor
	activity  *Activity
	attempts  *Attempts
	scheduler *playedScheduler

	handlers map[string]string // by event, see fixture.handle
	postgres string            // by transaction, see fixture.InTx

	witnessed bool            // other processes have successes
	asked     []time.Duration // for a success in other processes

	sets    bool             // the handler that is called changes settings
	unused  bool             // handlers do not use their transactions
	noted   map[NoteKey]bool // committed
	current []string         // calls of handlers in the transaction under way
	log     []string
}

// nextSign takes the next sign of a play.
func nextSign(play *string) byte {
	if *play == "" {
		return '+'
	}
	sign := (*play)[0]
	*play = (*play)[1:]
	return sign
}

// actionOf returns a handler with a transaction, as Handle of the package outbox does.
func actionOf(action string, f func(ctx context.Context, e played, m *envelope.Received) error) *Handler {
	return &Handler{
		Action: action, GoType: reflect.TypeFor[played](), Kind: InTx,
		One: func(ctx context.Context, _ pgx.Tx, a *Arrival) error { return f(ctx, a.Event.(played), &a.Meta) },
	}
}

// noTxOf returns a handler without a transaction, as HandleNoTx of the package outbox does.
func noTxOf(action string, f func(ctx context.Context, e played, m *envelope.Received) error) *Handler {
	h := actionOf(action, f)
	h.Kind = NoTx
	return h
}

// batchOf returns a handler of batches, as HandleBatch of the package outbox does.
func batchOf(action string, f func(ctx context.Context, arrivals []Arrival) error) *Handler {
	return &Handler{
		Action: action, GoType: reflect.TypeFor[played](), Kind: InBatch,
		Many: func(ctx context.Context, _ pgx.Tx, arrivals []Arrival) error { return f(ctx, arrivals) },
	}
}

var jsonCodec = Codec{ContentType: "application/json", Decode: func(_ context.Context, data []byte, event any) error { return json.Unmarshal(data, event) }}

// testRules returns rules with the defaults of the package outbox for all that is not set.
func testRules(rules Rules) Rules {
	rules.Group, rules.JSON = "g", jsonCodec
	rules.Retry = rules.Retry.Over(RetryPolicy{MaxRetries: 3, RetryWait: time.Second, MaxRetryWait: time.Minute, MaxOutage: 24 * time.Hour})
	rules.HandlerTimeout = cmp.Or(rules.HandlerTimeout, 30*time.Second)
	rules.Breaker.Events = cmp.Or(rules.Breaker.Events, 10)
	rules.Breaker.FirstOpenFor = cmp.Or(rules.Breaker.FirstOpenFor, time.Second)
	rules.Breaker.OpenFor = cmp.Or(rules.Breaker.OpenFor, 30*time.Second)
	rules.Breaker.Trials = cmp.Or(rules.Breaker.Trials, 10)
	rules.Log = cmp.Or(rules.Log, slog.New(slog.DiscardHandler))
	return rules
}

// newFixture returns a fixture for some handlers, or for one that does what its event's play says.
func newFixture(t *testing.T, rules Rules, handlers ...*Handler) *fixture {
	t.Helper()
	f := &fixture{t: t, activity: new(Activity), handlers: map[string]string{}, noted: map[NoteKey]bool{}}
	if len(handlers) == 0 {
		handlers = []*Handler{actionOf("ACTED", f.handle)}
	}
	rules = testRules(rules)
	routes, err := NewRoutes(Sources{
		Kinds:    []EventType{{Name: playedType, Topic: playedTopic, GoType: reflect.TypeFor[played](), Codec: jsonCodec}},
		Handlers: handlers,
	})
	require.NoError(t, err)
	f.processor = NewProcessor(rules, routes, f).ForOne(f.activity)
	f.scheduler = &playedScheduler{f: f}
	f.scheduler.held, f.scheduler.lose = context.WithCancel(t.Context())
	t.Cleanup(f.scheduler.lose)
	f.witnessed = true
	f.attempts = &Attempts{Processor: f.processor, Breakers: NewActionBreakers(f.processor.Rules, routes, 4), Scheduler: f.scheduler}
	f.attempts.Witness = func(_ context.Context, _ string, ago time.Duration) (bool, error) {
		f.asked = append(f.asked, ago)
		return f.witnessed, nil
	}
	return f
}

// arrive returns events that Kafka has brought, from offset 0 on, with their tasks.
func (f *fixture) arrive(names ...string) (items []*Item) {
	f.t.Helper()
	for i, name := range names {
		from := &envelope.Origin{Key: []byte(name), Record: envelope.Place{Topic: playedTopic, Offset: int64(i), Key: []byte(name)}}
		it := &Item{Meta: envelope.Received{Attempt: 1, Kafka: &from.Record, Origin: from}}
		f.processor.Resolve(f.t.Context(), it, messageOf(f.t, name), "")
		items = append(items, it)
	}
	return items
}

func messageOf(t *testing.T, name string) *envelope.Message {
	t.Helper()
	data, err := json.Marshal(played{name})
	require.NoError(t, err)
	return &envelope.Message{ID: "id of " + name, Source: "shop", Type: playedType, Subject: name, ContentType: "application/json", Data: data}
}

// inTx returns the tasks with a transaction of some events.
func inTx(items []*Item) (tasks []Task) {
	for _, it := range items {
		tasks = it.AppendInTx(tasks)
	}
	return tasks
}

// handle is the played handler. Its signs: + goes well, - fails, p fails for good, r fails and says when to try
// again, u fails because something is away that the event needs, U as well and says when to try again, ! panics,
// h has ended its transaction, x ends its goroutine, 4 is a conflict, P is a conflict that no retry changes, f finds
// another server full, t outlives its deadline, = changes settings, s fails when the work is to end.
func (f *fixture) handle(ctx context.Context, e played, m *envelope.Received) error {
	f.current = append(f.current, fmt.Sprint(e.Name, m.Attempt))
	play := f.handlers[e.Name]
	sign := nextSign(&play)
	f.handlers[e.Name] = play
	switch sign {
	case '-':
		return errPlayed
	case 'p':
		return Permanent(errPlayed)
	case 'r':
		return RetryAfter(errPlayed, 7*time.Second)
	case 'u':
		return Unavailable(errPlayed)
	case 'U':
		return RetryAfter(Unavailable(errPlayed), 7*time.Second)
	case '!':
		panic("played")
	case 'h':
		return guardtx.ErrEnded
	case 'x':
		runtime.Goexit()
	case '4':
		return &pgconn.PgError{Code: "40001"}
	case 'P':
		return Permanent(&pgconn.PgError{Code: "40001"})
	case 'f':
		return &pgconn.PgError{Code: "53400"}
	case 't':
		<-ctx.Done()
		return ctx.Err()
	case '=':
		f.sets = true
	case 's':
		f.scheduler.lose()
		return ctx.Err()
	}
	return nil
}

// InTx implements [Transactor]. Its signs: + goes well, d is a deadlock when it commits, o an outage, n cannot note
// anything, c is a connection that is lost while others can be had.
func (f *fixture) InTx(_ context.Context, _ *Activity, keys []NoteKey, _ bool, _ func(*pgx.Batch), do func(Tx, map[NoteKey]bool) error) error {
	sign := nextSign(&f.postgres)
	switch sign {
	case 'o':
		f.log = append(f.log, "no connection")
		return &NoteError{errPlayed}
	case 'n':
		f.log = append(f.log, "no notes")
		return &NoteError{&pgconn.PgError{Code: "57014"}}
	}
	before, result := maps.Clone(f.noted), "rolled back"
	fresh := map[NoteKey]bool{}
	for _, k := range keys {
		if !f.noted[k] {
			fresh[k], f.noted[k] = true, true
		}
	}
	f.current = nil
	defer func() { // also if a handler ends its goroutine
		for k := range fresh {
			delete(f.noted, k)
		}
		if result == "rolled back" {
			f.noted = before
		}
		f.log = append(f.log, strings.Join(f.current, " ")+": "+result)
		f.current = nil
	}()
	err := do(&playedTx{fixture: f}, fresh)
	switch {
	case err != nil && sign == 'c':
		err = &ConnectionError{err}
	case err != nil:
	case sign == 'd':
		err = fmt.Errorf("commit: %w", &pgconn.PgError{Code: "40P01"})
	case sign == 'c':
		err = &ConnectionError{errPlayed}
	default:
		result = "committed"
	}
	return err
}

// Now implements [Transactor].
func (f *fixture) Now(context.Context) (time.Time, error) { return time.Now(), nil }

// Ping implements [Transactor].
func (f *fixture) Ping(context.Context) error {
	if strings.HasPrefix(f.postgres, "o") {
		return errPlayed
	}
	return nil
}

// playedTx is a transaction of a fixture.
type playedTx struct {
	fixture *fixture
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

// playedScheduler is the scheduler of a fixture's attempts.
type playedScheduler struct {
	f       *fixture
	held    context.Context
	lose    context.CancelFunc // ends held
	ends    bool               // no handler may be called any more
	trial   *Trial             // in which tasks are tried
	putBack bool               // in an outage of PostgreSQL, tasks are put back
	lost    error              // the error that interrupts
	inside  int                // calls that have been entered and not left
	slept   time.Duration
	outages int
}

func (s *playedScheduler) Held() context.Context { return s.held }

func (s *playedScheduler) Enter(*Task) error {
	if s.ends {
		return ErrStopped
	}
	s.inside++
	return nil
}

func (s *playedScheduler) Exit(*Task, time.Time, error) { s.inside-- }

func (s *playedScheduler) Trial(string) *Trial { return s.trial }

func (s *playedScheduler) Interrupts(err error) bool { return s.lost != nil && errors.Is(err, s.lost) }

func (s *playedScheduler) Sleep(d time.Duration) {
	s.slept += d
	time.Sleep(d)
}

func (s *playedScheduler) AwaitPostgres(time.Time, error) (putBack bool) {
	s.outages++
	time.Sleep(time.Second)
	return s.putBack
}
