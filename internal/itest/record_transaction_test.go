package itest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
)

func TestRollback(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	tx := c.begin(t)
	require.NoError(t, c.rec.Record(background, tx, good, good))
	require.NoError(t, tx.Rollback(background))
	require.Empty(t, c.ids(t))

	var batch pgx.Batch
	require.NoError(t, c.rec.Queue(background, &batch, good))
	tx = c.begin(t)
	require.NoError(t, tx.SendBatch(background, &batch).Close())
	require.NoError(t, tx.Rollback(background))
	require.Empty(t, c.ids(t))
}

func TestSavepoints(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	event := func(id string) parcel { return parcel{ID: id, Sent: noon} }
	tx := c.begin(t)
	require.NoError(t, c.rec.Record(background, tx, event("before")))
	lost, err := tx.Begin(background)
	require.NoError(t, err)
	require.NoError(t, c.rec.Record(background, lost, event("lost")))
	require.NoError(t, lost.Rollback(background))
	kept, err := tx.Begin(background)
	require.NoError(t, err)
	require.NoError(t, c.rec.Record(background, kept, event("kept")))
	require.NoError(t, kept.Commit(background))
	require.NoError(t, c.rec.Record(background, tx, event("after")))
	var xid uint64
	require.NoError(t, tx.QueryRow(background, `SELECT pg_current_xact_id()::text::bigint`).Scan(&xid))
	require.NoError(t, tx.Commit(background))
	require.Equal(t, []string{"before", "kept", "after"}, c.ids(t))
	for _, r := range c.rows(t) {
		require.Equal(t, xid, r.Xid, "%s: the transaction's id, not the savepoint's", r.AggregateID)
	}
}

// A savepoint rescues a transaction from an error of PostgreSQL's, too.
func TestDatabaseErrorAborts(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	tx := c.begin(t)
	_, err := tx.Exec(background, c.sql(`ALTER TABLE {s}.outbox ADD CHECK (aggregate_id <> 'good')`))
	require.NoError(t, err)
	inner, err := tx.Begin(background)
	require.NoError(t, err)
	err = c.rec.Record(background, inner, good)
	pg, ok := errors.AsType[*pgconn.PgError](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, "23514", pg.Code)
	_, rejected := errors.AsType[*outbox.FieldError](err)
	require.False(t, rejected)
	require.NoError(t, inner.Rollback(background))
	require.NoError(t, c.rec.Record(background, tx, parcel{ID: "other", Sent: noon}))
	require.NoError(t, tx.Commit(background))
	require.Equal(t, []string{"other"}, c.ids(t))
}

func TestNilTransactionAndBatch(t *testing.T) {
	t.Parallel()
	rec, err := outbox.NewRecorder(parcels(t), outbox.RecorderConfig{})
	require.NoError(t, err)
	var typed *pgxpool.Tx
	for name, tx := range map[string]pgx.Tx{"nil": nil, "typed nil": typed} {
		t.Run(name, func(t *testing.T) {
			requireRefused(t, rec.Record(background, tx, good), outbox.ErrNilArgument, refusal{"", -1, "tx"})
			requireRefused(t, rec.Record(background, tx), outbox.ErrNilArgument, refusal{"", -1, "tx"})
		})
	}
	requireRefused(t, rec.Queue(background, nil, good), outbox.ErrNilArgument, refusal{"", -1, "batch"})
	requireRefused(t, rec.Queue(background, nil), outbox.ErrNilArgument, refusal{"", -1, "batch"})
}

// Nothing that commits each statement for itself can be passed as a transaction (T10).
func TestOnlyTransactionsAreTransactions(t *testing.T) {
	t.Parallel()
	tx := reflect.TypeFor[pgx.Tx]()
	require.Equal(t, tx, reflect.TypeOf((*outbox.Recorder).Record).In(2), "Record asks for a pgx.Tx")
	for _, not := range []reflect.Type{
		reflect.TypeFor[*pgxpool.Pool](), reflect.TypeFor[*pgxpool.Conn](), reflect.TypeFor[*pgx.Conn](), reflect.TypeFor[*pgconn.PgConn](),
	} {
		require.False(t, not.Implements(tx), "%s", not)
	}
	require.True(t, reflect.TypeFor[*pgxpool.Tx]().Implements(tx))
}

