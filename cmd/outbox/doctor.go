package main

import (
	"context"
	"flag"
	"fmt"
	"strings"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/short"
	"github.com/outboxgo/outbox/outboxops"
)

var doctorCommand = command{
	name:    "doctor",
	summary: "check the installation: what is wrong, and what to do",
	about: `
Checks tables, privileges, settings, transactions, relays, failed events and
deliveries; with --kafka also Kafka and its topics. It changes nothing, and
exits with 3 after an error or a warning. --only and --skip take ids of
findings, or their beginnings, such as server.slot or kafka.

--as names the parts whose privileges it checks, of the connected role or
another one: --as relay=shop_relay,writer. Parts (docs/roles.md) are relay,
writer, consumer, worker, inbox, reader and operator. It also reports rights
that a named role does not need.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		d := &doctor{}
		d.limits.define(fs)
		fs.StringVar(&d.as, "as", "relay,writer", "`PART[=ROLE],…` parts whose privileges it checks (relay,writer)")
		fs.StringVar(&d.only, "only", "", "`ID,…` only these findings")
		fs.StringVar(&d.skip, "skip", "", "`ID,…` all but these findings")
		return d.run
	},
}

// doctor looks for problems. Its checks add to findings and go on. A check that cannot be made is a finding
// too.
type doctor struct {
	limits         limits
	as, only, skip string // as the flags give them

	e         *env
	parts     []part
	findings  []finding
	checks    int
	hasTables bool        // the tables exist
	about     [][2]string // the objects that were checked
	said      string      // what leaders have said, as a sentence; or empty
}

// check looks for some findings. It is skipped if none of them is asked for, or if its object cannot be
// reached.
type check struct {
	name string
	ids  []string // of its possible findings
	make func(*doctor, context.Context) error
}

func (d *doctor) run(ctx context.Context, e *env) error {
	d.e = e
	var err error
	if d.parts, err = parseParts(d.as); err != nil {
		return err
	}
	if err := d.checkIDs(); err != nil {
		return err
	}
	if d.wantsDatabase() && !e.namesDatabase() {
		_, err := e.databaseConfig()
		return err
	}
	d.examine(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	d.findings = d.chosen()
	if e.json {
		err = e.writeJSON(map[string]any{"database": e.databaseName(), "schema": e.schemaName(), "kafka": e.brokers(),
			"checks": d.checks, "findings": append([]finding{}, d.findings...)})
	} else {
		d.show()
	}
	if err == nil && areProblems(d.findings) {
		return errProblems
	}
	return err
}

// wantsTables reports whether a wanted check needs tables.
func (d *doctor) wantsTables() bool {
	return d.wants(migrationsCheck, topicsCheck, gapsCheck, exactlyCheck) || d.wants(tableChecks...)
}

func (d *doctor) wantsDatabase() bool {
	return d.wantsTables() || d.wants(connectCheck, firstCheck) || d.wants(databaseChecks...)
}

func (d *doctor) examine(ctx context.Context) {
	if d.wantsDatabase() && d.connect(ctx) {
		d.try(ctx, firstCheck)
		for _, c := range databaseChecks {
			d.try(ctx, c)
		}
		d.hasTables = d.wantsTables() && d.migrated(ctx)
		if d.hasTables {
			for _, c := range tableChecks {
				d.try(ctx, c)
			}
		}
	}
	switch {
	case !d.wants(kafkaCheck, autoCreateCheck, topicsCheck, gapsCheck, exactlyCheck):
	case d.e.brokers() == "":
		d.about = append(d.about, [2]string{"kafka", "not looked at: --kafka, or $KAFKA_BROKERS"})
	default:
		d.kafka(ctx)
	}
}

// try runs a check if it is wanted.
func (d *doctor) try(ctx context.Context, c check) {
	if d.wants(c) {
		d.perform(ctx, c)
	}
}

// perform makes a check, and adds a finding if it cannot be made.
func (d *doctor) perform(ctx context.Context, c check) {
	step, cancel := d.e.step(ctx)
	defer cancel()
	d.checks++
	if err := c.make(d, step); err != nil && ctx.Err() == nil {
		do := "Give the role that the doctor uses what docs/roles.md gives a reader, or name another role with --database."
		if strings.HasPrefix(c.name, "kafka.") {
			do = "Give the client of the doctor the rights on Kafka that docs/roles.md names, or log in as another one: --kafka-user."
		}
		d.add(c.failedID(), severityWarning, fmt.Sprintf("cannot look at %s: %s", c.name, errorText(err)),
			"Whether something is wrong there is not known.", do)
	}
}

func (d *doctor) add(id, severity, what, means, do string) {
	d.findings = append(d.findings, finding{id, severity, short.Text(d.e.mask(what), maxText), means, do})
}

func (d *doctor) show() {
	d.e.writeFields(d.about)
	number := map[string]int{}
	for _, severity := range []string{severityError, severityWarning, severityNote} {
		for _, f := range d.findings {
			if f.Severity == severity {
				number[severity]++
				d.showFinding(f)
			}
		}
	}
	d.e.printf("\n")
	if len(d.findings) == 0 {
		d.e.printf("%s\n", d.e.paint(green, fmt.Sprintf("Nothing is wrong: %d checks.", d.checks)))
		return
	}
	d.e.printf("%s, %s, %s\n", plural(int64(number[severityError]), "error", "errors"),
		plural(int64(number[severityWarning]), "warning", "warnings"), plural(int64(number[severityNote]), "note", "notes"))
}

func (d *doctor) showFinding(f finding) {
	e := d.e
	e.printf("\n")
	e.writeSeverity(f.Severity, f.What+" ["+f.ID+"]")
	for _, text := range []string{f.Means, "Do: " + f.Do} {
		for _, line := range wrap(visible(text), max(e.width, usualWidth)-severityWidth) {
			e.printf("%s%s\n", strings.Repeat(" ", severityWidth), line)
		}
	}
}

var connectCheck = check{name: "database.connect", ids: []string{"database.connect"}}

// connect reports whether the database can be reached.
func (d *doctor) connect(ctx context.Context) bool {
	d.checks++
	db, err := d.e.connect(ctx)
	if err != nil {
		d.add("database.connect", severityError, errorText(err),
			"Nothing of the database could be looked at.",
			"Check the URL (--database, $DATABASE_URL), that PostgreSQL runs and listens there, that its pg_hba.conf lets the role in, and the password.")
		return false
	}
	var version string
	if err := db.QueryRow(ctx, `SELECT pg_catalog.current_setting('server_version')`).Scan(&version); err != nil {
		d.add("database.connect", severityError, errorText(err), "Nothing of the database could be looked at.", "Look into the log of PostgreSQL.")
		return false
	}
	d.about = append(d.about, [2]string{"database", fmt.Sprintf("%s, PostgreSQL %s, schema %s", d.e.databaseName(), version, d.e.schemaName())})
	return true
}

// relays checks the state of relays and open transactions.
func (d *doctor) relays(ctx context.Context) error {
	s, err := look(ctx, d.e, d.limits)
	if err != nil {
		return err
	}
	if len(s.relays) == 0 {
		d.add("relay.none", severityNote, "no relay has run here yet", "Recorded events are not sent until one runs.", "Start a process that calls Relay.Run.")
	}
	d.findings = append(d.findings, s.findings...)
	d.said = saidText(s.relays, s.now)
	return nil
}

// routes checks that events have a topic to go to.
func (d *doctor) routes(ctx context.Context) error {
	topics, err := d.recorded(ctx)
	for _, t := range topics {
		err, dlqErr := topicNameErrors(t.Topic)
		if err != nil && t.Topic != "" {
			d.add("events.topic", severityError, fmt.Sprintf("topic of %s: %v", strings.Join(t.Types, ", "), err),
				"Kafka has no topic of this name: something else than a Recorder wrote the rows. They cannot be sent.",
				"Find who writes them (source of the events), and resolve what failed: outbox failures list.")
		}
		if err == nil && dlqErr != nil {
			d.add("events.topic", severityWarning, fmt.Sprintf("topic of %s: no dead-letter topic can have the name %s", strings.Join(t.Types, ", "), outbox.DeadLetterTopic(t.Topic)),
				"Kafka takes names of at most 249 characters. Consumers cannot send dead letters of the topic, unless they have ConsumerConfig.DeadLetterTopic. outbox topics neither compares nor creates the topic.",
				"Give the types a topic whose name has at most 245 characters, or set DeadLetterTopic of ConsumerConfig and of outboxtopics.Config.")
		}
		if t.Topic == "" {
			d.add("events.topic", severityError, fmt.Sprintf("no topic follows from %s", strings.Join(t.Types, ", ")),
				"These rows have no topic, and their type is not {company}.{domain}.{action}.v{n}: something else than a Recorder wrote them. They cannot be sent.",
				"Give the types topics of their own where they are written, and resolve what failed: outbox failures list.")
		}
	}
	return err
}

func (d *doctor) recorded(ctx context.Context) ([]outboxops.RecordedTopic, error) {
	inspector, err := d.e.inspector(ctx)
	if err != nil {
		return nil, err
	}
	return inspector.Topics(ctx)
}
