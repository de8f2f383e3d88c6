package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/outboxops"
	"github.com/twmb/franz-go/pkg/kgo"
)

// report compares what the services know of the orders.
type report struct {
	tables
	sent
	asked                int // orders that customers have asked for; 0 if the shop closed early
	mails, repeatedMails int
	debezium             bool
	killed               []string
	finished             bool

	example uuid.UUID // an order that was cancelled; none is uuid.Nil
	history []outboxops.RecordedEvent
}

// tables is what PostgreSQL says.
type tables struct {
	Orders, Completed, Cancelled int
	ByCustomer                   int // cancelled by the customer, and not because stock was short
	Cents, Points                int // of completed orders
	Pieces                       int // in completed orders

	Products, Matching int // those whose stock is what was there, and what was taken and given back
	Taken              int // pieces that are not in stock any more
	Held               int // reservations of orders that are cancelled
	Unreserved         int // completed orders without a reservation
	Released           int // orders whose reservation was there and is given back
	MovedTwice         int // items that were taken or given back twice

	Earned, EarnedTwice        int // points that customers have; orders with an entry twice
	SoldOrders, SoldCents      int
	Notifications, DistinctOne int // all, and different ones

	Recorded, Owed, Handled, Unhandled int // events; those that have a handler; notes of it; deliveries that have not succeeded
}

const sqlReport = `
WITH ordered AS (
    SELECT o.id, o.status, o.total, (SELECT sum((i->>'quantity')::bigint) FROM jsonb_array_elements(o.items) AS i) AS pieces
      FROM orders AS o),
     moved AS (
    SELECT product_id, sum(quantity) AS quantity FROM stock_movement GROUP BY product_id)
SELECT (SELECT count(*) FROM ordered) AS orders,
       (SELECT count(*) FROM ordered WHERE status = 'COMPLETED') AS completed,
       (SELECT count(*) FROM ordered WHERE status = 'CANCELLED') AS cancelled,
       (SELECT count(*) FROM orders WHERE reason = $3) AS by_customer,
       (SELECT coalesce(sum(total), 0)::bigint FROM ordered WHERE status = 'COMPLETED') AS cents,
       (SELECT coalesce(sum(total / 100), 0)::bigint FROM ordered WHERE status = 'COMPLETED') AS points,
       (SELECT coalesce(sum(pieces), 0)::bigint FROM ordered WHERE status = 'COMPLETED') AS pieces,
       (SELECT count(*) FROM stock) AS products,
       (SELECT count(*) FROM stock LEFT JOIN moved USING (product_id) WHERE available = initial + coalesce(quantity, 0)) AS matching,
       (SELECT coalesce(sum(initial - available), 0)::bigint FROM stock) AS taken,
       (SELECT count(*) FROM ordered JOIN reservation AS r ON r.order_id = id WHERE ordered.status = 'CANCELLED' AND r.status <> 'RELEASED') AS held,
       (SELECT count(*) FROM ordered LEFT JOIN reservation AS r ON r.order_id = id WHERE ordered.status = 'COMPLETED' AND r.status IS DISTINCT FROM 'RESERVED') AS unreserved,
       (SELECT count(DISTINCT order_id) FROM stock_movement WHERE quantity > 0) AS released,
       (SELECT count(*) FROM (SELECT FROM stock_movement GROUP BY order_id, product_id, quantity > 0 HAVING count(*) > 1) AS t) AS moved_twice,
       (SELECT coalesce(sum(points), 0)::bigint FROM reward_entry) AS earned,
       (SELECT count(*) FROM (SELECT FROM reward_entry WHERE points <> 0 GROUP BY order_id, points > 0 HAVING count(*) > 1) AS t) AS earned_twice,
       (SELECT orders FROM sales) AS sold_orders,
       (SELECT cents FROM sales) AS sold_cents,
       (SELECT count(*) FROM notification) AS notifications,
       (SELECT count(DISTINCT (order_id, state)) FROM notification) AS distinct_one,
       (SELECT count(*) FROM outbox) AS recorded,
       (SELECT count(*) FROM outbox WHERE event_type <> ALL($1)) AS owed,
       (SELECT count(*) FROM event_handled) AS handled,
       (SELECT count(*) FROM event_delivery WHERE status <> $2) AS unhandled`

// report is made when nothing is under way any more.
func (p *performance) report(ctx context.Context) (*report, error) {
	r := &report{finished: p.finished, killed: p.others.Killed(), debezium: p.cfg.debezium, asked: p.cfg.orders}
	if p.closed {
		r.asked = 0
	}
	r.mails, r.repeatedMails = p.mails.counts()
	rows, _ := p.db.Query(ctx, sqlReport, unhandled, outboxops.DeliveryDone, reasonOfCustomer) // its error is that of CollectExactlyOneRow
	var err error
	if r.tables, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[tables]); err != nil {
		return nil, fmt.Errorf("read the tables: %w", err)
	}
	if r.sent, err = p.readKafka(ctx); err != nil {
		return nil, err
	}
	return r, r.addExample(ctx, p.app)
}

