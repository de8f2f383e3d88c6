package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/outage"
	"github.com/outboxgo/outbox/internal/pg"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

// Severities of findings, the worst first.
const (
	severityError   = "error"   // something does not work
	severityWarning = "warning" // it works, and will not for long, or not as it should
	severityNote    = "note"    // worth knowing; no problem by itself
)

// finding is something that is not as it should be.
type finding struct {
	ID       string `json:"id"`
	Severity string `json:"severity"`
	What     string `json:"what"`
	Means    string `json:"means"`
	Do       string `json:"do"`
}

// areProblems reports whether there is more than notes.
func areProblems(all []finding) bool {
	for _, f := range all {
		if f.Severity != severityNote {
			return true
		}
	}
	return false
}

// limits are the thresholds of findings.
type limits struct {
	maxAge  time.Duration // of an event that waits
	openFor time.Duration // of a transaction
}

const (
	defaultMaxAge  = 5 * time.Minute
	defaultOpenFor = time.Minute
)

// relayFindings returns the problems of relays.
func relayFindings(relays []outbox.RelayStatus, now time.Time, l limits) (all []finding) {
	for _, r := range relays {
		if r.Holder == "" {
			unknown := ""
			if !r.LeaseUntil.IsZero() {
				unknown = ", its state is unknown" + outage.SinceText(r.LeaseUntil, now)
			}
			all = append(all, finding{"relay.leader", severityError, fmt.Sprintf("relay %s: no process leads%s", r.Name, unknown),
				"No process runs this relay, or none can take its lease: its events are not sent.",
				"Start a process that calls Relay.Run with this name, or read its log. If the relay is not used any more, delete its rows from outbox_cursor and outbox_lease: until then retention keeps all that it has not published."})
		}
		all = append(all, saidFindings(r, now, l)...)
		all = append(all, failedFindings(r)...)
	}
	return all
}

// staleFindings returns the relays and consumer groups whose events wait for too long, in any table.
func staleFindings(counts []outbox.EventCount, now time.Time, l limits) (all []finding) {
	of := map[[2]string][]outbox.EventCount{}
	for _, c := range counts {
		owner := [2]string{c.Relay, c.Group}
		of[owner] = append(of[owner], c)
	}
	owners := slices.Collect(maps.Keys(of))
	slices.SortFunc(owners, func(a, b [2]string) int { return slices.Compare(a[:], b[:]) })
	for _, owner := range owners {
		if owner[0] != "" {
			all = append(all, finding{"relay.backlog", severityWarning, "relay " + owner[0] + ": " + staleText(of[owner], now, l),
				"Events arrive late. Kafka, a topic or a partition may be away or slow, the relay stopped, or more is recorded than is sent; parked events wait behind another of their key. A transaction that was open for long makes its events old at its commit.",
				"Look at the log of the leader and at Kafka; outbox failures list --kind event shows those that were tried, outbox status --watch whether it shrinks."})
			continue
		}
		all = append(all, finding{"delivery.stale", severityWarning, "group " + owner[1] + ": " + staleText(of[owner], now, l),
			"Events are handled late: workers do not run or are slow, the group is paused, or a handler fails and the later events of its keys wait behind.",
			"outbox consumers shows what is owed, and to whom; outbox failures list --kind delivery shows what has failed."})
	}
	return all
}

// staleText says how much waits for too long, and in which status.
func staleText(counts []outbox.EventCount, now time.Time, l limits) string {
	all, oldest, by := tally{}, now, map[string]tally{}
	for _, c := range counts {
		n := short.TallyOf(c.Events, c.More)
		all, by[c.Status] = all.Plus(n), by[c.Status].Plus(n)
		if c.Oldest.Before(oldest) {
			oldest = c.Oldest
		}
	}
	var parts []string
	for _, status := range []string{"pending", outbox.StatusWaiting, outbox.StatusFailed, outbox.StatusParked} {
		if by[status].N > 0 {
			parts = append(parts, by[status].String()+" "+status)
		}
	}
	return fmt.Sprintf("%s waited for longer than %s, the oldest for %s: %s", all.Of("event has", "events have"), length(l.maxAge), age(oldest, now), strings.Join(parts, ", "))
}

