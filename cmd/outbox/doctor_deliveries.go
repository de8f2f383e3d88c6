package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/internal/wait"
	"github.com/outboxgo/outbox/outboxops"
)

// deliveries checks the deliveries of workers.
func (d *doctor) deliveries(ctx context.Context) error {
	deliveries, err := d.e.deliveries(ctx)
	if err != nil {
		return err
	}
	counts, err := deliveries.Count(ctx, outboxops.DeliveryFilter{})
	if err != nil {
		return err
	}
	groups, err := deliveries.Groups(ctx)
	if err != nil {
		return err
	}
	at, err := workersAt(ctx, d.e.db, d.e.schemaName())
	if err != nil {
		return err
	}
	d.findings = append(d.findings, deliveryFindings(counts, at, d.limits)...)
	d.findings = append(d.findings, groupFindings(groups, at, d.limits, d.e.schemaName())...)
	if err := d.missingHandlers(ctx, counts, at.now); err != nil {
		return err
	}
	return d.headless(ctx)
}

// handlerOf is the part of a group that a worker may have handlers for, or not.
type handlerOf struct{ group, stream, action string }

// workers is the state of all workers at a time.
type workers struct {
	now  time.Time          // the database's
	busy map[handlerOf]bool // handlers that are running
	// paused has the pauses of operators. They have no action, and no stream if the whole group is paused.
	paused map[handlerOf]bool
}

const sqlWorkersBusy = `
SELECT DISTINCT consumer_group, stream, action FROM {schema}.event_delivery WHERE status = 'PROCESSING' AND locked_until > clock_timestamp()`

func workersAt(ctx context.Context, db *pgxpool.Pool, schema string) (at workers, err error) {
	if err := pg.QueryRow(ctx, db, pg.SQLNow).Scan(&at.now); err != nil {
		return at, err
	}
	at.busy, at.paused = map[handlerOf]bool{}, map[handlerOf]bool{}
	for sql, into := range map[string]map[handlerOf]bool{
		sqlWorkersBusy: at.busy, `SELECT consumer_group, topic, '' FROM {schema}.consumer_pause`: at.paused,
	} {
		var h handlerOf
		rows, err := db.Query(ctx, pg.InSchema(sql, schema))
		if err == nil {
			_, err = pgx.ForEachRow(rows, []any{&h.group, &h.stream, &h.action}, func() error { into[h] = true; return nil })
		}
		if err != nil {
			return at, err
		}
	}
	return at, nil
}

func (w workers) isPaused(h handlerOf) bool {
	return w.paused[handlerOf{group: h.group}] || w.paused[handlerOf{h.group, h.stream, ""}]
}

// areBusy reports whether a worker of a group is at anything.
func (w workers) areBusy(group string) bool {
	for h := range w.busy {
		if h.group == group {
			return true
		}
	}
	return false
}

// deliveryFindings returns the problems of deliveries.
func deliveryFindings(counts []outboxops.DeliveryCount, at workers, l limits) (all []finding) {
	for _, c := range counts {
		h := handlerOf{c.Group, c.Stream, c.Action}
		switch {
		case c.Status == outboxops.DeliveryProcessing && at.now.Sub(c.Due) > l.maxAge:
			all = append(all, finding{"delivery.stuck", severityError, fmt.Sprintf("group %s: a worker has had a delivery of action %s since its lease ended %s ago", c.Group, c.Action, age(c.Due, at.now)),
				"The worker is gone, and no other one of the group takes over what it had. Its deliveries and the later ones of their keys wait.",
				fmt.Sprintf("Start a process that calls Worker.Run with this group, or read its log. outbox failures list%s --status waiting,failed shows which ones.", flagsOf(h))})
		case c.Status == outboxops.DeliveryPending && at.now.Sub(c.Due) > l.maxAge && !at.isPaused(h):
			all = append(all, overdue(c, h, at))
		}
	}
	return append(all, deadFindings(counts)...)
}

