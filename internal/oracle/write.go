package oracle

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Writers configures [Write]. The schema must exist. If an earlier Write has written
// there, the versions of keys continue.
type Writers struct {
	DB        *pgxpool.Pool
	Schema    string
	Record    Record    // by pgx in DB; needed if there are no Libraries
	Libraries []Library // that the writers use, one after the other in this order; none: pgx
	Seed      uint64
	Events    int           // how many to commit, at least
	Writers   int           // how many write concurrently
	Keys      int           // fewer keys mean more contention
	Pause     time.Duration // longest sleep inside a transaction
	Open      int           // transactions that stay open until the others are done
	Large     int           // one event in so many is large; 0: none
	// LargeBytes is the most that the filler of a large event has, and a fifth of it the
	// least. Compression makes no less than three quarters of it.
	LargeBytes int

	// Stop, if it is not nil, ends the writing before Events are committed.
	Stop <-chan struct{}
	// Outages says that the server may stop. Writers then try again until it is
	// back. If a transaction loses its connection, only the history shows whether it
	// has committed. Only [Pgx] knows of a lost connection.
	Outages bool
}

// Write commits events as w says, under READ COMMITTED, REPEATABLE READ and
// SERIALIZABLE, with savepoints, rollbacks, prepared transactions (the server's
// max_prepared_transactions must not be below Writers), transactions that take
// their id long before they write, and some that stay open all the time. It
// returns when all of them have ended; no prepared transaction is left then, unless ctx
// ended while the server was unavailable. The same seed gives each writer the same plan;
// how the plans interleave is not determined.
func Write(ctx context.Context, w Writers) error {
	if err := w.setUp(ctx); err != nil {
		return fmt.Errorf("oracle: set up: %w", err)
	}
	release := make(chan struct{})
	var open, busy sync.WaitGroup
	errs := make(chan error, w.Open+w.Writers)
	for i := range w.Open {
		open.Go(func() { errs <- w.holdOpen(ctx, i, release) })
	}
	var committed atomic.Int64
	for i := range w.Writers {
		busy.Go(func() { errs <- w.write(ctx, i, &committed) })
	}
	busy.Wait()
	close(release)
	open.Wait()
	close(errs)
	var all []error
	for err := range errs {
		all = append(all, err)
	}
	return errors.Join(all...)
}

func (w *Writers) table(name string) string { return pgx.Identifier{w.Schema, name}.Sanitize() }

