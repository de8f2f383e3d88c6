package itest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/testenv"
)

// inboxFixture is a migrated schema with a table of effects, and an inbox.
type inboxFixture struct {
	db     *pgxpool.Pool
	schema string
	*outbox.Inbox
}

func newInboxFixture(t *testing.T) *inboxFixture {
	t.Helper()
	db, schema := testenv.Migrated(t)
	f := &inboxFixture{db: db, schema: schema, Inbox: newInbox(t, schema, "shop")}
	f.exec(t, `CREATE TABLE {schema}.effects (id text NOT NULL, answer text NOT NULL)`)
	return f
}

func newInbox(t *testing.T, schema, name string) *outbox.Inbox {
	t.Helper()
	inbox, err := outbox.NewInbox(schema, name)
	require.NoError(t, err)
	return inbox
}

func (f *inboxFixture) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := f.db.Exec(background, pg.InSchema(sql, f.schema), args...)
	require.NoError(t, err)
}

// effect is what a function of Once does: it notes the id together with its answer, which no other effect has.
func (f *inboxFixture) effect(ctx context.Context, tx pgx.Tx, id string) func() ([]byte, error) {
	return func() ([]byte, error) {
		answer := "answer " + uuid.NewString()
		_, err := tx.Exec(ctx, pg.InSchema(`INSERT INTO {schema}.effects VALUES ($1, $2)`, f.schema), id, answer)
		return []byte(answer), err
	}
}

// effects returns the answers of the effects that an id has had.
func (f *inboxFixture) effects(t *testing.T, id string) (answers []string) {
	t.Helper()
	rows, err := f.db.Query(background, pg.InSchema(`SELECT answer FROM {schema}.effects WHERE id = $1`, f.schema), id)
	require.NoError(t, err)
	answers, err = pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return answers
}

// handle handles a message in a transaction of its own.
func (f *inboxFixture) handle(ctx context.Context, m outbox.InboxMessage) (answer string, err error) {
	err = pgx.BeginFunc(ctx, f.db, func(tx pgx.Tx) error {
		got, err := f.Once(ctx, tx, m, f.effect(ctx, tx, m.ID))
		answer = string(got)
		return err
	})
	return answer, err
}

func stripe(id string) outbox.InboxMessage {
	return outbox.InboxMessage{Source: "stripe", ID: id, Action: "PAYMENT_RECORDED"}
}

// A message is handled once, and a repeat gets the first answer. Another source, id, action or inbox is another
// message.
func TestInboxHandlesOnce(t *testing.T) {
	t.Parallel()
	for name, mode := range queryModes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newInboxFixture(t)
			f.db = testenv.PoolIn(t, mode)
			first, err := f.handle(background, stripe("evt_1"))
			require.NoError(t, err)
			again, err := f.handle(background, stripe("evt_1"))
			require.NoError(t, err)
			require.Equal(t, first, again)
			require.Equal(t, []string{first}, f.effects(t, "evt_1"))

			longest := strings.Repeat("ü", 255)
			other := newInbox(t, f.schema, strings.Repeat("n", 249))
			for _, m := range []outbox.InboxMessage{
				{Source: "stripe", ID: "evt_1", Action: "MAIL_SENT"}, {Source: "paypal", ID: "evt_1", Action: "PAYMENT_RECORDED"}, stripe("evt_2"),
				{Source: longest[:200], ID: longest, Action: longest[:200]},
			} {
				got, err := f.handle(background, m)
				require.NoError(t, err)
				require.NotEqual(t, first, got)
				again, err := f.handle(background, m)
				require.NoError(t, err)
				require.Equal(t, got, again)
			}
			f.Inbox = other
			got, err := f.handle(background, stripe("evt_1"))
			require.NoError(t, err)
			require.NotEqual(t, first, got)
		})
	}
}