// deadFindings reports the dead deliveries of each group, and the keys that they hold.
func deadFindings(counts []outboxops.DeliveryCount) (all []finding) {
	const named = 5
	dead, held, of := map[string]tally{}, map[string]tally{}, map[string][]string{}
	for _, c := range counts {
		if c.Status == outboxops.DeliveryDead {
			n := short.TallyOf(c.Deliveries, c.More)
			dead[c.Group] = dead[c.Group].Plus(n)
			held[c.Group] = held[c.Group].Plus(heldOf(c))
			of[c.Group] = append(of[c.Group], fmt.Sprintf("%s of action %s, topic %s", n, cmp.Or(c.Action, "(none)"), c.Stream))
		}
	}
	for _, group := range slices.Sorted(maps.Keys(dead)) {
		kinds := of[group]
		if more := len(kinds) - named; more > 0 {
			kinds = append(kinds[:named:named], plural(int64(more), "more kind", "more kinds"))
		}
		all = append(all, finding{"delivery.dead", severityWarning, fmt.Sprintf("group %s: %s dead: %s", group, dead[group].Of("delivery is", "deliveries are"), strings.Join(kinds, "; ")),
			"Their attempts are used up, or their errors are permanent: no handler gets them unless they are requeued.",
			fmt.Sprintf("outbox failures list --kind delivery --group %[1]s --status dead shows why. Mend the cause, then outbox failures retry --group %[1]s, or outbox failures resolve --group %[1]s.", word(group))})
	}
	for _, group := range slices.Sorted(maps.Keys(held)) {
		if held[group].N > 0 {
			all = append(all, finding{"delivery.held", severityWarning, fmt.Sprintf("group %s: %s held by dead deliveries", group, keysAre(held[group])),
				"All later deliveries of these keys wait for an operator.",
				fmt.Sprintf("outbox failures list --kind delivery --group %s --status dead shows them; outbox failures retry, resolve or release lets their keys go on.", word(group))})
		}
	}
	return all
}

// groupFindings are groups that have not come to their events.
func groupFindings(groups []outboxops.DeliveryGroup, at workers, l limits, schema string) (all []finding) {
	for _, g := range groups {
		if g.State != outboxops.SubscriptionActive || g.Pending == 0 || at.now.Sub(g.Oldest) <= l.maxAge {
			continue
		}
		what := fmt.Sprintf("group %s: %s no deliveries yet, the oldest is %s old", g.Group, eventsHave(g), age(g.Oldest, at.now))
		if at.areBusy(g.Group) {
			all = append(all, finding{"delivery.backlog", severityWarning, what, lateMeans, lateDo})
			continue
		}
		all = append(all, finding{"delivery.worker", severityError, what, "No worker of the group runs, or none gets on: its events are not handled.",
			fmt.Sprintf("Start a process that calls Worker.Run with this group, or read its log. If the group is given up for good, delete its rows, until which retention keeps all that it has not got: "+
				"DELETE FROM %[1]s.event_subscription WHERE consumer_group = %[2]s; DELETE FROM %[1]s.outbox_cursor WHERE relay = %[3]s", pgx.Identifier{schema}.Sanitize(),
				quoteText(g.Group), quoteText(tables.WorkerPrefix+g.Group))})
	}
	return all
}

const (
	lateMeans = "Workers take events, and more come or each takes long: they are handled late. A transaction that was open for long makes its events old at its commit."
	lateDo    = "outbox consumers shows whether it shrinks. Raise HandlerConfig.Concurrency, run more workers, or make the handler quicker."
)

// overdue returns a possible reason why deliveries have not been taken long after they were due.
func overdue(c outboxops.DeliveryCount, h handlerOf, at workers) finding {
	what := fmt.Sprintf("group %s: the first of %s deliveries of stream %s to action %s has been due for %s", c.Group, short.TallyOf(c.Deliveries, c.More), c.Stream,
		cmp.Or(c.Action, "(none)"), age(c.Due, at.now))
	switch {
	case at.busy[h]:
		return finding{"delivery.backlog", severityWarning, what, lateMeans, lateDo}
	case at.areBusy(c.Group):
		return finding{"delivery.unhandled", severityWarning, what, "Workers of the group run, and none takes these: they have no handler with this action, or have paused the stream themselves.",
			"Give the workers the handler again. If it is gone for good: " + resolveWaiting(h)}
	}
	return finding{"delivery.worker", severityError, what, "No worker of the group takes them: none runs, or none has a handler with this action.",
		"Start a process that calls Worker.Run with this group and this handler, or read its log. If the group is given up for good: " + resolveWaiting(h)}
}

