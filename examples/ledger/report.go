package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/show"
)

// report compares the ledger with what became of its events.
type report struct {
	tables
	sent
	auditor
	asked    int // deposits that customers have asked for; 0 if the counter closed early
	topics   string
	killed   []string
	finished bool
}

// tables is what PostgreSQL says.
type tables struct {
	Transactions, Reversals, Retried int
	Balanced                         int // transactions with two entries or more whose sum is zero
	Total                            int // the sum of all entries
	Accounts, Matching, InUse        int // those whose balance is the sum of their entries; those with transactions
	Versions                         int // of all balances, added up
	Events, EventsOnce               int // in outbox and archive; transactions that have exactly one
	Archived                         int
	Viewed                           int // accounts that the read model shows as they are
	Waited                           int // events that had to wait for the one in front of them
	Unhandled                        int // events whose handler has not succeeded
}

const sqlReport = `
WITH event AS (
    SELECT aggregate_id FROM outbox
    UNION ALL
    SELECT aggregate_id FROM outbox_archive),
     counted AS (
    SELECT t.id, count(e.aggregate_id) AS events
      FROM ledger_transaction AS t
      LEFT JOIN event AS e ON e.aggregate_id = t.id::text
     GROUP BY t.id),
     journal AS (
    SELECT transaction_id, count(*) AS entries, sum(amount) AS total FROM journal_entry GROUP BY transaction_id),
     account AS (
    SELECT b.account_id, b.amount, b.version, coalesce(sum(e.amount), 0) AS entries
      FROM balance AS b
      LEFT JOIN journal_entry AS e USING (account_id)
     GROUP BY b.account_id)
SELECT (SELECT count(*) FROM ledger_transaction) AS transactions,
       (SELECT count(reverses) FROM ledger_transaction) AS reversals,
       (SELECT coalesce(sum(attempt - 1), 0)::bigint FROM ledger_transaction) AS retried,
       (SELECT count(*) FROM journal WHERE entries >= 2 AND total = 0) AS balanced,
       (SELECT coalesce(sum(amount), 0)::bigint FROM journal_entry) AS total,
       (SELECT count(*) FROM account) AS accounts,
       (SELECT count(*) FROM account WHERE amount = entries) AS matching,
       (SELECT count(*) FROM account WHERE version > 0) AS in_use,
       (SELECT coalesce(sum(version), 0)::bigint FROM account) AS versions,
       (SELECT count(*) FROM event) AS events,
       (SELECT count(*) FROM counted WHERE events = 1) AS events_once,
       (SELECT count(*) FROM outbox_archive) AS archived,
       (SELECT count(*) FROM account JOIN portfolio_view AS v USING (account_id)
         WHERE v.balance = amount AND v.sequence = version) AS viewed,
       (SELECT count(*) FROM event_delivery WHERE last_error_code IS NOT NULL) AS waited,
       (SELECT count(*) FROM event_delivery WHERE status <> 'DONE') AS unhandled`

// report is made when nothing is under way any more.
func (p *performance) report(ctx context.Context) (*report, error) {
	r := &report{finished: p.finished, killed: p.others.Killed(), topics: p.cfg.topics, asked: p.cfg.deposits}
	if p.closed {
		r.asked = 0
	}
	rows, _ := p.db.Query(ctx, sqlReport) // its error is that of CollectExactlyOneRow
	var err error
	if r.tables, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[tables]); err != nil {
		return nil, fmt.Errorf("read the tables: %w", err)
	}
	if r.sent, err = p.readKafka(ctx); err != nil {
		return nil, err
	}
	return r, r.read(ctx, p.db)
}

func (r *report) equations() show.Equations {
	all := show.Equations{
		show.Equal("transactions whose entries balance", r.Balanced, "transactions", r.Transactions),
		show.None("cents in the sum of all entries", r.Total),
		show.Equal("balances that are the sum of their entries", r.Matching, "accounts", r.Accounts),
		show.Equal("versions of the balances, added up", r.Versions, "transactions", r.Transactions),
		show.Equal("transactions with exactly one event", r.EventsOnce, "transactions", r.Transactions),
		show.Equal("events in outbox and archive", r.Events, "transactions", r.Transactions).AtEnd(),
		show.Equal("different events in Kafka", r.events, "transactions", r.Transactions).AtEnd(),
		show.Equal("rows of the audit feed", r.rows, "transactions", r.Transactions).AtEnd(),
		show.None("gaps in the sequence of an account", r.gaps()).AtEnd(),
		show.None("repeats in the feed", r.repeats),
		show.None("late events in the feed", r.late),
		show.None("balances in the feed that do not follow", r.wrongBalance),
		show.None("transactions in the feed that do not balance", r.unbalanced),
		show.Equal("portfolios that show the balance", r.Viewed, "accounts in use", r.InUse).AtEnd(),
		show.None("events that nobody could handle", r.Unhandled).AtEnd(),
	}
	if r.topics == "one" {
		all = append(all, show.None("events that came before an earlier one", r.Waited))
	}
	if r.asked > 0 {
		all = append(all, show.Equal("deposits", r.Transactions-r.Reversals, "deposits asked for", r.asked))
	}
	return all
}

// print prints the report. The error is show.ErrWrong or show.ErrUnfinished unless all is right.
func (r *report) print(out io.Writer) error {
	fmt.Fprintf(out, "\n  %d deposits, %d reversals; %d attempts were rolled back because another transaction was faster\n",
		r.Transactions-r.Reversals, r.Reversals, r.Retried)
	if len(r.killed) > 0 {
		fmt.Fprintf(out, "  killed: %s\n", strings.Join(r.killed, ", "))
	}
	fmt.Fprintf(out, "  %d records in Kafka are repeats; %d events waited for an earlier one; %d are in the archive\n\n",
		r.records-r.events, r.Waited, r.Archived)
	return r.equations().Conclude(out, r.finished, "The books balance, and everybody knows the same of them.")
}