// queryModes are the ways in which pgx sends statements.
var queryModes = map[string]pgx.QueryExecMode{
	"cached statements": pgx.QueryExecModeCacheStatement, "cached descriptions": pgx.QueryExecModeCacheDescribe,
	"described": pgx.QueryExecModeDescribeExec, "exec": pgx.QueryExecModeExec, "simple protocol": pgx.QueryExecModeSimpleProtocol,
}

// Answers of all sizes come back as they were, with and without a request.
func TestInboxKeepsAnswers(t *testing.T) {
	t.Parallel()
	f := newInboxFixture(t)
	random := make([]byte, outbox.MaxAnswer+1)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	for _, request := range [][]byte{nil, {}, []byte(`{"cents": 450}`)} {
		for _, size := range []int{0, 1, 31, 32, 33, 5000, outbox.MaxAnswer} {
			m := stripe(uuid.NewString())
			m.Request = request
			calls := 0
			for range 2 {
				require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
					got, err := f.Once(background, tx, m, func() ([]byte, error) { calls++; return random[:size], nil })
					require.Equal(t, string(random[:size]), string(got), "%d bytes, request %q", size, request)
					return err
				}))
			}
			require.Equal(t, 1, calls)
		}
	}
	m := stripe("too large")
	require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		_, err := f.Once(background, tx, m, func() ([]byte, error) {
			_, err := f.effect(background, tx, m.ID)()
			return random, err
		})
		require.ErrorIs(t, err, outbox.ErrTooLarge)
		require.EqualError(t, err, "outbox: answer is too large: 65537 bytes, at most 65536")
		return nil
	}))
	require.Empty(t, f.effects(t, m.ID))
}

// The same key with another request is an error. Where one of the two has no request, nothing is compared.
func TestInboxComparesRequests(t *testing.T) {
	t.Parallel()
	f := newInboxFixture(t)
	for _, tt := range []struct {
		first, second []byte
		differs       bool
	}{
		{[]byte("a"), []byte("a"), false},
		{[]byte("a"), []byte("b"), true},
		{[]byte("a"), []byte{}, true},
		{[]byte{}, []byte("a"), true},
		{nil, []byte("a"), false},
		{[]byte("a"), nil, false},
	} {
		for _, answer := range []string{"", "an answer"} {
			m := stripe(uuid.NewString())
			once := func(request []byte) (answered string, err error) {
				m.Request = request
				require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
					var got []byte
					got, err = f.Once(background, tx, m, func() ([]byte, error) { return []byte(answer), nil })
					answered = string(got)
					_, usable := tx.Exec(background, `SELECT 1`)
					return usable
				}))
				return answered, err
			}
			_, err := once(tt.first)
			require.NoError(t, err)
			got, err := once(tt.second)
			if tt.differs {
				require.ErrorIs(t, err, outbox.ErrOtherRequest)
				require.Empty(t, got)
			} else {
				require.NoError(t, err)
				require.Equal(t, answer, got)
			}
		}
	}
}

var errRefused = errors.New("refused")