// sqlExample finds an order that was cancelled because stock was short, or another one that was cancelled.
const sqlExample = `SELECT id FROM orders WHERE status = 'CANCELLED' ORDER BY reason = $1, created_at LIMIT 1`

// addExample adds the history of an order that was cancelled.
func (r *report) addExample(ctx context.Context, a *app) error {
	err := a.db.QueryRow(ctx, sqlExample, reasonOfCustomer).Scan(&r.example)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err == nil {
		r.history, err = history(ctx, a.db, a.schema, r.example)
	}
	return err
}

// sent is what Kafka has of this run.
type sent struct {
	records, events int // an event that was sent twice is one event
	named           int // records whose header event-id is the id of their event
}

// readKafka reads the topics to their ends.
func (a *app) readKafka(ctx context.Context) (s sent, err error) {
	topics := []string{}
	for _, r := range a.events.Registrations() {
		if !slices.Contains(topics, r.Topic) {
			topics = append(topics, r.Topic)
		}
	}
	ids := map[string]bool{}
	err = show.ReadTopics(ctx, a.kafka, topics, func(r *kgo.Record) {
		m, err := a.onlyOurs(r)
		if err != nil || m == nil {
			return
		}
		s.records++
		ids[m.ID] = true
		for _, h := range r.Headers {
			if h.Key == idHeader && string(h.Value) == m.ID {
				s.named++
			}
		}
	})
	s.events = len(ids)
	return s, err
}

func (r *report) equations() show.Equations {
	states := r.Orders + r.Completed + r.Cancelled
	all := show.Equations{
		show.Equal("orders completed or cancelled", r.Completed+r.Cancelled, "orders", r.Orders).AtEnd(),
		show.Equal("stocks that follow from their movements", r.Matching, "products", r.Products),
		show.Equal("pieces that left the stock", r.Taken, "pieces in completed orders", r.Pieces).AtEnd(),
		show.None("completed orders without a reservation", r.Unreserved).AtEnd(),
		show.None("reservations left of cancelled orders", r.Held).AtEnd(),
		show.None("items taken or given back twice", r.MovedTwice),
		show.Equal("points of customers", r.Earned, "points of completed orders", r.Points).AtEnd(),
		show.None("orders whose points were booked twice", r.EarnedTwice),
		show.Equal("orders that the sales count", r.SoldOrders, "completed orders", r.Completed).AtEnd(),
		show.Equal("cents that the sales count", r.SoldCents, "cents of completed orders", r.Cents).AtEnd(),
		show.Equal("notifications", r.Notifications, "states of orders", states).AtEnd(),
		show.Equal("different ones among them", r.DistinctOne, "states of orders", states).AtEnd(),
		show.Equal("mails that customers got", r.mails, "states of orders", states).AtEnd(),
		show.Equal("different events in Kafka", r.events, "events recorded", r.Recorded).AtEnd(),
		show.Equal("notes of handled events", r.Handled, "events that somebody handles", r.Owed).AtEnd(),
		show.None("events that nobody could handle", r.Unhandled).AtEnd(),
	}
	if !r.debezium {
		all = append(all, show.Equal("records with their event's id as event-id", r.named, "records", r.records))
	}
	if r.asked > 0 {
		all = append(all, show.Equal("orders", r.Orders, "orders asked for", r.asked))
	}
	return all
}

// print prints the report. The error is show.ErrWrong or show.ErrUnfinished unless all is right.
func (r *report) print(out io.Writer) error {
	fmt.Fprintf(out, "\n  %d orders: %d completed, %d cancelled because stock was short, %d cancelled by the customer (%d reservations released)\n",
		r.Orders, r.Completed, r.Cancelled-r.ByCustomer, r.ByCustomer, r.Released)
	if len(r.killed) > 0 {
		fmt.Fprintf(out, "  killed: %s\n", strings.Join(r.killed, ", "))
	}
	fmt.Fprintf(out, "  %d records in Kafka are repeats; %d mails were asked for again\n", r.records-r.events, r.repeatedMails)
	if r.example != uuid.Nil {
		fmt.Fprintf(out, "\n  Order %s, as the outbox tells it:\n\n", r.example)
		printHistory(out, r.history)
	}
	fmt.Fprintln(out)
	return r.equations().Conclude(out, r.finished, "Every order has ended, and all services agree how.")
}