// resolveWaiting returns the command that resolves the deliveries that wait for a handler, and no others.
func resolveWaiting(h handlerOf) string {
	return "outbox failures resolve" + flagsOf(h) + " --status waiting,failed,parked (it counts them by group and action, and resolves them with --yes)"
}

// flagsOf returns flags that pick the deliveries for a handler. Without an action they pick those of all actions.
func flagsOf(h handlerOf) string {
	flags := " --kind delivery --group " + word(h.group)
	if h.action != "" {
		flags += " --action " + word(h.action)
	}
	return flags + " --topic " + word(h.stream)
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9._:/@%+-]+$`)

// word returns a text as one word of a shell.
func word(text string) string {
	if plainWord.MatchString(text) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

// sqlHeadless looks at up to $1 keys with parked rows, and reads up to $2 of them. A key is a step in the index,
// however many rows it has.
const sqlHeadless = `
WITH RECURSIVE waiting AS (
   (SELECT order_key, consumer_group, 1 AS n FROM {schema}.event_delivery AS d
     WHERE order_key IS NOT NULL AND status = 'PARKED' ORDER BY order_key, id LIMIT 1)
     UNION ALL
    SELECT next.*, waiting.n + 1 FROM waiting
     CROSS JOIN LATERAL (SELECT d.order_key, d.consumer_group FROM {schema}.event_delivery AS d
                          WHERE d.order_key > waiting.order_key AND d.status = 'PARKED' ORDER BY d.order_key, d.id LIMIT 1) AS next
     WHERE waiting.n < $1
)
SELECT consumer_group, order_key, (SELECT count(*) FROM waiting) >= $1 FROM waiting
 WHERE (SELECT d.id FROM {schema}.event_delivery AS d
         WHERE d.order_key = waiting.order_key AND (d.status IN ('PENDING', 'PROCESSING') OR d.held) AND d.consumer_group = waiting.consumer_group
         ORDER BY d.order_key DESC, d.id DESC LIMIT 1) IS NULL
 ORDER BY consumer_group, order_key LIMIT $2`

const (
	headsLooked = 100_000
	headsRead   = 1_000
	headsPause  = time.Second // a handler's transaction of another isolation level is followed by another one
)

// headless looks for keys whose deliveries are all parked, so that no delivery can start the next one.
func (d *doctor) headless(ctx context.Context) error {
	first, moreBefore, err := headlessKeys(ctx, d.e)
	if err != nil || len(first) == 0 {
		return err
	}
	wait.Sleep(ctx, headsPause)
	second, more, err := headlessKeys(ctx, d.e)
	if err != nil {
		return err
	}
	for _, group := range slices.Sorted(maps.Keys(first)) {
		still := slices.DeleteFunc(first[group], func(key string) bool { return !slices.Contains(second[group], key) })
		if len(still) == 0 {
			continue
		}
		const named = 100 // in the statement
		d.add("delivery.headless", severityError, fmt.Sprintf("group %s: all deliveries of %s are parked", group, short.TallyOf(len(still), more || moreBefore).Of("key", "keys")),
			"Somebody else than outbox has changed or removed the delivery that they waited for. Workers of the group look for such keys now and then.",
			fmt.Sprintf("If no worker runs, start one. At once: SELECT %s.outbox_promote(%s, '{%s}')", pgx.Identifier{d.e.schemaName()}.Sanitize(), quoteText(group),
				strings.Join(still[:min(len(still), named)], ",")))
	}
	return nil
}

// headlessKeys returns the digests of keys whose deliveries are all parked, by group, and whether there may be more.
func headlessKeys(ctx context.Context, e *env) (found map[string][]string, more bool, err error) {
	found = map[string][]string{}
	n := 0
	err = pg.Query(ctx, e.db, pg.PlannerSettings, func(rows pgx.Rows) error {
		var group string
		var key int64
		_, err := pgx.ForEachRow(rows, []any{&group, &key, &more}, func() error {
			n, found[group] = n+1, append(found[group], fmt.Sprint(key))
			return nil
		})
		return err
	}, pg.InSchema(sqlHeadless, e.schemaName()), headsLooked, headsRead)
	return found, more || n == headsRead, err
}