// failedFindings returns findings about events that did not reach Kafka.
func failedFindings(r outbox.RelayStatus) (all []finding) {
	if r.Dead > 0 {
		all = append(all, finding{"failed.dead", severityWarning, fmt.Sprintf("relay %s: %s dead", r.Name, upTo(r.Dead).Of("event is", "events are")),
			"Kafka refused them until their retries were used up. Consumers will not see them unless they are retried.",
			"outbox failures list --kind event --status dead shows why. Mend the cause, then outbox failures retry, or outbox failures resolve."})
	}
	if r.HeldKeys > 0 {
		all = append(all, finding{"failed.held", severityWarning, fmt.Sprintf("relay %s: %s held", r.Name, keysAre(upTo(r.HeldKeys))),
			"They wait for an operator, and so do all later events of these keys.",
			"outbox failures list --kind event shows them; outbox failures retry, resolve or release lets them go on."})
	}
	if waiting := short.TallyOf(r.ParkedKeys-r.HeldKeys, upTo(r.ParkedKeys).More); waiting.N > 0 {
		all = append(all, finding{"failed.parked", severityWarning, fmt.Sprintf("relay %s: %s parked", r.Name, keysAre(waiting)),
			"An event of each was refused or cannot be sent now, and the later ones of its key wait behind it. The relay retries by itself.",
			"outbox failures list --kind event --status failed,waiting shows why."})
	}
	return all
}

func keysAre(n tally) string { return n.Of("key is", "keys are") }

// transactionFindings are transactions that have been open for long.
func transactionFindings(open []outboxops.OpenTransaction, now time.Time) (all []finding) {
	for _, t := range open {
		f := finding{"transaction.open", severityWarning, fmt.Sprintf("process %d, %s of %s, has a transaction open for %s (%s)", t.PID, orNameless(t.Application), t.User, age(t.Since, now), t.State),
			"It delays no other events. While it is open PostgreSQL cleans up nothing that it might see: tables and indexes grow, and polls become slower.",
			fmt.Sprintf("Find out what it waits for. SELECT pg_terminate_backend(%d) ends it and rolls it back.", t.PID)}
		if t.Prepared != "" {
			f.ID = "transaction.prepared"
			f.What = fmt.Sprintf("transaction %q of %s has been prepared for %s", t.Prepared, t.User, age(t.Since, now))
			f.Do = fmt.Sprintf("Ask its transaction manager. COMMIT PREPARED '%s' or ROLLBACK PREPARED '%s' ends it, in database %s.", t.Prepared, t.Prepared, t.Database)
		}
		if t.Recording {
			f.Means = "It has recorded events, which wait for its commit. " + f.Means
		}
		all = append(all, f)
	}
	return all
}

func orNameless(application string) string {
	if application == "" {
		return "nameless"
	}
	return application
}

// snapshot is the state of relays and transactions, the events that wait too long, and the problems.
type snapshot struct {
	relays   []outbox.RelayStatus
	open     []outboxops.OpenTransaction
	stale    []outbox.EventCount // events that wait for too long
	groups   groupsState
	now      time.Time // the database's
	findings []finding
}

// look reads a snapshot from the database.
func look(ctx context.Context, e *env, l limits) (s snapshot, err error) {
	inspector, err := e.inspector(ctx)
	if err != nil {
		return s, err
	}
	if err := pg.QueryRow(ctx, e.db, pg.SQLNow).Scan(&s.now); err != nil {
		return s, err
	}
	if s.relays, err = inspector.Relays(ctx); err != nil {
		return s, err
	}
	if s.open, err = inspector.Transactions(ctx, l.openFor); err != nil {
		return s, err
	}
	if s.stale, err = inspector.Stale(ctx, l.maxAge); err != nil {
		return s, err
	}
	if s.groups, err = lookAtGroups(ctx, e, ""); err != nil {
		return s, err
	}
	s.findings = slices.Concat(relayFindings(s.relays, s.now, l), s.groups.findings(s.now, l, e.schemaName()), staleFindings(s.stale, s.now, l), transactionFindings(s.open, s.now))
	return s, nil
}
