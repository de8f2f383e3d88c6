package main

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxtest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// fixture is the program on a schema of the test's own, with two accounts.
type fixture struct {
	*app
	ledger
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	testenv.Direct(t) // a setting of sessions
	_, schema := testenv.Schema(t)
	f := &fixture{app: &app{schema: schema, source: "ledger/" + uuid.NewString(), log: slog.New(slog.DiscardHandler)}}
	f.db = testenv.Pool(t, func(cfg *pgxpool.Config) {
		cfg.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
	})
	require.NoError(t, f.wire("one"))
	require.NoError(t, f.migrate(t.Context(), 2))
	rec, err := outbox.NewRecorder(f.app.events, outbox.RecorderConfig{Schema: schema})
	require.NoError(t, err)
	f.ledger = ledger{f.begin, rec}
	return f
}

func (f *fixture) begin(ctx context.Context, do func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, f.db, do)
}

// recorded returns the events of deposits and of reversals.
func (f *fixture) recorded(t *testing.T) (posted []LedgerPostedEvent, reversed []LedgerReversedEvent) {
	t.Helper()
	db := outboxtest.InSchema(f.db, f.schema)
	return outboxtest.Recorded[LedgerPostedEvent](t.Context(), t, db, f.app.events),
		outboxtest.Recorded[LedgerReversedEvent](t.Context(), t, db, f.app.events)
}

// requireRows requires how many rows the tables of the ledger have, and the outbox.
func (f *fixture) requireRows(t *testing.T, transactions, entries, events int) {
	t.Helper()
	for table, want := range map[string]int{"ledger_transaction": transactions, "journal_entry": entries, "outbox": events} {
		var n int
		require.NoError(t, f.db.QueryRow(t.Context(), `SELECT count(*) FROM `+table).Scan(&n))
		require.Equal(t, want, n, table)
	}
}

func (f *fixture) requireBalance(t *testing.T, account string, want Balance) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
		got, err := balanceOf(t.Context(), tx, account)
		require.Equal(t, want, got)
		return err
	}))
}

// A deposit is a transaction with its entries, a balance and an event. Asked for twice, it is posted once.
func TestDepositIsPostedOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	request := uuid.New()
	id, err := f.deposit(t.Context(), request, "account-1", 1000)
	require.NoError(t, err)
	again, err := f.deposit(t.Context(), request, "account-1", 1000)
	require.NoError(t, err)
	require.Equal(t, id, again)
	f.requireRows(t, 1, 3, 1)
	f.requireBalance(t, "account-1", Balance{990, 1})
	posted, _ := f.recorded(t)
	require.Equal(t, Posting{id, "account-1", 1, 990, 990, []JournalEntry{{bank, -1000}, {"account-1", 990}, {fees, 10}}, posted[0].At}, posted[0].Posting)
}

// A reversal leaves the transaction as it is and posts another one. A transaction has one reversal,
// however many requests ask for it.
func TestTransactionIsReversedOnce(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	id, err := f.deposit(t.Context(), uuid.New(), "account-1", 50)
	require.NoError(t, err)
	request := uuid.New()
	reversal, err := f.reverse(t.Context(), request, id, "a mistake")
	require.NoError(t, err)
	again, err := f.reverse(t.Context(), request, id, "a mistake")
	require.NoError(t, err)
	require.Equal(t, reversal, again)
	_, err = f.reverse(t.Context(), uuid.New(), id, "somebody else's mistake")
	require.ErrorIs(t, err, errReversed)
	_, err = f.reverse(t.Context(), uuid.New(), reversal, "not a mistake")
	require.ErrorIs(t, err, errReversed)
	f.requireRows(t, 2, 4, 2)
	f.requireBalance(t, "account-1", Balance{0, 2})
	_, reversed := f.recorded(t)
	require.Len(t, reversed, 1)
	require.Equal(t, id, reversed[0].Reverses)
	require.Equal(t, int64(2), reversed[0].Sequence)
}