// However f fails, neither its effect nor the note stays, even if the caller commits.
func TestInboxTakesBack(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		f        func(tx pgx.Tx) ([]byte, error)
		err      string
		unusable bool // what the caller does next in tx fails
	}{
		"an error": {f: func(pgx.Tx) ([]byte, error) { return nil, errRefused }, err: "refused"},
		"a panic":  {f: func(pgx.Tx) ([]byte, error) { panic("refused") }, err: "panic: refused"},
		"a failed statement": {f: func(tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(background, `SELECT 1/0`)
			return nil, err
		}, err: "22012"},
		"a failed statement is hidden": {f: func(tx pgx.Tx) ([]byte, error) {
			_, _ = tx.Exec(background, `SELECT 1/0`)
			return nil, nil
		}, err: "25P02"},
		"a failed statement is hidden behind an answer": {f: func(tx pgx.Tx) ([]byte, error) {
			_, _ = tx.Exec(background, `SELECT 1/0`)
			return []byte("done"), nil
		}, err: "25P02"},
		"rows stay open": {f: func(tx pgx.Tx) ([]byte, error) {
			_, err := tx.Query(background, `SELECT generate_series(1, 100000)`)
			return nil, err
		}, err: "busy", unusable: true},
		"rolled back by a statement": {f: func(tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(background, `ROLLBACK`)
			return nil, err
		}, err: "25P01", unusable: true},
		"rolled back": {f: func(tx pgx.Tx) ([]byte, error) { return nil, tx.Rollback(background) }, err: "tx is closed", unusable: true},
		"the note is removed": {f: func(tx pgx.Tx) ([]byte, error) {
			_, err := tx.Exec(background, `ROLLBACK TO SAVEPOINT outbox_inbox`)
			return []byte("done"), err
		}, err: "no rows", unusable: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newInboxFixture(t)
			m := stripe("evt_1")
			tx, err := f.db.Begin(background)
			require.NoError(t, err)
			defer tx.Rollback(background) //nolint:errcheck // after a commit
			_, err = f.effect(background, tx, "before")()
			require.NoError(t, err)
			err = recovered(func() error {
				_, err := f.Once(background, tx, m, func() ([]byte, error) {
					if _, err := f.effect(background, tx, m.ID)(); err != nil {
						return nil, err
					}
					return tt.f(tx)
				})
				return err
			})
			require.ErrorContains(t, err, tt.err)
			_, err = f.effect(background, tx, "after")()
			if committed := tx.Commit(background); tt.unusable {
				require.Error(t, errors.Join(err, committed))
			} else {
				require.NoError(t, errors.Join(err, committed))
				require.Len(t, f.effects(t, "before"), 1)
				require.Len(t, f.effects(t, "after"), 1)
			}
			require.Empty(t, f.effects(t, m.ID))
			answer, err := f.handle(background, m)
			require.NoError(t, err)
			require.Equal(t, []string{answer}, f.effects(t, m.ID))
		})
	}
}

// recovered calls f and returns its error, or its panic as one.
func recovered(f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return f()
}

// A context that ends while f runs takes nothing from what was promised: a caller that commits with another context
// commits nothing of f.
func TestInboxContextEnds(t *testing.T) {
	t.Parallel()
	f := newInboxFixture(t)
	m := stripe("evt_1")
	tx, err := f.db.Begin(background)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(background)
	_, err = f.Once(ctx, tx, m, func() ([]byte, error) {
		_, err := f.effect(background, tx, m.ID)()
		cancel()
		return []byte("done"), err
	})
	require.ErrorIs(t, err, context.Canceled)
	require.NoError(t, tx.Commit(background))
	require.Empty(t, f.effects(t, m.ID))
	_, err = f.handle(background, m)
	require.NoError(t, err)
}

// Several messages in one transaction, one of which fails, and a message within another one.
func TestInboxSeveralMessages(t *testing.T) {
	t.Parallel()
	f := newInboxFixture(t)
	require.NoError(t, pgx.BeginFunc(background, f.db, func(tx pgx.Tx) error {
		for n := range 10 {
			m := stripe(fmt.Sprint(n))
			_, err := f.Once(background, tx, m, func() ([]byte, error) {
				answer, err := f.effect(background, tx, m.ID)()
				if err == nil && n%3 == 0 {
					err = errRefused
				}
				return answer, err
			})
			if n%3 == 0 {
				require.ErrorIs(t, err, errRefused)
			} else {
				require.NoError(t, err)
			}
		}
		_, err := f.Once(background, tx, stripe("outer"), func() ([]byte, error) {
			_, err := f.Once(background, tx, stripe("refused"), func() ([]byte, error) {
				_, err := f.effect(background, tx, "refused")()
				return nil, errors.Join(err, errRefused)
			})
			require.ErrorIs(t, err, errRefused)
			answer, err := f.Once(background, tx, stripe("inner"), f.effect(background, tx, "inner"))
			require.NoError(t, err)
			return answer, nil
		})
		return err
	}))
	for n := range 10 {
		require.Len(t, f.effects(t, fmt.Sprint(n)), min(1, n%3))
	}
	require.Len(t, f.effects(t, "inner"), 1)
	require.Empty(t, f.effects(t, "refused"))
}

