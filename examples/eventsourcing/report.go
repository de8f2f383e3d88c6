package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/examples/internal/show"
)

// report compares what the service has acknowledged, the event store, what was published, and
// the read model.
type report struct {
	counts
	*tally
	stored   int // changes that were acknowledged and are in the event store
	readable int // orders of the read model that are what their events say
	loaded   int // orders that are the same from their snapshot as from all events

	finished bool

	versions, byVersion, byTime int // of the past, and those that LoadAtVersion and LoadAt return
}

// counts is what PostgreSQL says.
type counts struct {
	Events, Traced, Orders, Gaps int // of the event store; orders whose versions have a gap
	Recorded, Matched, Handled   int // of outbox: events, those that are in the store too, those that are projected
	Readable                     int // orders of the read model
	Snapshots, SnapshotsDue      int

	Paid, Refunded, Delivered, Cancelled, Failed int // orders
}

const sqlCounts = `
WITH history AS (
    SELECT aggregate_id, count(*) AS events, max(version) AS version,
           bool_or(event_type = $2) AS paid, bool_or(payload ? 'refundAmount') AS refunded,
           bool_or(event_type = $3) AS delivered, bool_or(event_type = $4) AS cancelled, bool_or(event_type = $5) AS failed
      FROM order_events
     GROUP BY aggregate_id)
SELECT (SELECT count(*) FROM order_events) AS events,
       (SELECT count(*) FROM order_events WHERE metadata->>'traceId' <> '' AND metadata->>'correlationId' <> '') AS traced,
       count(*) AS orders,
       count(*) FILTER (WHERE events <> version) AS gaps,
       (SELECT count(*) FROM outbox) AS recorded,
       (SELECT count(*)
          FROM outbox AS o
          JOIN order_events AS e ON (o.aggregate_id, o.event_type, o.payload) = (e.aggregate_id::text, e.event_type, e.payload)) AS matched,
       (SELECT count(*) FROM event_handled) AS handled,
       (SELECT count(*) FROM orders) AS readable,
       (SELECT count(*) FROM order_snapshots) AS snapshots,
       coalesce(sum(version / $1), 0)::bigint AS snapshots_due,
       count(*) FILTER (WHERE paid) AS paid,
       count(*) FILTER (WHERE refunded) AS refunded,
       count(*) FILTER (WHERE delivered) AS delivered,
       count(*) FILTER (WHERE cancelled) AS cancelled,
       count(*) FILTER (WHERE failed) AS failed
  FROM history`

// report is made when nothing is under way any more.
func (s *scene) report(ctx context.Context) (*report, error) {
	r := &report{tally: &s.tally, finished: s.finished}
	rows, _ := s.db.Query(ctx, sqlCounts, snapshotEvery, orderConfirmed, orderCompleted, orderCancelled, orderFailed)
	var err error // also of the query
	if r.counts, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[counts]); err != nil {
		return nil, fmt.Errorf("count: %w", err)
	}
	read, err := readModel(ctx, s.db)
	if err != nil {
		return nil, fmt.Errorf("read the read model: %w", err)
	}
	rows, _ = s.db.Query(ctx, `SELECT DISTINCT aggregate_id FROM order_events`)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return nil, fmt.Errorf("list orders: %w", err)
	}
	store := &EventStore{db: s.db}
	for _, id := range ids {
		events, err := history(ctx, s.db, id, 0, present)
		if err != nil {
			return nil, err
		}
		if err := r.compare(ctx, store, events, read[id]); err != nil {
			return nil, fmt.Errorf("order %s: %w", id, err)
		}
		for _, version := range s.acknowledged[id] {
			if version <= len(events) {
				r.stored++
			}
		}
	}
	return r, nil
}