func (w *Writers) setUp(ctx context.Context) error {
	_, err := w.DB.Exec(ctx, fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s (key text PRIMARY KEY, version bigint NOT NULL)`, w.table("oracle_key")))
	if err != nil {
		return err
	}
	_, err = w.DB.Exec(ctx, fmt.Sprintf(`INSERT INTO %s SELECT 'key-' || n, 0 FROM generate_series(1, %d) n ON CONFLICT (key) DO NOTHING`,
		w.table("oracle_key"), w.Keys))
	if err != nil {
		return err
	}
	_, err = w.DB.Exec(ctx, fmt.Sprintf(`CREATE TABLE IF NOT EXISTS %s (event_id text PRIMARY KEY)`, w.table("oracle_history")))
	return err
}

// holdOpen writes an event at the start and commits it after all others.
func (w *Writers) holdOpen(ctx context.Context, i int, release <-chan struct{}) error {
	for version := int64(1); ; version++ {
		lost, err := w.begin(ctx, i, "", func(tx Tx) error {
			e := Event{ID: uuid.NewString(), Key: fmt.Sprintf("open-%d", i), Version: version}
			if err := w.record(ctx, tx, e); err != nil {
				return err
			}
			select {
			case <-release:
			case <-ctx.Done():
			}
			return ctx.Err()
		})
		if !lost || ctx.Err() != nil {
			return err
		}
		time.Sleep(reconnectPause)
	}
}

// reconnectPause is how long a writer whose connection was lost waits before it
// tries again.
const reconnectPause = 50 * time.Millisecond

// begin runs f in a transaction of the library of a writer. It reports lost if an outage
// broke the transaction off: then it is not known whether it has committed.
func (w *Writers) begin(ctx context.Context, writer int, level pgx.TxIsoLevel, f func(Tx) error) (lost bool, err error) {
	library := Pgx(w.DB, w.Record)
	if len(w.Libraries) > 0 {
		library = w.Libraries[writer%len(w.Libraries)]
	}
	err = library.InTx(ctx, level, f)
	return w.Outages && errors.Is(err, errLost), err
}

// write runs transactions until enough events have committed.
func (w *Writers) write(ctx context.Context, writer int, committed *atomic.Int64) error {
	rng := rand.New(rand.NewPCG(w.Seed, uint64(writer)))
	for committed.Load() < int64(w.Events) && !w.stopped() {
		n, err := w.transaction(ctx, writer, rng)
		if err != nil {
			return fmt.Errorf("writer %d: %w", writer, err)
		}
		committed.Add(int64(n))
	}
	return nil
}

func (w *Writers) stopped() bool {
	select {
	case <-w.Stop:
		return true
	default:
		return false
	}
}

var errRollback = errors.New("this one rolls back")

// transaction runs one transaction and returns how many events it committed: none if it
// rolled back as planned or because of a conflict with another one.
func (w *Writers) transaction(ctx context.Context, writer int, rng *rand.Rand) (n int, _ error) {
	levels := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}
	prepared := ""
	if rng.IntN(12) == 0 {
		prepared = "oracle-" + uuid.NewString()
	}
	lost, err := w.begin(ctx, writer, levels[rng.IntN(len(levels))], func(tx Tx) error {
		if rng.IntN(4) == 0 { // an early id, which others overtake before it is used
			if err := tx.Exec(ctx, `SELECT pg_current_xact_id()`); err != nil {
				return err
			}
			w.pause(rng)
		}
		for range 1 + rng.IntN(3) {
			wrote, err := w.step(ctx, tx, rng)
			if err != nil {
				return err
			}
			n += wrote
			w.pause(rng)
		}
		if rng.IntN(10) == 0 {
			return errRollback
		}
		if prepared != "" {
			return w.prepare(ctx, tx, prepared)
		}
		return nil
	})
	switch {
	case errors.Is(err, errPrepared), lost && prepared != "":
		return w.decide(ctx, rng, prepared, n)
	case errors.Is(err, errRollback), isConflict(err):
		return 0, nil
	case lost && ctx.Err() == nil:
		time.Sleep(reconnectPause)
		return 0, nil
	}
	return n, err
}

var errPrepared = errors.New("this one is prepared, and decided elsewhere")

// prepare prepares the transaction, which so no longer belongs to its connection.
func (w *Writers) prepare(ctx context.Context, tx Tx, name string) error {
	if err := tx.Exec(ctx, fmt.Sprintf(`PREPARE TRANSACTION '%s'`, name)); err != nil {
		return err
	}
	return errPrepared
}

// decide commits or rolls back a prepared transaction, on any connection. It does so also
// if ctx has ended, because a prepared transaction holds its locks for ever.
func (w *Writers) decide(ctx context.Context, rng *rand.Rand, name string, n int) (int, error) {
	w.pause(rng)
	statement := "COMMIT"
	if rng.IntN(4) == 0 {
		statement, n = "ROLLBACK", 0
	}
	for try := 1; ; try++ {
		_, err := w.DB.Exec(context.WithoutCancel(ctx), fmt.Sprintf(`%s PREPARED '%s'`, statement, name))
		switch {
		case err == nil || !w.Outages:
			return n, err
		case hasCode(err, "42704"): // undefined object: an earlier try has ended it, or it was never prepared
			return 0, nil
		case ctx.Err() != nil, try == maxTries:
			return 0, err
		}
		time.Sleep(reconnectPause)
	}
}

// maxTries of decide take a minute at least, longer than the servers are unavailable.
const maxTries = int(time.Minute / reconnectPause)

// step records one to five events of one key, at times under a savepoint that
// is then released or rolled back, also because a statement fails in it.
func (w *Writers) step(ctx context.Context, tx Tx, rng *rand.Rand) (int, error) {
	if rng.IntN(5) > 0 {
		return w.bump(ctx, tx, rng)
	}
	end := rng.IntN(4)
	n := 0
	err := tx.Savepoint(ctx, func(savepoint Tx) (err error) {
		n, err = w.bump(ctx, savepoint, rng)
		switch {
		case err != nil || end >= 2:
			return err
		case end == 1:
			return errRollback
		}
		return savepoint.Exec(ctx, `SELECT 1/0`)
	})
	if errors.Is(err, errRollback) || hasCode(err, divisionByZero) {
		return 0, nil
	}
	return n, err
}

const divisionByZero = "22012"

// bump increments the version of a key under its row lock and records events.
func (w *Writers) bump(ctx context.Context, tx Tx, rng *rand.Rand) (int, error) {
	key := fmt.Sprintf("key-%d", 1+rng.IntN(w.Keys))
	n := 1 + rng.IntN(5)
	version, err := tx.QueryInt(ctx, fmt.Sprintf(`UPDATE %s SET version = version + $2 WHERE key = $1 RETURNING version`, w.table("oracle_key")), key, n)
	if err != nil {
		return 0, err
	}
	events := make([]Event, n)
	for i := range events {
		events[i] = Event{
			ID: uuid.NewString(), Key: key, Version: version - int64(n-1-i),
			Filler: w.filler(rng),
		}
	}
	return n, w.record(ctx, tx, events...)
}

// filler returns what makes an event as large as it is to be.
func (w *Writers) filler(rng *rand.Rand) string {
	if w.Large > 0 && rng.IntN(w.Large) == 0 {
		return Text(w.LargeBytes/5 + rng.IntN(w.LargeBytes*4/5))
	}
	return strings.Repeat("x", rng.IntN(200))
}

// Text returns n bytes, at most a million, of which compression makes no less than three
// quarters.
func Text(n int) string { return text()[:n] }

var text = sync.OnceValue(func() string {
	random := make([]byte, 750_000)
	_, _ = rand.NewChaCha8([32]byte{}).Read(random) // it never fails
	return base64.StdEncoding.EncodeToString(random)
})

// record writes events and history. Not every library takes an array as it is.
func (w *Writers) record(ctx context.Context, tx Tx, events ...Event) error {
	ids := make([]string, len(events))
	for i, e := range events {
		ids[i] = e.ID
	}
	err := tx.Exec(ctx, fmt.Sprintf(`INSERT INTO %s SELECT unnest(string_to_array($1::text, ','))`, w.table("oracle_history")), strings.Join(ids, ","))
	if err != nil {
		return err
	}
	return tx.Record(ctx, events...)
}

func (w *Writers) pause(rng *rand.Rand) {
	if rng.IntN(3) == 0 && w.Pause > 0 {
		time.Sleep(time.Duration(rng.Int64N(int64(w.Pause))))
	}
}

// isConflict reports whether a transaction failed because of another one: 40001
// serialization failure, 40P01 deadlock.
func isConflict(err error) bool { return hasCode(err, "40001") || hasCode(err, "40P01") }

// hasCode reports whether an error of PostgreSQL has a code, by whatever driver.
func hasCode(err error, code string) bool {
	var state interface{ SQLState() string }
	return errors.As(err, &state) && state.SQLState() == code
}

// Committed reads the history of [Write]: the ids of all events that were committed.
func Committed(ctx context.Context, db *pgxpool.Pool, schema string) (map[string]struct{}, error) {
	rows, err := db.Query(ctx, `SELECT event_id FROM `+pgx.Identifier{schema, "oracle_history"}.Sanitize())
	if err != nil {
		return nil, fmt.Errorf("oracle: read history: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("oracle: read history: %w", err)
	}
	committed := make(map[string]struct{}, len(ids))
	for _, id := range ids {
		committed[id] = struct{}{}
	}
	return committed, nil
}