func TestEndedTransaction(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	committed, rolledBack := c.begin(t), c.begin(t)
	require.NoError(t, committed.Commit(background))
	require.NoError(t, rolledBack.Rollback(background))
	require.ErrorIs(t, c.rec.Record(background, committed, good), pgx.ErrTxClosed)
	require.ErrorIs(t, c.rec.Record(background, rolledBack, good), pgx.ErrTxClosed)
	require.Empty(t, c.ids(t))
}

func TestCanceledContext(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	ctx, cancel := context.WithCancel(background)
	cancel()
	require.ErrorIs(t, c.rec.Record(ctx, c.begin(t), good), context.Canceled)
	require.Empty(t, c.ids(t))
}

var errConflict = errors.New("somebody else was faster")

// A business method that runs again after a conflict leaves one event, whether
// PostgreSQL finds the conflict or the service does (T9).
func TestRetryLeavesOneEvent(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		level  pgx.TxIsoLevel
		update string
		again  func(error) bool
	}{
		"version in the row": {pgx.ReadCommitted, `UPDATE {s}.stock SET left_over = left_over - 1, version = version + 1 WHERE version = $1`,
			func(err error) bool { return errors.Is(err, errConflict) }},
		"repeatable read": {pgx.RepeatableRead, `UPDATE {s}.stock SET left_over = left_over - 1, version = $1 + 1`, isSerializationFailure},
		"serializable":    {pgx.Serializable, `UPDATE {s}.stock SET left_over = left_over - 1, version = $1 + 1`, isSerializationFailure},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCounter(t, parcels(t))
			_, err := c.db.Exec(background, c.sql(`CREATE TABLE {s}.stock AS SELECT 10 AS left_over, 1 AS version`))
			require.NoError(t, err)
			attempts := 0
			buy := func(tx pgx.Tx) error {
				attempts++
				var version int
				if err := tx.QueryRow(background, c.sql(`SELECT version FROM {s}.stock`)).Scan(&version); err != nil {
					return err
				}
				if attempts == 1 {
					_, err := c.db.Exec(background, c.sql(`UPDATE {s}.stock SET left_over = left_over - 1, version = version + 1`))
					require.NoError(t, err)
				}
				if err := c.rec.Record(background, tx, id(fmt.Sprintf("attempt-%d", attempts))); err != nil {
					return err
				}
				tag, err := tx.Exec(background, c.sql(tt.update), version)
				if err == nil && tag.RowsAffected() == 0 {
					return errConflict
				}
				return err
			}
			for err = errConflict; err != nil; {
				err = pgx.BeginTxFunc(background, c.db, pgx.TxOptions{IsoLevel: tt.level}, buy)
				require.True(t, err == nil || tt.again(err), "%v", err)
			}
			require.Equal(t, 2, attempts)
			require.Equal(t, []string{"attempt-2"}, c.ids(t))
			var left int
			require.NoError(t, c.db.QueryRow(background, c.sql(`SELECT left_over FROM {s}.stock`)).Scan(&left))
			require.Equal(t, 8, left)
		})
	}
}

// A conflict that PostgreSQL finds inside Record or at COMMIT is still there to
// be recognised.
func TestRecordKeepsPostgresError(t *testing.T) {
	t.Parallel()
	c := newCounter(t, parcels(t))
	_, err := c.db.Exec(background, c.sql(`
		CREATE FUNCTION {s}.clash() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN RAISE EXCEPTION 'clash' USING ERRCODE = 'serialization_failure'; END$$;
		CREATE TRIGGER clash BEFORE INSERT ON {s}.outbox FOR EACH STATEMENT EXECUTE FUNCTION {s}.clash()`))
	require.NoError(t, err)
	tx := c.begin(t)
	require.True(t, isSerializationFailure(c.rec.Record(background, tx, good)))
	require.Error(t, tx.Commit(background), "the transaction is aborted, as documented")
	require.Empty(t, c.ids(t))
}