// compare looks at an order in all ways in which it can be loaded.
func (r *report) compare(ctx context.Context, store *EventStore, events []OrderEvent, read State) error {
	var order *Order
	for i, e := range events {
		var err error
		if order, err = Rebuild(events[:i+1]); err != nil {
			return err
		}
		byVersion, err := store.LoadAtVersion(ctx, order.ID, i+1)
		if err != nil {
			return err
		}
		byTime, err := store.LoadAt(ctx, order.ID, e.OccurredAt())
		if err != nil {
			return err
		}
		r.versions++
		r.byVersion += one(same(byVersion.State, order.State))
		r.byTime += one(same(byTime.State, order.State))
	}
	loaded, err := store.Load(ctx, order.ID)
	if err != nil {
		return err
	}
	r.loaded += one(same(loaded.State, order.State))
	r.readable += one(same(read, order.State))
	return nil
}

func one(right bool) int {
	if right {
		return 1
	}
	return 0
}

func same(a, b State) bool {
	left, err := json.Marshal(a)
	right, bad := json.Marshal(b)
	return errors.Join(err, bad) == nil && string(left) == string(right)
}

const sqlReadModelRows = `
SELECT o.*, (SELECT jsonb_agg(jsonb_build_object('productId', product_id, 'quantity', quantity, 'price', price) ORDER BY product_id)
               FROM order_items WHERE order_id = o.id) AS items
  FROM orders AS o`

// readModel returns all orders of the read model.
func readModel(ctx context.Context, db *pgxpool.Pool) (map[uuid.UUID]State, error) {
	rows, _ := db.Query(ctx, sqlReadModelRows) // CollectRows returns its error
	states, err := pgx.CollectRows(rows, pgx.RowToStructByName[State])
	byID := map[uuid.UUID]State{}
	for _, s := range states {
		s.CreatedAt, s.UpdatedAt = s.CreatedAt.UTC(), s.UpdatedAt.UTC()
		byID[s.ID] = s
	}
	return byID, err
}

func (r *report) equations() show.Equations {
	return show.Equations{
		show.Equal("acknowledged changes that are stored", r.stored, "acknowledged changes", r.changes),
		show.None("orders with a gap in their versions", r.Gaps),
		show.Equal("events with trace and correlation id", r.Traced, "events in the store", r.Events),
		show.Equal("events recorded for publication", r.Recorded, "events in the store", r.Events),
		show.Equal("of them the same in store and outbox", r.Matched, "events in the store", r.Events),
		show.Equal("events projected, each once", r.Handled, "events in the store", r.Events).AtEnd(),
		show.Equal("orders in the read model", r.Readable, "orders in the store", r.Orders).AtEnd(),
		show.Equal("of them as their events say", r.readable, "orders in the store", r.Orders).AtEnd(),
		show.Equal("snapshots", r.Snapshots, fmt.Sprintf("one for every %d events of an order", snapshotEvery), r.SnapshotsDue),
		show.Equal("orders the same with snapshot", r.loaded, "orders in the store", r.Orders),
		show.Equal("past states, by version", r.byVersion, "versions", r.versions),
		show.Equal("past states, by point in time", r.byTime, "versions", r.versions),
	}
}

func printHeader(out io.Writer, cfg config) {
	by := "a consumer of Kafka"
	if cfg.worker {
		by = "a worker, without Kafka"
	}
	fmt.Fprintf(out, `
An order service whose orders are their events

  PostgreSQL  schema %s, of this run
  service     %d processes, %d orders per second at each, for %v
  read model  kept by %s
`, cfg.schema, cfg.processes, cfg.rate, cfg.duration, by)
}

func (r *report) print(out io.Writer) error {
	fmt.Fprintf(out, "\n  %d orders: %d paid, %d delivered, %d cancelled (%d with a refund), %d failed\n",
		r.Orders, r.Paid, r.Delivered, r.Cancelled, r.Refunded, r.Failed)
	fmt.Fprintf(out, "  %d processes killed; %d times somebody else was faster\n", r.kills, r.conflicts)
	fmt.Fprintf(out, "  %d orders of the read model damaged and repaired; all of it rebuilt %d times while events came\n\n", r.damaged, r.rebuilds)
	if r.Events == 0 {
		return show.Nothing(out)
	}
	return r.equations().Conclude(out, r.finished, "The events are the truth: what was acknowledged, published and read is what they say.")
}
