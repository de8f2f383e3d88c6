package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/exactly"
	"github.com/outboxgo/outbox/internal/kafka"
	"github.com/outboxgo/outbox/internal/tables"
	"github.com/outboxgo/outbox/outboxtopics"
)

var exactlyCheck = check{name: "kafka.exactly_once", ids: []string{"kafka.exactly_once.version", "kafka.exactly_once.topic",
	"kafka.exactly_once.replicas", "kafka.exactly_once.open"}}

const exactlyPage = "docs/exactly-once.md"

// exactlyOnce checks what Kafka needs for the relays that send exactly once, and which transactions hold back readers
// of their topics.
func (d *doctor) exactlyOnce(ctx context.Context, opts []kgo.Opt, brokers int) error {
	relays, err := exactlyRelays(ctx, d.e)
	if err != nil || len(relays) == 0 {
		return err
	}
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return err
	}
	defer client.Close()
	topics, err := d.eventTopics(ctx)
	errs := []error{err, d.transactionVersion(ctx, client)}
	infos, _ := outboxtopics.Describe(ctx, opts, topics...) // the check of topics reports the others
	replicas := min(brokers, 2)
	for _, info := range infos {
		replicas = max(replicas, info.Replicas)
	}
	for _, r := range relays {
		errs = append(errs, d.cursorTopic(ctx, client, opts, r, replicas), d.transactionalIDs(ctx, client, r))
		topics = append(topics, r.CursorTopic)
	}
	return errors.Join(append(errs, d.holds(ctx, client, topics))...)
}

// exactlyRelays returns the relays that send exactly once.
func exactlyRelays(ctx context.Context, e *env) ([]outbox.RelayStatus, error) {
	inspector, err := e.inspector(ctx)
	if err != nil {
		return nil, err
	}
	relays, err := inspector.Relays(ctx)
	return slices.DeleteFunc(relays, func(r outbox.RelayStatus) bool { return r.CursorTopic == "" }), err
}

func (d *doctor) transactionVersion(ctx context.Context, client *kgo.Client) error {
	err := exactly.CheckVersion(ctx, client)
	if !errors.Is(err, exactly.ErrVersion) {
		return err
	}
	d.add("kafka.exactly_once.version", severityError, errorText(err), "Relays that send exactly once wait: their events are not sent.",
		"Upgrade the brokers, then kafka-features.sh upgrade --feature transaction.version=2.")
	return nil
}

// cursorTopic checks the topic with the position of a relay, which needs a number of replicas.
func (d *doctor) cursorTopic(ctx context.Context, client *kgo.Client, opts []kgo.Opt, r outbox.RelayStatus, replicas int) error {
	bad := func(what, means, do string) {
		d.add("kafka.exactly_once.topic", severityError, fmt.Sprintf("relay %s: %s", r.Name, what), means, do)
	}
	const waits = "The relay cannot write its position: its events are not sent."
	switch err := exactly.CheckTopic(ctx, client, r.CursorTopic); {
	case errors.Is(err, exactly.ErrNoTopic):
		bad(errorText(err), "Nothing else says what was sent. Once Kafka has confirmed a transaction, the relay does not start without the topic.",
			"Do not create it again: "+exactlyPage+" says how to go on.")
		return nil
	case errors.Is(err, exactly.ErrTopic):
		bad(errorText(err), "The relay does not start with such a topic.", "Set cleanup.policy to compact. For another number of partitions, change to another topic: "+exactlyPage+".")
		return nil
	case errors.Is(err, kafka.ErrNoLeader):
		bad(errorText(err), waits, "Start the brokers that have the partition.")
		return nil
	case err != nil:
		return err
	}
	infos, err := outboxtopics.Describe(ctx, opts, r.CursorTopic)
	for _, info := range infos {
		if needed := setting(info, "min.insync.replicas"); needed > int64(info.InSync) {
			bad(fmt.Sprintf("cursor topic %s has %s in sync, and min.insync.replicas is %d", info.Topic, plural(int64(info.InSync), "replica", "replicas"), needed),
				waits, "Start the brokers that are down, add replicas (kafka-reassign-partitions), or lower min.insync.replicas.")
		}
		if info.Replicas < replicas {
			d.add("kafka.exactly_once.replicas", severityWarning,
				fmt.Sprintf("relay %s: cursor topic %s has %s, and should have %d, as the topics of events have or the brokers allow", r.Name, info.Topic, plural(int64(info.Replicas), "replica", "replicas"), replicas),
				"The relay stands still while its brokers are down, and its position is lost with their disks.", "Add replicas with kafka-reassign-partitions.")
		}
	}
	return err
}

