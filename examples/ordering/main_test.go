package main

import (
	"bytes"
	"context"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/outboxgo/outbox/examples/internal/ending"
	"github.com/outboxgo/outbox/examples/internal/program"
	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { program.Main(m, main) }

func startOrdering(t *testing.T, args ...string) *program.Process {
	t.Helper()
	return program.Start(t, append(args, "-patience=60s"), "OUTBOX_KAFKA_BROKERS="+strings.Join(testenv.Brokers(t), ","))
}

// The customers' process, the relay and three services are killed in the middle, the relay when Kafka has what it has sent and
// the cursor does not say so. All equations hold, and there were short stock, customers who cancel, repeats in Kafka
// and mails that were asked for twice for them to hold in spite of. The summary tells the history of an order that was
// compensated: what was asked for, the inventory's answer, and what took it back.
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

// A reservation that nobody gave back is found, points that were booked twice, and a notification that came twice. The shop is
// open until all of them are there.
func TestOrderingFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	p := startOrdering(t, "-orders=100000", "-rate=20", "-kill=false")
	db := testenv.Pool(t, nil)
	in := func(table string) string { return pgx.Identifier{p.Schema, table}.Sanitize() }
	change := func(sql string) {
		require.Eventually(t, func() bool { // the program makes its tables and works meanwhile
			changed, err := db.Exec(context.Background(), sql)
			return err == nil && changed.RowsAffected() == 1
		}, testenv.Patience, 10*time.Millisecond)
	}
	change(`INSERT INTO ` + in("reward_entry") + ` SELECT * FROM ` + in("reward_entry") + ` WHERE points > 0 LIMIT 1`)
	change(`INSERT INTO ` + in("notification") + ` SELECT * FROM ` + in("notification") + ` LIMIT 1`)
	change(`UPDATE ` + in("reservation") + ` SET status = 'RESERVED' WHERE order_id = (SELECT order_id FROM ` + in("reservation") + ` WHERE status = 'RELEASED' LIMIT 1)`)
	p.Signal(t, os.Interrupt)
	require.Equal(t, exitWrong, p.Wait(t))
	out := p.Stdout.String()
	require.Regexp(t, `(?m)1 +reservations left of cancelled orders .* wrong$`, out)
	require.Regexp(t, `(?m)points of customers .* wrong$`, out)
	require.Regexp(t, `(?m)1 +orders whose points were booked twice .* wrong$`, out)
	require.Regexp(t, `(?m)notifications .* wrong$`, out)
	require.Contains(t, out, "The numbers do not add up.")
	p.RequireNoSchema(t)
}

var cancelledLine = regexp.MustCompile(`Order ([0-9a-f-]{36}), as the outbox tells it`)

// A signal closes the shop, this one or the Ctrl-C of the test above. What was ordered is compared: since nothing is in stock,
// all orders are cancelled, nobody keeps points, and nothing is put aside. With -keep an order can be looked at afterwards.
func TestOrderingInterrupted(t *testing.T) {
	t.Parallel()
	p := startOrdering(t, "-orders=100000", "-rate=20", "-stock=0", "-keep")
	db := testenv.Pool(t, nil)
	t.Cleanup(func() { show.DropSchema(db, p.Schema, os.Stderr) })
	placed := pgx.Identifier{p.Schema, "orders"}.Sanitize()
	require.Eventually(t, func() bool {
		n := 0
		err := db.QueryRow(context.Background(), `SELECT count(*) FROM `+placed).Scan(&n)
		return err == nil && n > 20
	}, testenv.Patience, 10*time.Millisecond)
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
		program.RequireUsage(t, args, []string{"OUTBOX_POSTGRES_URL=" + db.Config().ConnString()}, exitWrong, "", want)
	}
}

