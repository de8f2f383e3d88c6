package main

import (
	"context"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/show"
)

// report compares what the outside has seen with what PostgreSQL says.
type report struct {
	tables
	orders, again   int // at the exchange, and identifiers that it was asked for more than once
	pushed, repeats int // events at the push service, and those that came more than once
	whileStopped    int // orders asked for while the kill switch was on
	waiting         int // commands that waited then
	kills           int
	unexpected      []deadCommand
	finished        bool
}

// tables is what PostgreSQL says.
type tables struct {
	Signals, Intents, Concluded                                 int
	Expired                                                     int // intents whose commands were dropped
	Attempts, Acked, Rejected, NotPlaced, Throttled             int
	Unsent                                                      int // attempts that had expired before they were sent
	Matched                                                     int // orders at the exchange that are ACKED under their identifier
	Overtook                                                    int // orders that were taken before an earlier one of their strategy in the market
	Dead, Open                                                  int // deliveries; dead ones of other groups than notification
	Accepted, Overdue                                           int // events
	InTime                                                      int // attempts whose event OrderOverdue was cancelled
	Delayed                                                     int // events that wait until they are due
	Logged, CutOff                                              int // notifications, and those without pushed_at that have not arrived
	Backtests, BacktestsDone, BacktestEvents, BacktestsRestarts int
}

// sqlReport gets the identifiers of the orders, in the order in which the exchange took them,
// the ids of the events that were pushed, and the group whose dead deliveries are pushes that failed.
const sqlReport = `
WITH taken AS (
    SELECT a.state, i.signal_id, s.strategy_key, s.market, t.place
      FROM unnest($1::text[]) WITH ORDINALITY AS t (identifier, place)
      JOIN order_attempt AS a USING (identifier)
      JOIN order_intent AS i ON i.id = a.order_intent_id
      JOIN signal AS s ON s.id = i.signal_id),
     sequence AS (
    SELECT place, lag(place) OVER (PARTITION BY strategy_key, market ORDER BY signal_id) AS earlier FROM taken)
SELECT (SELECT count(*) FROM signal) AS signals,
       (SELECT count(*) FROM order_intent) AS intents,
       (SELECT count(DISTINCT order_intent_id) FROM order_attempt WHERE state IN (` + concluded + `)) AS concluded,
       (SELECT count(*) FROM order_intent AS i WHERE ` + hasExpired + `) AS expired,
       a.*,
       (SELECT count(*) FROM taken WHERE state = 'ACKED') AS matched,
       (SELECT count(*) FROM sequence WHERE place < earlier) AS overtook,
       (SELECT count(*) FROM event_delivery WHERE status = 'DEAD' AND consumer_group <> $3) AS dead,
       (SELECT count(*) FROM event_delivery WHERE status NOT IN ('DONE', 'DEAD')) AS open,
       (SELECT count(*) FROM outbox WHERE event_type = 'OrderAccepted.v1') AS accepted,
       (SELECT count(*) FROM outbox WHERE event_type = 'OrderOverdue.v1') AS overdue,
       (SELECT count(*) FROM outbox_delayed) AS delayed,
       n.*,
       b.*,
       (SELECT count(*) FROM outbox WHERE event_type = 'BacktestCompleted.v1') AS backtest_events
  FROM (SELECT count(*) AS attempts,
               count(*) FILTER (WHERE state = 'ACKED') AS acked,
               count(*) FILTER (WHERE state = 'REJECTED') AS rejected,
               count(*) FILTER (WHERE state = 'NOT_PLACED') AS not_placed,
               count(*) FILTER (WHERE state = 'THROTTLED') AS throttled,
               count(*) FILTER (WHERE state = 'EXPIRED') AS unsent,
               count(*) FILTER (WHERE answered_in_time) AS in_time
          FROM order_attempt) AS a,
       (SELECT count(*) AS logged,
               count(*) FILTER (WHERE pushed_at IS NULL AND event_id <> ALL($2::uuid[])) AS cut_off
          FROM notification_log) AS n,
       (SELECT count(*) AS backtests,
               count(result) AS backtests_done,
               coalesce(sum(greatest(starts - 1, 0)), 0)::bigint AS backtests_restarts
          FROM backtest) AS b`

// deadCommand is a delivery that is DEAD although the exchange has not rejected the order.
type deadCommand struct {
	ID       int64 // by which "outbox" shows, requeues and resolves it
	Group    string
	About    string // the intent, or another aggregate
	State    string // of the last attempt, if there is one
	Attempts int    // deliveries
	Code     string
	Message  string
}

// sqlUnexpected gets the group whose dead deliveries are pushes that failed.
const sqlUnexpected = `
SELECT d.id, d.consumer_group AS "group", d.aggregate_id AS about, coalesce(a.state, 'no attempt') AS state,
       d.attempt_count AS attempts, coalesce(d.last_error_code, '') AS code, coalesce(d.last_error_message, '') AS message
  FROM event_delivery AS d
  LEFT JOIN LATERAL (SELECT state FROM order_attempt WHERE order_intent_id::text = d.aggregate_id ORDER BY attempt_no DESC LIMIT 1) AS a ON true
 WHERE d.status = 'DEAD' AND d.consumer_group <> $1 AND a.state IS DISTINCT FROM 'REJECTED'
 ORDER BY d.id`