// waiting handles a message in a transaction that waits for another one, and returns when it waits.
func (f *inboxFixture) waiting(t *testing.T, options pgx.TxOptions, m outbox.InboxMessage) (ended <-chan error, answer *string) {
	t.Helper()
	done, pid, answer := make(chan error, 1), make(chan int, 1), new(string)
	go func() {
		done <- pgx.BeginTxFunc(background, f.db, options, func(tx pgx.Tx) error {
			var own int
			if err := tx.QueryRow(background, `SELECT pg_backend_pid()`).Scan(&own); err != nil {
				return err
			}
			pid <- own
			got, err := f.Once(background, tx, m, f.effect(background, tx, m.ID))
			*answer = string(got)
			return err
		})
	}()
	own := <-pid
	require.Eventually(t, func() bool {
		var waits bool
		err := f.db.QueryRow(background, `SELECT pg_blocking_pids($1) <> '{}'`, own).Scan(&waits)
		return err == nil && waits
	}, testenv.Patience, 5*time.Millisecond)
	return done, answer
}

// A repeat that comes while the first call is under way waits: it gets the answer if that one commits, and runs f if
// that one is rolled back or its session is killed. At the higher levels PostgreSQL has it repeat its transaction.
func TestInboxWaits(t *testing.T) {
	t.Parallel()
	ends := map[string]func(t *testing.T, f *inboxFixture, tx pgx.Tx) (committed bool){
		"committed": func(t *testing.T, _ *inboxFixture, tx pgx.Tx) bool {
			require.NoError(t, tx.Commit(background))
			return true
		},
		"rolled back": func(t *testing.T, _ *inboxFixture, tx pgx.Tx) bool {
			require.NoError(t, tx.Rollback(background))
			return false
		},
		"killed": func(t *testing.T, f *inboxFixture, tx pgx.Tx) bool {
			var pid int
			require.NoError(t, tx.QueryRow(background, `SELECT pg_backend_pid()`).Scan(&pid))
			f.exec(t, `SELECT pg_terminate_backend($1, 10000)`, pid) // it has ended then
			require.Error(t, tx.Commit(background))
			return false
		},
	}
	for name, end := range ends {
		for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
			t.Run(fmt.Sprint(name, ", ", level), func(t *testing.T) {
				t.Parallel()
				f := newInboxFixture(t)
				m := stripe("evt_1")
				tx, err := f.db.BeginTx(background, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				defer tx.Rollback(background) //nolint:errcheck // it has ended
				first, err := f.Once(background, tx, m, f.effect(background, tx, m.ID))
				require.NoError(t, err)
				ended, answer := f.waiting(t, pgx.TxOptions{IsoLevel: level}, m)
				committed := end(t, f, tx)
				err = <-ended
				if committed && level != pgx.ReadCommitted {
					require.Equal(t, "40001", pg.Code(err), err)
					*answer, err = f.handle(background, m)
				}
				require.NoError(t, err)
				require.Equal(t, committed, *answer == string(first))
				require.Equal(t, []string{*answer}, f.effects(t, m.ID))
			})
		}
	}
}