// Without logical decoding Debezium could not read a thing, and where it does not come the program waits until Ctrl-C. That it carries the
// saga, TestDebezium shows.
func TestOrderingWithoutDebezium(t *testing.T) {
	t.Parallel()
	p := startOrdering(t, "-debezium")
	var level string
	require.NoError(t, testenv.Pool(t, nil).QueryRow(t.Context(), `SHOW wal_level`).Scan(&level))
	if level == "logical" {
		p.Signal(t, os.Interrupt)
		require.Zero(t, p.Wait(t))
	} else {
		require.Equal(t, exitWrong, p.Wait(t))
		require.Contains(t, p.Stderr.String(), "wal_level=logical; it is "+level)
	}
	p.RequireNoSchema(t)
}

func TestOrderingInterruptedWhileStarting(t *testing.T) {
	t.Parallel()
	ending.RequireWhileStarting(t, program.Command(context.Background(), nil, "OUTBOX_KAFKA_BROKERS=127.0.0.1:1"), "OUTBOX_POSTGRES_URL")
}

// Wrong usage names what is wrong.
var usageTests = []struct {
	name, postgres, brokers, args string
	code                          int
	stdout, stderr                string
}{
	{"help", "", "", "--help", exitRight, "-orders", ""},
	{"no PostgreSQL", "", "b:1", "", exitUsage, "", "OUTBOX_POSTGRES_URL"},
	{"no Kafka", "postgres://h/d", "", "", exitUsage, "", "OUTBOX_KAFKA_BROKERS"},
	{"unknown flag", "postgres://h/d", "b:1", "-ordes=1", exitUsage, "", "-ordes"},
	{"not a flag", "postgres://h/d", "b:1", "orders", exitUsage, "", `"orders" is not a flag`},
	{"no orders", "postgres://h/d", "b:1", "-orders=0", exitUsage, "", "-orders"},
	{"no products", "postgres://h/d", "b:1", "-products=0", exitUsage, "", "-products"},
	{"less than no stock", "postgres://h/d", "b:1", "-stock=-1", exitUsage, "", "-stock"},
	{"too many orders", "postgres://h/d", "b:1", "-orders=1000001", exitUsage, "", "-orders"},
	{"too many products", "postgres://h/d", "b:1", "-products=1001", exitUsage, "", "-products"},
	{"too much stock", "postgres://h/d", "b:1", "-stock=1001", exitUsage, "", "-stock"},
	{"no such role", "postgres://h/d", "b:1", "-role=king -schema=s", exitUsage, "", "customers, inventory, notification, orders, relay, reward"},
	{"role without a schema", "postgres://h/d", "b:1", "-role=relay", exitUsage, "", "-schema"},
	{"schema alone", "postgres://h/d", "b:1", "-schema=s", exitUsage, "", "-schema"},
	{"order without a schema", "postgres://h/d", "", "-order=6f1d3f7c-5b0e-4f9a-9a41-0d8b3f6b2c11", exitUsage, "", "-schema"},
	{"order that is none", "postgres://h/d", "", "-order=7 -schema=s", exitUsage, "", `-order is "7"`},
	{"order and role", "postgres://h/d", "b:1", "-order=6f1d3f7c-5b0e-4f9a-9a41-0d8b3f6b2c11 -role=relay -schema=s", exitUsage, "", "exclude"},
	{"nobody answers", "postgres://127.0.0.1:1/d", "b:1", "", exitWrong, "", "connect"},
	{"nobody answers the relay", "postgres://127.0.0.1:1/d", "b:1", "-role=relay -schema=s", exitWrong, "", "connect"},
	{"nobody answers a look", "postgres://127.0.0.1:1/d", "", "-order=6f1d3f7c-5b0e-4f9a-9a41-0d8b3f6b2c11 -schema=s", exitWrong, "", "connect"},
}

func TestUsage(t *testing.T) {
	t.Parallel()
	for _, tt := range usageTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			env := []string{"OUTBOX_POSTGRES_URL=" + tt.postgres, "OUTBOX_KAFKA_BROKERS=" + tt.brokers}
			program.RequireUsage(t, tt.args, env, tt.code, tt.stdout, tt.stderr)
		})
	}
}