// report is made when nothing is under way any more.
func (s *scene) report(ctx context.Context) (*report, error) {
	r := &report{finished: s.finished, whileStopped: s.whileStopped, waiting: s.waiting, kills: s.kills}
	orders := s.outside.Orders()
	events, repeats := s.outside.Pushed()
	_, r.again = s.outside.Asked()
	r.orders, r.pushed, r.repeats = len(orders), len(events), repeats
	rows, _ := s.app.db.Query(ctx, sqlReport, orders, events, notifications) // its error is that of CollectExactlyOneRow
	var err error
	if r.tables, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[tables]); err != nil {
		return nil, fmt.Errorf("read the tables: %w", err)
	}
	rows, _ = s.app.db.Query(ctx, sqlUnexpected, notifications) // its error is that of CollectRows
	if r.unexpected, err = pgx.CollectRows(rows, pgx.RowToStructByName[deadCommand]); err != nil {
		return nil, fmt.Errorf("read the dead commands: %w", err)
	}
	return r, nil
}

func (r *report) equations() show.Equations {
	all := show.Equations{
		show.Equal("intents", r.Intents, "signals", r.Signals),
		show.Equal("intents with an outcome, and expired ones", r.Concluded+r.Expired, "intents", r.Intents).AtEnd(),
		show.Equal("orders at the exchange", r.orders, "attempts ACKED", r.Acked).AtEnd(),
		show.Equal("of them under the same identifier", r.Matched, "attempts ACKED", r.Acked).AtEnd(),
		show.Equal("attempts with an outcome", r.Acked+r.Rejected+r.NotPlaced+r.Throttled+r.Unsent, "attempts", r.Attempts).AtEnd(),
		show.None("identifiers ordered twice", r.again),
		show.None("orders that overtook another", r.Overtook),
		show.None("orders while the kill switch was on", r.whileStopped),
		show.Equal("dead commands", r.Dead, "attempts REJECTED", r.Rejected).AtEnd(),
		show.None("open deliveries", r.Open).AtEnd(),
		show.Equal("events OrderAccepted", r.Accepted, "attempts ACKED", r.Acked),
		show.Equal("answers in time, and events OrderOverdue", r.InTime+r.Overdue, "attempts that were sent", r.Attempts-r.Unsent).AtEnd(),
		show.None("events that are still delayed", r.Delayed).AtEnd(),
		show.Equal("notifications logged", r.Logged, "events OrderAccepted, OrderOverdue", r.Accepted+r.Overdue).AtEnd(),
		show.Equal("pushes, and those cut off", r.pushed+r.CutOff, "notifications logged", r.Logged).AtEnd(),
		show.None("pushes twice", r.repeats),
		show.Equal("backtests done", r.BacktestsDone, "backtests", r.Backtests).AtEnd(),
		show.Equal("events BacktestCompleted", r.BacktestEvents, "backtests", r.Backtests).AtEnd(),
	}
	if r.kills == 0 {
		all = append(all, show.Equal("backtests begun again", r.BacktestsRestarts, "none, as nothing was killed", 0))
	}
	return all
}

func printHeader(out io.Writer, cfg config) {
	fmt.Fprintf(out, `
Bots, an exchange that fails, and four groups of workers on PostgreSQL alone

  PostgreSQL  schema %s, of this run
  exchange    %s, with the push service
  workers     %d processes
  seed        %d
`, cfg.schema, cfg.exchange, cfg.processes, cfg.seed)
}

func (r *report) print(out io.Writer) error {
	fmt.Fprintf(out, "\n  attempts: %d ACKED, %d REJECTED, %d THROTTLED and made again, %d NOT_PLACED, %d EXPIRED\n", r.Acked, r.Rejected, r.Throttled, r.NotPlaced, r.Unsent)
	fmt.Fprintf(out, "  %d attempts had an answer within %v; the owners of %d others were told that the exchange is late\n", r.InTime, orderOverdue, r.Overdue)
	fmt.Fprintf(out, "  %d processes killed; %d backtests begun again, %d pushes cut off\n", r.kills, r.BacktestsRestarts, r.CutOff)
	fmt.Fprintf(out, "  %d commands waited while the kill switch was on; %d have expired and were not sent to the exchange\n\n", r.waiting, r.Expired)
	err := r.equations().Conclude(out, r.finished, "Every order is at the exchange once or not at all, and PostgreSQL knows which.")
	for _, d := range r.unexpected {
		fmt.Fprintf(out, "\n  delivery %d of %s, about %s (%s), is DEAD after %d attempts: %s: %s\n", d.ID, d.Group, d.About, d.State, d.Attempts, d.Code, d.Message)
	}
	return err
}
