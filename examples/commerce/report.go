package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/show"
)

// report compares what the customers were told, what has committed, and what the groups made
// of it.
type report struct {
	products []product
	committed
	work
	kills int

	finished bool // all was read before the service was stopped

	begun, cutOff         int // visits
	views, ordered, bills int // what was answered: views, orders, and orders that were paid
}

// product is a line of the report.
type product struct {
	ID                  int64
	Liked, Sold, Viewed int  // what has committed
	SoldOut             bool // so that its page is to go
	Likes, Sales, Views int  // what was counted
	cached              bool
}

func (p product) right() bool {
	return p.Likes == p.Liked && p.Sales == p.Sold && p.Views == p.Viewed && p.cached != p.SoldOut
}

// committed is what of the answers is in the database.
type committed struct {
	Orders, Paid   int // of those that were answered
	Viewed         int // by visits
	Events, Traced int // all events, and those with the trace id of a visit
	Others         int // those with the trace id of a request that is not of a visit
}

const (
	sqlProductReport = `
SELECT p.id, p.stock <= 0 AS sold_out,
       (SELECT count(*) FROM likes WHERE product_id = p.id) AS liked,
       (SELECT coalesce(sum(quantity), 0)::bigint FROM order_items JOIN orders ON id = order_id
         WHERE state = 'paid' AND product_id = p.id) AS sold,
       (SELECT count(*) FROM outbox WHERE event_type = $1 AND aggregate_id = p.id::text) AS viewed,
       coalesce(like_count, 0) AS likes, coalesce(sales_count, 0) AS sales, coalesce(view_count, 0) AS views
  FROM products p LEFT JOIN product_statistic ON product_id = p.id
 ORDER BY p.id`

	sqlCommitted = `
SELECT (SELECT count(*) FROM orders WHERE id = ANY ($1)) AS orders,
       (SELECT count(*) FROM orders WHERE id = ANY ($2) AND state = 'paid') AS paid,
       count(*) FILTER (WHERE event_type = $3 AND headers->>'correlationid' LIKE 'visit-%') AS viewed,
       count(*) AS events,
       count(*) FILTER (WHERE headers->>'correlationid' LIKE 'visit-%') AS traced,
       count(*) FILTER (WHERE headers->>'correlationid' NOT LIKE 'visit-%') AS others
  FROM outbox`
)

func (s *scene) report(ctx context.Context) (*report, error) {
	r := &report{finished: s.finished}
	s.note(func() {
		r.work = work{maps.Clone(s.done), maps.Clone(s.repeated), s.deadLetters, slices.Clone(s.delays), s.calm}
		r.kills = s.kills
	})
	var ordered, paid []int64
	s.street.note(func() {
		ordered, paid = slices.Clone(s.street.ordered), slices.Clone(s.street.paid)
		r.begun, r.cutOff, r.views, r.ordered, r.bills = s.street.begun, s.street.cutOff, s.street.views, len(ordered), len(paid)
	})
	rows, _ := s.db.Query(ctx, sqlCommitted, ordered, paid, productViewed) // CollectExactlyOneRow returns its error
	var err error
	if r.committed, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[committed]); err != nil {
		return nil, fmt.Errorf("count what committed: %w", err)
	}
	rows, _ = s.db.Query(ctx, sqlProductReport, productViewed) // CollectRows returns its error
	if r.products, err = pgx.CollectRows(rows, pgx.RowToStructByNameLax[product]); err != nil {
		return nil, fmt.Errorf("read statistics: %w", err)
	}
	for i, p := range r.products {
		page, err := s.pages.get(ctx, p.ID)
		if err != nil {
			return nil, fmt.Errorf("look for pages: %w", err)
		}
		r.products[i].cached = page != ""
	}
	return r, nil
}