// A call that shall not wait sets lock_timeout. The error says that another transaction handles the message, and the
// transaction goes on. A table that is locked is something else.
func TestInboxInProgress(t *testing.T) {
	t.Parallel()
	f := newInboxFixture(t)
	m := stripe("evt_1")
	first, err := f.db.Begin(background)
	require.NoError(t, err)
	defer first.Rollback(background) //nolint:errcheck // the test has failed
	_, err = f.Once(background, first, m, f.effect(background, first, m.ID))
	require.NoError(t, err)
	try := func() error {
		tx, err := f.db.Begin(background)
		require.NoError(t, err)
		defer tx.Rollback(background) //nolint:errcheck // after a commit
		_, err = tx.Exec(background, `SET LOCAL lock_timeout = '20ms'`)
		require.NoError(t, err)
		_, err = f.Once(background, tx, m, f.effect(background, tx, m.ID))
		if errors.Is(err, outbox.ErrInProgress) {
			_, another := f.effect(background, tx, "another")()
			require.NoError(t, errors.Join(another, tx.Commit(background)))
		}
		return err
	}
	err = try()
	require.ErrorIs(t, err, outbox.ErrInProgress)
	require.Equal(t, "55P03", pg.Code(err))
	require.Len(t, f.effects(t, "another"), 1)
	require.NoError(t, first.Rollback(background))

	locker, err := f.db.Begin(background)
	require.NoError(t, err)
	defer locker.Rollback(background) //nolint:errcheck // nothing is to be kept
	_, err = locker.Exec(background, pg.InSchema(`LOCK TABLE {schema}.event_handled`, f.schema))
	require.NoError(t, err)
	err = try()
	require.NotErrorIs(t, err, outbox.ErrInProgress)
	require.Equal(t, "55P03", pg.Code(err), "%v", err)
}

// Arguments that cannot work are named, and nothing is sent.
func TestInboxArguments(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ schema, name, want string }{
		{"", "", "outbox: inbox: name is empty"},
		{"s", strings.Repeat("n", 250), "outbox: inbox: name is too long: 250 characters, at most 249"},
		{strings.Repeat("s", 64), "n\x00", "NUL"},
		{strings.Repeat("s", 64), "n", "Schema"},
	} {
		_, err := outbox.NewInbox(tt.schema, tt.name)
		require.ErrorContains(t, err, tt.want)
	}
	f := newInboxFixture(t)
	tx, err := f.db.Begin(background)
	require.NoError(t, err)
	defer tx.Rollback(background) //nolint:errcheck // nothing is to be kept
	done := func() ([]byte, error) { return nil, nil }
	long := strings.Repeat("x", 256)
	for _, tt := range []struct {
		field string
		err   error
		tx    pgx.Tx
		m     outbox.InboxMessage
		f     func() ([]byte, error)
	}{
		{"tx", outbox.ErrNilArgument, nil, stripe("1"), done},
		{"tx", outbox.ErrNilArgument, (*pgxpool.Tx)(nil), stripe("1"), done},
		{"function", outbox.ErrNilArgument, tx, stripe("1"), nil},
		{"source", outbox.ErrEmpty, tx, outbox.InboxMessage{ID: "1", Action: "A"}, done},
		{"source", outbox.ErrTooLong, tx, outbox.InboxMessage{Source: long[:101], ID: "1", Action: "A"}, done},
		{"id", outbox.ErrEmpty, tx, stripe(""), done},
		{"id", outbox.ErrTooLong, tx, stripe(long), done},
		{"id", outbox.ErrUTF8, tx, stripe("\xff"), done},
		{"id", outbox.ErrNUL, tx, stripe("\x00"), done},
		{"action", outbox.ErrEmpty, tx, outbox.InboxMessage{Source: "s", ID: "1"}, done},
		{"action", outbox.ErrTooLong, tx, outbox.InboxMessage{Source: "s", ID: "1", Action: long[:101]}, done},
	} {
		_, err := f.Once(background, tt.tx, tt.m, tt.f)
		field, is := errors.AsType[*outbox.FieldError](err)
		require.True(t, is, "%s: %v", tt.field, err)
		require.Equal(t, tt.field, field.Field)
		require.ErrorIs(t, err, tt.err)
	}
	_, err = f.Once(background, tx, stripe("1"), done)
	require.NoError(t, err, "the transaction is as before")

	nowhere, err := f.db.Begin(background)
	require.NoError(t, err)
	defer nowhere.Rollback(background) //nolint:errcheck // nothing is to be kept
	_, err = newInbox(t, "not migrated", "n").Once(background, nowhere, stripe("1"), done)
	require.ErrorIs(t, err, outbox.ErrNotMigrated)
}

