package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox"
)

// work is what the groups have done, by action.
type work struct {
	done, repeated map[string]int
	deadLetters    int
}

// tally counts work. It is safe for concurrent use.
type tally struct {
	mu sync.Mutex
	work
}

func newTally() *tally { return &tally{work: work{done: map[string]int{}, repeated: map[string]int{}}} }

func (t *tally) hooks() outbox.ConsumerHooks {
	return outbox.ConsumerHooks{
		Handled:      func(_ outbox.Metadata, action string, _ time.Duration) { t.note(func() { t.done[action]++ }) },
		Repeated:     func(_ outbox.Metadata, action string) { t.note(func() { t.repeated[action]++ }) },
		DeadLettered: func(outbox.Metadata, string, string, error) { t.note(func() { t.deadLetters++ }) },
	}
}

func (t *tally) note(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
}

func (t *tally) look() work {
	t.mu.Lock()
	defer t.mu.Unlock()
	return work{maps.Clone(t.done), maps.Clone(t.repeated), t.deadLetters}
}

// report compares what has committed with what the groups made of it.
type report struct {
	products []product
	work
	expected int // how many events the groups are to get
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

func (r *report) right() bool {
	for _, p := range r.products {
		if !p.right() {
			return false
		}
	}
	return r.deadLetters == 0
}

// arrived is how many events the groups have got.
func (r *report) arrived() (n int) {
	for _, counts := range []map[string]int{r.done, r.repeated} {
		for _, count := range counts {
			n += count
		}
	}
	return n + r.deadLetters
}

// await waits until the groups have got every event from each relay and all is
// right, or until nothing has arrived for as long as patience lasts.
func (a *app) await(ctx context.Context, relays int, patience time.Duration) (*report, error) {
	arrived, progress := -1, time.Now()
	for {
		r, err := a.report(ctx, relays)
		if err != nil {
			return nil, err
		}
		if n := r.arrived(); n > arrived {
			arrived, progress = n, time.Now()
		}
		if arrived >= r.expected && r.right() || time.Since(progress) > patience {
			return r, nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

const (
	sqlProductReport = `
SELECT p.id, p.stock <= 0 AS sold_out,
       (SELECT count(*) FROM likes WHERE product_id = p.id) AS liked,
       (SELECT coalesce(sum(quantity), 0)::bigint FROM order_items JOIN orders ON id = order_id
         WHERE paid AND product_id = p.id) AS sold,
       (SELECT count(*) FROM outbox WHERE event_type = $1 AND aggregate_id = p.id::text) AS viewed,
       coalesce(like_count, 0) AS likes, coalesce(sales_count, 0) AS sales, coalesce(view_count, 0) AS views
  FROM products p LEFT JOIN product_statistic ON product_id = p.id
 ORDER BY p.id`

	sqlHandledEvents = `SELECT count(*) FROM outbox WHERE event_type = ANY($1)`
)

// report looks at the work first: when that is complete, so is what it wrote.
func (a *app) report(ctx context.Context, relays int) (*report, error) {
	r := &report{work: a.tally.look()}
	handled := []string{orderPaid, likeCreated, likeCanceled, productViewed, stockDepleted}
	if err := a.db.QueryRow(ctx, sqlHandledEvents, handled).Scan(&r.expected); err != nil {
		return nil, fmt.Errorf("count events: %w", err)
	}
	r.expected *= relays
	rows, _ := a.db.Query(ctx, sqlProductReport, productViewed) // CollectRows returns its error
	var err error
	if r.products, err = pgx.CollectRows(rows, pgx.RowToStructByNameLax[product]); err != nil {
		return nil, fmt.Errorf("read statistics: %w", err)
	}
	for i := range r.products {
		if r.products[i].cached, err = a.pages.has(ctx, r.products[i].ID); err != nil {
			return nil, fmt.Errorf("look for pages: %w", err)
		}
	}
	return r, nil
}

func printHeader(out io.Writer, schema string, brokers []string, redis string) {
	fmt.Fprintf(out, `
A shop and the consumers of its events

  PostgreSQL  schema %s, of this run
  Kafka       %s
  Redis       %s
`, schema, strings.Join(brokers, ", "), redis)
}

func (r *report) print(out io.Writer) {
	r.printProducts(out)
	r.printWork(out)
	if r.right() {
		fmt.Fprintln(out, "\nEverything is counted once, and the pages of what is sold out are gone.")
	} else {
		fmt.Fprintln(out, "\nWhat was counted is not what committed.")
	}
}

func (r *report) printProducts(out io.Writer) {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\nproduct\tliked\tcounted\tsold\tcounted\tviewed\tcounted\tpage\t")
	for _, p := range r.products {
		page := map[bool]string{true: "cached", false: "deleted"}[p.cached]
		wrong := map[bool]string{false: "  wrong"}[p.right()]
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
	if r.deadLetters > 0 {
		fmt.Fprintf(out, "\n%d dead letters\n", r.deadLetters)
	}
}
