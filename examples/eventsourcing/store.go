package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox"
)

// sqlStore makes the event store. A version is there once: of two who decide about the same
// version of an order, one gets it. Nothing is ever changed in it, nor removed.
const sqlStore = `
CREATE TABLE order_events (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    aggregate_id uuid         NOT NULL,
    event_type   varchar(100) NOT NULL,
    payload      jsonb        NOT NULL,
    version      int          NOT NULL CHECK (version > 0),
    occurred_at  timestamptz  NOT NULL,
    metadata     jsonb        NOT NULL,
    created_at   timestamptz  NOT NULL DEFAULT now(),
    CONSTRAINT uk_aggregate_version UNIQUE (aggregate_id, version)
);
CREATE INDEX idx_occurred_at ON order_events (occurred_at);

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of %: events are immutable', TG_OP, TG_TABLE_NAME;
END $$;
CREATE TRIGGER immutable BEFORE UPDATE OR DELETE OR TRUNCATE ON order_events
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();

CREATE TABLE order_snapshots (
    aggregate_id uuid        NOT NULL,
    version      int         NOT NULL,
    occurred_at  timestamptz NOT NULL,
    form         int         NOT NULL,
    state        jsonb       NOT NULL,
    PRIMARY KEY (aggregate_id, version)
)`

const (
	// snapshotEvery is after how many events of an order its state is stored. An order has
	// three at most, so no snapshot is worth its row: two lets you see them at work. Take
	// some hundred, once a load reads so many events that it can be measured.
	snapshotEvery = 2
	// snapshotForm is the version of State. A snapshot of another one is not read: the
	// events are the truth.
	snapshotForm = 1
)

var (
	// ErrConflict is returned by Save if another command has changed the order since it was loaded.
	// Load it again, and decide again.
	ErrConflict = errors.New("the order was changed meanwhile")
	// ErrNotFound is returned for an order that is not there, or was not there then.
	ErrNotFound = errors.New("no such order")
)

// EventStore keeps orders as their events.
type EventStore struct {
	db   *pgxpool.Pool
	rec  *outbox.Recorder
	inTx func(ctx context.Context, f func(pgx.Tx) error) error // commits, and wakes who publishes
}

// Save appends what was decided about an order, and records it for publication, in one
// transaction: no event is stored that is not published, nor the other way round.
func (s *EventStore) Save(ctx context.Context, o *Order) error {
	err := s.inTx(ctx, func(tx pgx.Tx) error {
		published := make([]outbox.DomainEvent, len(o.uncommitted))
		for i, e := range o.uncommitted {
			published[i] = e
			if err := appendEvent(ctx, tx, e); err != nil {
				return err
			}
		}
		if err := s.rec.Record(ctx, tx, published...); err != nil {
			return err
		}
		return saveSnapshot(ctx, tx, o)
	})
	if err != nil {
		return fmt.Errorf("save order %s: %w", o.ID, err)
	}
	o.uncommitted = nil
	return nil
}

const sqlAppend = `
INSERT INTO order_events (aggregate_id, event_type, payload, version, occurred_at, metadata)
VALUES ($1, $2, $3, $4, $5, $6)`

func appendEvent(ctx context.Context, tx pgx.Tx, e OrderEvent) error {
	name, err := nameOf(e)
	if err != nil {
		return err
	}
	f := e.fact()
	_, err = tx.Exec(ctx, sqlAppend, f.OrderID, name, e, f.Version, f.At, metadataOf(ctx))
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.ConstraintName == "uk_aggregate_version" {
		return fmt.Errorf("%w: version %d is there already", ErrConflict, f.Version)
	}
	return err
}

// Metadata says how an event came about.
type Metadata struct {
	TraceID       string `json:"traceId"`       // of the command
	CorrelationID string `json:"correlationId"` // of the business flow that it is part of
}

// metadataOf takes from a context what the event in Kafka carries as well.
func metadataOf(ctx context.Context) Metadata {
	return Metadata{TraceID: outbox.TraceID(ctx), CorrelationID: outbox.CorrelationID(ctx)}
}

const sqlSaveSnapshot = `
INSERT INTO order_snapshots (aggregate_id, version, occurred_at, form, state) VALUES ($1, $2, $3, $4, $5)`

func saveSnapshot(ctx context.Context, tx pgx.Tx, o *Order) error {
	stored := o.Version - len(o.uncommitted)
	if o.Version/snapshotEvery == stored/snapshotEvery {
		return nil
	}
	_, err := tx.Exec(ctx, sqlSaveSnapshot, o.ID, o.Version, o.UpdatedAt, snapshotForm, o.State)
	return err
}

// Load returns an order as it is.
func (s *EventStore) Load(ctx context.Context, id uuid.UUID) (*Order, error) {
	return s.load(ctx, id, present)
}

// LoadAtVersion returns an order as it was after so many events.
func (s *EventStore) LoadAtVersion(ctx context.Context, id uuid.UUID, version int) (*Order, error) {
	o, err := s.load(ctx, id, point{version, present.at})
	if err == nil && o.Version != version {
		return nil, fmt.Errorf("%w: order %s has %d versions, and not %d", ErrNotFound, id, o.Version, version)
	}
	return o, err
}

// LoadAt returns an order as it was at a time, by what is known of it today.
func (s *EventStore) LoadAt(ctx context.Context, id uuid.UUID, at time.Time) (*Order, error) {
	return s.load(ctx, id, point{present.version, at})
}

// point is up to where a history is read.
type point struct {
	version int
	at      time.Time
}

var present = point{math.MaxInt32, time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)}

const sqlLoadSnapshot = `
SELECT state
  FROM order_snapshots
 WHERE aggregate_id = $1 AND version <= $2 AND occurred_at <= $3 AND form = $4
 ORDER BY version DESC
 LIMIT 1`

// load reads the last snapshot before a point, and the events from there on.
func (s *EventStore) load(ctx context.Context, id uuid.UUID, until point) (*Order, error) {
	var snapshot State
	err := s.db.QueryRow(ctx, sqlLoadSnapshot, id, until.version, until.at, snapshotForm).Scan(&snapshot)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("load order %s: %w", id, err)
	}
	later, err := history(ctx, s.db, id, snapshot.Version, until)
	if err != nil {
		return nil, fmt.Errorf("load order %s: %w", id, err)
	}
	if snapshot.Version == 0 && len(later) == 0 {
		return nil, fmt.Errorf("%w: %s", ErrNotFound, id)
	}
	return FromSnapshot(snapshot, later)
}

// queryer is a pool or a transaction.
type queryer interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

const sqlHistory = `
SELECT event_type, payload
  FROM order_events
 WHERE aggregate_id = $1 AND version > $2 AND version <= $3 AND occurred_at <= $4
 ORDER BY version`

// history returns the events of an order after a version, up to a point.
func history(ctx context.Context, db queryer, id uuid.UUID, after int, until point) ([]OrderEvent, error) {
	rows, _ := db.Query(ctx, sqlHistory, id, after, until.version, until.at) // CollectRows returns its error
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (OrderEvent, error) {
		var name string
		var payload json.RawMessage
		if err := row.Scan(&name, &payload); err != nil {
			return nil, err
		}
		return decode(name, payload)
	})
}