// An event and a message are never repeats of one another, whatever a handler takes for its key, and no consumer
// group has the name of an inbox.
func TestInboxBesideConsumers(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	f := &inboxFixture{db: s.db, schema: s.schema, Inbox: newInbox(t, s.schema, "shop")}
	f.exec(t, `CREATE TABLE {schema}.effects (id text NOT NULL, answer text NOT NULL)`)
	m := outbox.InboxMessage{Source: "Product", ID: "p", Action: "LISTED", Request: []byte("a request")}
	first, err := f.handle(background, m)
	require.NoError(t, err)
	listed := outbox.OncePer(outbox.Handle("LISTED", s.count), func(e sale, _ outbox.Metadata) (string, string) { return "Product", e.Product })
	testenv.Run(t, s.groupConsumer(t, "shop", outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, listed).Run)
	s.send(t, s.saleRecord("1", oneSale))
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 1 }, testenv.Patience, 10*time.Millisecond)
	again, err := f.handle(background, m)
	require.NoError(t, err)
	require.Equal(t, first, again)
	require.Equal(t, 2, s.relayFixture.count(t, "event_handled"))

	_, err = outbox.NewConsumer(s.db, testenv.KafkaOpts(s.brokers), s.events, "inbox:shop", outbox.ConsumerConfig{}, listed)
	require.ErrorIs(t, err, outbox.ErrMalformed)
	require.ErrorContains(t, err, "group is malformed: inbox: begins the names of inboxes")
	_, err = outbox.NewWorker(s.db, s.events, "inbox:shop", outbox.WorkerConfig{}, listed)
	require.ErrorIs(t, err, outbox.ErrMalformed)
}

// A handler of events may handle messages in its transaction. What fails there leaves the rest of it.
func TestInboxWithinAHandler(t *testing.T) {
	t.Parallel()
	s := newConsumerFixture(t, 1)
	f := &inboxFixture{db: s.db, schema: s.schema, Inbox: newInbox(t, s.schema, "shop")}
	f.exec(t, `CREATE TABLE {schema}.effects (id text NOT NULL, answer text NOT NULL)`)
	testenv.Run(t, s.consumer(t, outbox.ConsumerConfig{HandlerConfig: outbox.HandlerConfig{From: outbox.FromStart}}, outbox.Handle("PAID", func(ctx context.Context, tx pgx.Tx, e sale, m outbox.Metadata) error {
		_, err := f.Once(ctx, tx, stripe("refused"), func() ([]byte, error) {
			_, err := f.effect(ctx, tx, "refused")()
			return nil, errors.Join(err, errRefused)
		})
		if !errors.Is(err, errRefused) {
			return fmt.Errorf("not refused: %w", err)
		}
		if _, err := f.Once(ctx, tx, stripe("paid"), f.effect(ctx, tx, "paid")); err != nil {
			return err
		}
		return s.count(ctx, tx, e, m)
	})).Run)
	for n := range 5 {
		s.send(t, s.saleRecord(fmt.Sprint(n), oneSale))
	}
	require.Eventually(t, func() bool { return s.counts(t)["p"] == 5 }, testenv.Patience, 10*time.Millisecond)
	require.Len(t, f.effects(t, "paid"), 1)
	require.Empty(t, f.effects(t, "refused"))
}