// What the ledger refuses leaves nothing behind.
func TestRefusedPostings(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	_, err := f.deposit(t.Context(), uuid.New(), "nobody", 1)
	require.ErrorIs(t, err, errAccount)
	_, err = f.deposit(t.Context(), uuid.New(), "account-1", 0)
	require.ErrorIs(t, err, errAmount)
	_, err = f.reverse(t.Context(), uuid.New(), 99, "a guess")
	require.ErrorIs(t, err, errUnposted)
	f.requireRows(t, 0, 0, 0)
}

// If the transaction rolls back, neither the ledger nor the outbox has anything of it: whatever was written before.
func TestRollbackLeavesNothing(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	full := errors.New("the disk is full")
	f.inTx = func(ctx context.Context, do func(pgx.Tx) error) error {
		return f.begin(ctx, func(tx pgx.Tx) error { return errors.Join(do(tx), full) })
	}
	_, err := f.deposit(t.Context(), uuid.New(), "account-1", 1000)
	require.ErrorIs(t, err, full)
	f.requireRows(t, 0, 0, 0)
	f.requireBalance(t, "account-1", Balance{})
}

// refusing is a recorder that records, and then says that it could not.
type refusing struct{ recorder }

var errRecorder = errors.New("no event")

func (r refusing) Record(ctx context.Context, tx pgx.Tx, events ...outbox.DomainEvent) error {
	return errors.Join(r.recorder.Record(ctx, tx, events...), errRecorder)
}

func TestNoEventNoTransaction(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	f.ledger.events = refusing{f.ledger.events}
	_, err := f.deposit(t.Context(), uuid.New(), "account-1", 1000)
	require.ErrorIs(t, err, errRecorder)
	f.requireRows(t, 0, 0, 0)
	f.requireBalance(t, "account-1", Balance{})
}

// sqlWaiting counts the transactions that wait for one of a certain process of PostgreSQL.
const sqlWaiting = `SELECT count(*) FROM pg_stat_activity WHERE $1::int = ANY(pg_blocking_pids(pid))`

// The balance changes while a deposit waits to change it: the deposit is rolled back with its
// event, and tried again. One event is left, and it says what is true after both.
func TestConflictLeavesOneEvent(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	other, err := f.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = other.Rollback(context.Background()) }() // after a failure
	first := uuid.New()
	_, err = f.attempt(t.Context(), other, first, 1, func(pgx.Tx) (Transaction, error) { return Deposit("account-1", 50, noon) })
	require.NoError(t, err)

	var g errgroup.Group
	second := uuid.New()
	g.Go(func() error {
		_, err := f.deposit(context.Background(), second, "account-1", 30)
		return err
	})
	require.Eventually(t, func() bool {
		var n int
		err := f.db.QueryRow(t.Context(), sqlWaiting, other.Conn().PgConn().PID()).Scan(&n)
		return err == nil && n == 1
	}, testenv.Patience, testenv.Patience/10_000)
	require.NoError(t, other.Commit(t.Context()))
	require.NoError(t, g.Wait())

	f.requireRows(t, 2, 4, 2)
	f.requireBalance(t, "account-1", Balance{80, 2})
	var attempt int
	require.NoError(t, f.db.QueryRow(t.Context(), `SELECT attempt FROM ledger_transaction WHERE request_id = $1`, second).Scan(&attempt))
	require.Equal(t, 2, attempt)
	posted, _ := f.recorded(t)
	require.Len(t, posted, 2)
	require.Equal(t, []int64{1, 2}, []int64{posted[0].Sequence, posted[1].Sequence})
	require.Equal(t, int64(80), posted[1].Balance)
}

// Customers who come at the same time, each of them twice, wait for each other and lose nothing.
func TestManyAtATime(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	var g errgroup.Group
	for range 20 {
		request := uuid.New()
		for range 2 {
			g.Go(func() error {
				_, err := f.deposit(context.Background(), request, "account-2", 10)
				return err
			})
		}
	}
	require.NoError(t, g.Wait())
	f.requireRows(t, 20, 40, 20)
	f.requireBalance(t, "account-2", Balance{200, 20})
}