func (r *report) equations() show.Equations {
	rightProducts := 0
	for _, p := range r.products {
		if p.right() {
			rightProducts++
		}
	}
	return show.Equations{
		show.Equal("products that are counted rightly", rightProducts, "products", len(r.products)).AtEnd(),
		show.Equal("answered orders that are committed", r.Orders, "answered orders", r.ordered),
		show.Equal("answered payments that are committed", r.Paid, "answered payments", r.bills),
		show.None("answered views that are not committed", max(0, r.views-r.Viewed)),
		show.Equal("events with the trace id of a visit", r.Traced, "events of visits", r.Events-r.Others),
		show.None("dead letters", r.deadLetters),
	}
}

// right reports whether all adds up. A run without visitors shows nothing.
func (r *report) right() bool { return r.Traced > 0 && r.equations().Right() }

func printHeader(out io.Writer, cfg config, redis string) {
	fmt.Fprintf(out, `
A shop and the consumers of its events

  PostgreSQL  schema %s, of this run
  Kafka       %s
  Redis       %s
  shop        http://%[4]s, %[5]d customers per second for %[6]v
  operators   http://%[4]s%[7]s/, as operator with the password %[8]s
  metrics     http://%[4]s/metrics
`, cfg.schema, strings.Join(cfg.Brokers, ", "), redis, cfg.listen, cfg.rate, cfg.duration, operatorsPath, cfg.password)
}

func (r *report) print(out io.Writer) error {
	r.printProducts(out)
	r.printWork(out)
	fmt.Fprintf(out, "\n  %d visits, of which %d found the shop closed or full; the service was killed %d times\n", r.begun, r.cutOff, r.kills)
	if r.Others > 0 {
		fmt.Fprintf(out, "  %d events of others, which the tables count as well\n", r.Others)
	}
	r.printDelays(out)
	fmt.Fprintln(out)
	if r.Traced == 0 {
		return show.Nothing(out)
	}
	return r.equations().Conclude(out, r.finished, "Everything is counted once, and the pages of what is sold out are gone.")
}

func (r *report) printProducts(out io.Writer) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\nproduct\tliked\tcounted\tsold\tcounted\tviewed\tcounted\tpage\t")
	for _, p := range r.products {
		page := map[bool]string{true: "cached", false: "deleted"}[p.cached]
		wrong := ""
		if !p.right() {
			wrong = "  " + map[bool]string{true: show.Wrong, false: show.Unfinished}[r.finished]
		}
		fmt.Fprintf(t, "%d\t%d\t%d\t%d\t%d\t%d\t%d\t%s\t%s\n", p.ID, p.Liked, p.Likes, p.Sold, p.Sales, p.Viewed, p.Views, page, wrong)
	}
	_ = t.Flush() // who closed the pipe is still told by the exit code
}

func (r *report) printWork(out io.Writer) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\naction\tdone\tskipped as repeats\t")
	for _, action := range []string{salesCounted, viewsCounted} {
		fmt.Fprintf(t, "%s\t%d\t%d\t\n", action, r.done[action], r.repeated[action])
	}
	for _, action := range []string{likeCounted, likeTakenOff, pageDeleted} { // a repeat is done and changes nothing
		fmt.Fprintf(t, "%s\t%d\t-\t\n", action, r.done[action])
	}
	_ = t.Flush()
}

// printDelays prints how long it took from a request until it was counted.
func (r *report) printDelays(out io.Writer) {
	if r.kills > 0 {
		fmt.Fprintf(out, "  from request to statistic: %s before the kill, %s in all\n", percentiles(r.delays[:r.calm]), percentiles(r.delays))
		return
	}
	fmt.Fprintf(out, "  from request to statistic: %s\n", percentiles(r.delays))
}

func percentiles(delays []time.Duration) string {
	if len(delays) == 0 {
		return "nothing"
	}
	sorted := slices.Sorted(slices.Values(delays))
	at := func(share float64) time.Duration {
		return sorted[int(math.Ceil(share*float64(len(sorted))))-1].Round(100 * time.Microsecond)
	}
	return fmt.Sprintf("p50 %v, p99 %v", at(0.5), at(0.99))
}