// A service handles messages under its role of docs/roles.md, for the inboxes that are its own, also beside what others
// have planted in its search_path.
func TestInboxRoles(t *testing.T) {
	t.Parallel()
	for _, part := range []string{"inbox", "consumer", "worker"} {
		t.Run(part, func(t *testing.T) {
			t.Parallel()
			f := newInboxFixture(t)
			r := newHostileRoles(t, &relayFixture{db: f.db, schema: f.schema})
			f.exec(t, `GRANT INSERT ON {schema}.effects TO outbox_`+part+r.suffix)
			r.giveGroup(t, part, "inbox:shop")
			own := *f
			own.db = r.as(t, part)
			first, err := own.handle(background, stripe("evt_1"))
			require.NoError(t, err)
			again, err := own.handle(background, stripe("evt_1"))
			require.NoError(t, err)
			require.Equal(t, first, again)
			require.Equal(t, []string{first}, f.effects(t, "evt_1"))
			for _, kept := range []string{"", "short"} { // it has no digest, so no call could read it
				_, err = own.db.Exec(background, pg.InSchema(`UPDATE {schema}.event_handled SET answer = $1::text::bytea`, f.schema), kept)
				require.Equal(t, "23514", pg.Code(err), err)
			}
			own.Inbox = newInbox(t, f.schema, "theirs")
			_, err = own.handle(background, stripe("evt_2"))
			require.Equal(t, "42501", pg.Code(err), err)
		})
	}
}

// A row of an event is as large as one of a table without the column for answers.
func TestNotesOfEventsStaySmall(t *testing.T) {
	t.Parallel()
	f := newInboxFixture(t)
	const columns = "id, consumer_group, aggregate_type, aggregate_id, action, handled_at, event_source"
	f.exec(t, `CREATE TABLE {schema}.before AS SELECT `+columns+` FROM {schema}.event_handled`)
	f.exec(t, `CREATE TABLE {schema}.nine (LIKE {schema}.event_handled, another text)`)
	sizes := map[string]int64{}
	for _, table := range []string{"before", "event_handled", "nine"} {
		f.exec(t, `INSERT INTO {schema}.`+table+` (`+columns+`)
			SELECT n, 'product-statistics', 'acme.order.paid.v1', gen_random_uuid(), 'SALES_COUNT_INCREASED', now(), 'shop' FROM generate_series(1, 20000) AS n`)
		var size int64
		require.NoError(t, f.db.QueryRow(background, `SELECT pg_relation_size($1::regclass)`, pgx.Identifier{f.schema, table}.Sanitize()).Scan(&size))
		sizes[table] = size
	}
	t.Log(sizes)
	few := float64(sizes["before"]) / 50 // PostgreSQL may add several pages to a table at once
	require.InDelta(t, sizes["before"], sizes["event_handled"], few)
	require.Greater(t, float64(sizes["nine"]), float64(sizes["event_handled"])+few, "a ninth column would cost")
}

// Retention removes notes of messages after HandledFor; then a message is handled again.
func TestInboxRetention(t *testing.T) {
	t.Parallel()
	f := newInboxFixture(t)
	first, err := f.handle(background, stripe("evt_1"))
	require.NoError(t, err)
	for _, age := range []time.Duration{30 * 24 * time.Hour, 31*24*time.Hour + time.Minute} {
		f.exec(t, `UPDATE {schema}.event_handled SET handled_at = now() - $1::interval`, age)
		_, err := outbox.CleanHandled(background, f.db, f.schema, outbox.RetentionConfig{})
		require.NoError(t, err)
		again, err := f.handle(background, stripe("evt_1"))
		require.NoError(t, err)
		require.Equal(t, age < 31*24*time.Hour, first == again)
	}
	require.Len(t, f.effects(t, "evt_1"), 2)
}

