package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
)

func TestMain(m *testing.M) { program.Main(m, main) }

func startOrdering(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return startOrderingWith(t, args, "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// startOrderingWith starts it with more in its environment.
func startOrderingWith(t *testing.T, args []string, env ...string) *program.Process {
	t.Helper()
	return program.Start(t, append(args, "-patience=60s"), env...)
}

// The customers' process, the relay and three services are killed in the middle, the relay when Kafka has what it has
// sent and the cursor does not say so. All equations hold, and there were short stock, customers who cancel, repeats
// in Kafka and mails that were asked for twice for them to hold in spite of. The summary tells the history of an
// order that was compensated: what was asked for, the inventory's answer, and what took it back.
func TestOrdering(t *testing.T) {
	// Not parallel: processes are to be killed while they are busy.
	p := startOrdering(t, "-orders=120")
	require.Zero(t, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `120 orders: [1-9]\d* completed, [1-9]\d* cancelled because stock was short, [1-9]\d* cancelled by the customer \([1-9]\d* reservations released\)`, out)
	require.Contains(t, out, "killed: customers, inventory, notification, orders, relay")
	require.Regexp(t, `[1-9]\d* records in Kafka are repeats; [1-9]\d* mails were asked for again`, out)
	require.Regexp(t, `(?s)order\.created.*inventory\.reservation-requested.*reward\.earned.*notification\.required.*inventory\.short.*`+
		`order\.cancelled.*are left, and.*inventory\.release-requested.*reward\.revoked.*notification\.required`, out)
	require.NotContains(t, out, "wrong")
	require.Empty(t, p.Stderr.String())
	p.RequireNoSchema(t)
}

// A reservation that was not released is found, points that were booked twice, and a notification
// that came twice. The shop is open until all of them are there.
func TestOrderingFindsWhatIsWrong(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := startOrdering(t, "-orders=100000", "-rate=20", "-kill=false")
	p.Change(t, `INSERT INTO reward_entry SELECT * FROM reward_entry WHERE points > 0 LIMIT 1`)
	p.Change(t, `INSERT INTO notification SELECT * FROM notification LIMIT 1`)
	p.Change(t, `UPDATE reservation SET status = 'RESERVED' WHERE order_id = (SELECT order_id FROM reservation WHERE status = 'RELEASED' LIMIT 1)`)
	p.Signal(t, os.Interrupt)
	require.Equal(t, show.ExitWrong, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `(?m)1 +reservations left of cancelled orders .* wrong$`, out)
	require.Regexp(t, `(?m)points of customers .* wrong$`, out)
	require.Regexp(t, `(?m)1 +orders whose points were booked twice .* wrong$`, out)
	require.Regexp(t, `(?m)notifications .* wrong$`, out)
	require.Contains(t, out, "The numbers do not add up.")
	p.RequireNoSchema(t)
}

var cancelledLine = regexp.MustCompile(`Order ([0-9a-f-]{36}), as the outbox tells it`)

// A signal closes the shop, this one or the Ctrl-C of the test above. What was ordered is compared:
// since nothing is in stock, all orders are cancelled, no customer keeps points, and nothing is
// reserved. With -keep an order can be looked at afterwards.
func TestOrderingInterrupted(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := startOrdering(t, "-orders=100000", "-rate=20", "-stock=0", "-keep")
	db := testenv.Pool(t, nil)
	t.Cleanup(func() { show.DropSchema(db, p.Schema, os.Stderr) })
	p.AwaitRows(t, "orders", 20)
	p.Signal(t, syscall.SIGTERM)
	require.Zero(t, p.Wait(t))
	out := p.Stdout.String()
	require.NotContains(t, out, customersRole+",", "they were not killed")
	require.Regexp(t, `[1-9]\d* orders: 0 completed, .*\(0 reservations released\)`, out)
	require.Regexp(t, `(?m)^ +0  points of customers `, out)

	order := cancelledLine.FindStringSubmatch(out)
	require.NotNil(t, order)
	cmd := program.Command(t.Context(), []string{"-order=" + order[1], "-schema=" + p.Schema}, "OUTBOX_POSTGRES_URL="+db.Config().ConnString(), "OUTBOX_KAFKA_BROKERS=")
	var looked bytes.Buffer
	cmd.Stdout, cmd.Stderr = &looked, os.Stderr
	require.NoError(t, cmd.Run())
	require.Contains(t, out, looked.String(), "what the summary shows")
	require.Equal(t, 9, strings.Count(looked.String(), "\n"))

	for args, want := range map[string]string{
		"-order=00000000-0000-0000-0000-000000000001 -schema=" + p.Schema:      "there is no such order",
		"-order=00000000-0000-0000-0000-000000000001 -schema=ordering_nowhere": "ordering_nowhere",
	} {
		program.Usage{Args: args, Code: show.ExitWrong, Says: want}.Require(t, "OUTBOX_POSTGRES_URL="+db.Config().ConnString())
	}
}

// Without logical decoding Debezium could not read a thing, and where it does not come the program waits until
// Ctrl-C. That it carries the saga, TestDebezium shows.
func TestOrderingWithoutDebezium(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	p := startOrdering(t, "-debezium")
	var level string
	require.NoError(t, testenv.Pool(t, nil).QueryRow(t.Context(), `SHOW wal_level`).Scan(&level))
	if level == "logical" {
		p.Signal(t, os.Interrupt)
		require.Zero(t, p.Wait(t))
	} else {
		require.Equal(t, show.ExitWrong, p.Wait(t))
		require.Contains(t, p.Stderr.String(), "wal_level=logical; it is "+level)
	}
	p.RequireNoSchema(t)
}

func TestOrderingInterruptedWhileStarting(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	program.TestInterruptedWhileStarting(t)
}

// Without Kafka the program starts and records events. They are published and handled once Kafka is there.
func TestWithoutKafka(t *testing.T) {
	t.Parallel()
	program.TestWithoutKafka(t, 20, func(t *testing.T, env ...string) *program.Process {
		return startOrderingWith(t, []string{"-orders=120", "-kill=false"}, env...)
	})
}

// Wrong usage names what is wrong.
func TestUsage(t *testing.T) {
	program.TestUsage(t, "-orders",
		program.NoKafka,
		program.Misuse("no orders", "-orders=0", "-orders"),
		program.Misuse("no products", "-products=0", "-products"),
		program.Misuse("less than no stock", "-stock=-1", "-stock"),
		program.Misuse("too many orders", "-orders=1000001", "-orders"),
		program.Misuse("too many products", "-products=1001", "-products"),
		program.Misuse("too much stock", "-stock=1001", "-stock"),
		program.Misuse("no such role", "-role=king -schema=s", "customers, inventory, notification, orders, relay, reward"),
		program.Misuse("role without a schema", "-role=relay", "-schema"),
		program.Misuse("schema alone", "-schema=s", "-schema"),
		program.Misuse("order without a schema", "-order=6f1d3f7c-5b0e-4f9a-9a41-0d8b3f6b2c11", "-schema"),
		program.Misuse("order that is none", "-order=7 -schema=s", `-order is "7"`),
		program.Misuse("order and role", "-order=6f1d3f7c-5b0e-4f9a-9a41-0d8b3f6b2c11 -role=relay -schema=s", "exclude"),
		program.Unanswered("nobody answers the relay", "-role=relay -schema=s", ""),
		program.Unanswered("nobody answers a look", "-order=6f1d3f7c-5b0e-4f9a-9a41-0d8b3f6b2c11 -schema=s", "OUTBOX_KAFKA_BROKERS"),
	)
}
