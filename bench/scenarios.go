package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/outboxgo/outbox/bench/internal/processors"
	"github.com/outboxgo/outbox/bench/internal/report"
	"github.com/outboxgo/outbox/bench/internal/services"
)

// scenario is one thing to measure, chosen by its name.
type scenario struct {
	name, what string
	kafka      bool // needs a broker that is warm
	run        func(*bench, context.Context) error
}

// scenarios run in this order: latencies first, while nothing large is being
// written back to the disk. They lead back to this list, hence init.
var scenarios []scenario

func init() {
	scenarios = []scenario{
		{"latency", "from commit to arrival, against producing after the commit", true, onTrack("latency", (*track).latency)},
		{"wake", "the same from another process, against from that of the leader; after a silence; and what a wake-up costs the writer", true, onTrack("wake", (*track).wake)},
		{"takeover", "from the end of the process that leads, by kill -9 or cleanly, to the next arrival", true, (*bench).takeover},
		{"tenants", "many schemas of one database that one process relays for: from commit to arrival, connections, processors, memory", true, onTrack("tenants", (*track).tenants)},
		{"tail", "where the slowest events spend their time at the highest of -rates, by traces", true, onTrack("tail", (*track).tail)},
		{"open-transactions", "from commit to arrival while transactions stay open: one that has written, a bulk of events, an operator's; against without", true, onTrack("open", (*track).openTransactions)},
		{"poison", "the same while Kafka refuses some events, for those of other keys, against without", true, (*bench).poison},
		{"bad-topics", "from commit to arrival beside a topic that takes nothing, against without", true, onTrack("bad_without", (*track).badTopics)},
		{"exactly", "from commit to arrival, and all events, with each event sent exactly once, against at least once", true, onTrack("default", (*track).exactly)},
		{"drain", "all events, against a bare loop that reads rows and produces them", true, (*bench).drain},
		{"outage", "all events that pile up while Kafka is away, against the bare loop, and against a relay without an outage", true, (*bench).outage},
		{"backlog", "a large backlog against a small one: time and CPU of an event", true, (*bench).backlog},
		{"backlogs", "backlogs of millions of events: how the time grows, and how much memory the relay takes", true, (*bench).backlogs},
		{"large", "large events, against the bare loop: bytes per second, the first arrival, memory, temporary files", true, (*bench).large},
		{"places", "moves of the cursor that say where events are, against moves that do not: time, WAL, and what a drain would take without", true, (*bench).places},
		{"poll", "a poll that finds nothing, over published rows and over none", true, (*bench).poll},
		{"idle", "processes of a service without events: processors and transactions", true, (*bench).idle},
		{"retention", "from commit to arrival while old rows are removed, against while they stay", true, (*bench).retention},
		{"record", "Record and Queue in a transaction, against the transaction without, and COPY", false, (*bench).record},
		{"record-sql", "Record in a transaction of database/sql, with pgx/stdlib and with lib/pq, against one of pgx", false, (*bench).recordSQL},
		{"record-codecs", "Record with Protobuf, Avro and JSON Schema, without a schema registry and with one, against JSON", false, (*bench).recordCodecs},
		{"consumer", "a consumer's transaction for many events, against one for each", true, (*bench).consumer},
		{"failing", "a consumer, and a worker, while one event of a hundred fails: all other events, against without failures", true, (*bench).failing},
		{"bus", "workers without Kafka, against River: events per second, beside an open transaction too, and from commit to handled", false, (*bench).bus},
	}
}

// bench is one run of the program.
type bench struct {
	*services.Services
	cfg    config
	stderr io.Writer
	report *report.Report
	rounds processors.Rounds

	stocks map[int]*stock
	warm   bool // the broker, for full batches

	warmSmall bool // the broker, for small requests

	children int // started so far, for the names of profiles
}

// say tells how far the run is.
func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.stderr, format+"\n", args...)
}

func (b *bench) measure(ctx context.Context) error {
	for _, s := range scenarios {
		if !b.cfg.which.MatchString(s.name) {
			continue
		}
		if s.kafka {
			if err := b.warmUp(ctx); err != nil {
				return fmt.Errorf("warm up: %w", err)
			}
		}
		start := time.Now()
		b.say("%s: %s", s.name, s.what)
		if err := s.run(b, ctx); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		b.say("%s: done in %.0f s", s.name, time.Since(start).Seconds())
	}
	return nil
}