// transactionalIDs says what Kafka knows about the transactional ids of a relay.
func (d *doctor) transactionalIDs(ctx context.Context, client *kgo.Client, r outbox.RelayStatus) error {
	system, database, err := tables.Identity(ctx, d.e.db)
	if err != nil {
		return err
	}
	ids := exactly.Config{}.For(system, database, d.e.schemaName(), r.Name).IDs()
	known, err := kafka.Transactions(ctx, client, ids[:]...)
	texts := []string{exactlyLine(r)}
	for _, id := range ids {
		text := "not known to Kafka"
		if t, ok := known[id]; ok {
			text = transactionText(t, time.Now())
		} else if err != nil {
			text = "Kafka does not say"
		}
		texts = append(texts, id+": "+text)
	}
	for i, text := range texts {
		d.about = append(d.about, [2]string{[]string{"relay", "", ""}[i], text})
	}
	return err
}

func transactionText(t kafka.Transaction, now time.Time) string {
	text := fmt.Sprintf("%s, producer id %d", t.State, t.ProducerID)
	if !t.Since.IsZero() {
		text += ", open for " + age(t.Since, now)
	}
	return text
}

// maxHeld bounds the partitions that a finding names.
const maxHeld = 10

// holds looks for transactions that have been open for long in topics.
func (d *doctor) holds(ctx context.Context, client *kgo.Client, topics []string) error {
	partitions, err := kafka.PartitionsOf(ctx, client, topics)
	all, herr := kafka.Holds(ctx, client, partitions)
	now := time.Now()
	for len(all) > 0 {
		n := slices.IndexFunc(all, func(h kafka.Hold) bool { return h.ProducerID != all[0].ProducerID })
		if n < 0 {
			n = len(all)
		}
		d.hold(all[:n], now)
		all = all[n:]
	}
	return errors.Join(err, herr)
}

// hold reports the open transaction of one producer, in the partitions where it is.
func (d *doctor) hold(all []kafka.Hold, now time.Time) {
	h, since := all[0], all[0].Since
	who := fmt.Sprintf("transactional id %s (producer id %d, %s)", h.ID, h.ProducerID, h.State)
	if h.ID == "" {
		who = fmt.Sprintf("producer id %d, whose transactional id Kafka does not tell,", h.ProducerID)
	}
	what := who + " has had a transaction open for "
	means := "Kafka aborts a transaction that is open for longer than its timeout. One that is prepared ends when all of its partitions have leaders."
	do := "Look at the process of this transactional id, and at the brokers. A relay ends its own transactions when it starts."
	if since.IsZero() {
		for _, h := range all { // the transaction is at least as old as its records
			if since.IsZero() || h.Wrote.Before(since) {
				since = h.Wrote
			}
		}
		what = who + " has a transaction open, and its newest record is as old as "
		means = "Its coordinator does not say that it is open: it does not time out, unless the doctor lacks the right Describe on its transactional id."
		do = "kafka-transactions.sh find-hanging says whether a coordinator knows the transaction, and kafka-transactions.sh abort ends one that none knows."
	}
	if now.Sub(since) < d.limits.openFor {
		return
	}
	var where []string
	for _, h := range all[:min(len(all), maxHeld)] {
		where = append(where, fmt.Sprintf("last stable offset of %s is %s behind its end", h.At.Name(), count(h.Behind)))
	}
	if more := len(all) - maxHeld; more > 0 {
		where = append(where, "and "+plural(int64(more), "more partition", "more partitions"))
	}
	d.add("kafka.exactly_once.open", severityWarning, what+age(since, now)+": "+strings.Join(where, ", "),
		"Readers of committed records get nothing behind it until it ends. "+means, do)
}