// Clients send the same messages at the same time, and again until each has an answer, while transactions fail, are
// rolled back, wait too short, end with their contexts, and lose their sessions at any point. Each message has one
// effect, and all answers to it are the same.
func TestInboxRepeatsAtRandom(t *testing.T) {
	t.Parallel()
	testenv.Long(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	f := newInboxFixture(t)
	const clients, messages = 8, 24
	random := make([]*rand.Rand, clients)
	for c := range random {
		random[c] = rand.New(rand.NewPCG(seed, uint64(c)))
	}
	failed := map[string]int{}
	for round := 0; len(failed) < len(kindsOfFailures) || round < 3; round++ { // until all have happened
		var mu sync.Mutex
		answers := make([]map[string]int, messages) // how many clients got which
		var g errgroup.Group
		for c := range clients {
			g.Go(func() error {
				for n := range messages { // in about the same order
					answer, err := f.handleAtRandom(random[c], fmt.Sprint(round, " ", n))
					for tries := 1; err != nil; answer, err = f.handleAtRandom(random[c], fmt.Sprint(round, " ", n)) {
						if tries++; tries > 1000 {
							return fmt.Errorf("message %d of round %d is never answered: %w", n, round, err)
						}
						mu.Lock()
						failed[kindOfFailure(err)]++
						mu.Unlock()
					}
					mu.Lock()
					if answers[n] == nil {
						answers[n] = map[string]int{}
					}
					answers[n][answer]++
					mu.Unlock()
				}
				return nil
			})
		}
		require.NoError(t, g.Wait(), "seed %d", seed)
		for n := range messages {
			effects := f.effects(t, fmt.Sprint(round, " ", n))
			require.Len(t, effects, 1, "effects of message %d of round %d, seed %d", n, round, seed)
			require.Equal(t, map[string]int{effects[0]: clients}, answers[n], "answers to message %d of round %d, seed %d", n, round, seed)
		}
		require.Less(t, round, 100, "failures %v, seed %d", failed, seed)
	}
	t.Log(failed)
	for kind := range failed {
		require.Contains(t, kindsOfFailures, kind, "seed %d", seed)
	}
}

var errRolledBack = errors.New("rolled back")

// handleAtRandom handles a message in a transaction that fails in one of many ways, or in none.
func (f *inboxFixture) handleAtRandom(random *rand.Rand, id string) (answer string, err error) {
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	level := levels[random.IntN(len(levels))]
	outcome, wait := random.IntN(12), time.Duration(random.IntN(3000))*time.Microsecond
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	tx, err := f.db.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		return "", err
	}
	defer tx.Rollback(background) //nolint:errcheck // after a commit
	var pid int
	if err := tx.QueryRow(ctx, `SELECT pg_backend_pid()`).Scan(&pid); err != nil {
		return "", err
	}
	kill := func() { _, _ = tx.Exec(background, `SELECT pg_terminate_backend(pg_backend_pid())`) }
	switch outcome {
	case 0:
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '1ms'`); err != nil {
			return "", err
		}
	case 1:
		if testenv.ThroughPgBouncer() { // which may have given the session to another client
			kill()
			break
		}
		killed := make(chan struct{})
		timer := time.AfterFunc(wait, func() { // at any point
			defer close(killed)
			_, _ = f.db.Exec(background, `SELECT pg_terminate_backend($1)`, pid)
		})
		defer func() {
			if !timer.Stop() {
				<-killed
			}
		}()
	case 2:
		defer time.AfterFunc(wait, cancel).Stop()
	}
	got, err := f.Once(ctx, tx, outbox.InboxMessage{Source: "client", ID: id, Action: "DONE", Request: []byte("request " + id)}, func() ([]byte, error) {
		answer, err := f.effect(ctx, tx, id)()
		time.Sleep(wait) // the others wait, or do not
		switch {
		case err == nil && outcome == 3:
			err = errRefused
		case outcome == 4:
			kill()
		case outcome == 5:
			cancel()
		}
		return answer, err
	})
	switch outcome {
	case 6:
		return "", errors.Join(err, errRolledBack)
	case 7:
		kill()
	}
	if commit := tx.Commit(ctx); err == nil { // also after an error: nothing of f is committed then
		err = commit
	}
	return string(got), err
}

// kindsOfFailures are what [kindOfFailure] returns.
var kindsOfFailures = []string{"refused", "rolled back", "in progress", "canceled", "connection", "40001"}

func kindOfFailure(err error) string {
	switch {
	case errors.Is(err, errRefused):
		return "refused"
	case errors.Is(err, errRolledBack):
		return "rolled back"
	case errors.Is(err, outbox.ErrInProgress):
		return "in progress"
	case errors.Is(err, context.Canceled):
		return "canceled"
	case pg.Code(err) == "57P01", pg.Code(err) == "":
		return "connection"
	}
	return pg.Code(err)
}
