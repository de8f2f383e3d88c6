package program

import (
	"bytes"
	"strings"
	"testing"

	"github.com/outboxgo/outbox/examples/internal/show"
	"github.com/stretchr/testify/require"
)

// Usage is a row of a test of what a program says to its arguments. PostgreSQL is an address
// without a server.
type Usage struct {
	Name, Args string
	Code       int
	Says       string // on its standard error; at code 0 on its standard output
	Unset      string // a variable of the environment that is not set
}

// TestUsage requires what the program says. Rows that hold for each program come first; flag is one of its flags.
func TestUsage(t *testing.T, flag string, rows ...Usage) {
	t.Parallel()
	rows = append([]Usage{
		{Name: "help", Args: "--help", Says: flag},
		{Name: "no PostgreSQL", Code: show.ExitUsage, Says: "OUTBOX_POSTGRES_URL", Unset: "OUTBOX_POSTGRES_URL"},
		{Name: "unknown flag", Args: flag + "z=1", Code: show.ExitUsage, Says: flag + "z"},
		{Name: "not a flag", Args: "orders", Code: show.ExitUsage, Says: `"orders" is not a flag`},
		{Name: "nobody answers", Code: show.ExitWrong, Says: "connect"},
	}, rows...)
	for _, row := range rows {
		t.Run(row.Name, func(t *testing.T) {
			t.Parallel()
			env := []string{"OUTBOX_POSTGRES_URL=postgres://127.0.0.1:1/d", "OUTBOX_KAFKA_BROKERS=b:1", "REDIS_URL="}
			if row.Unset != "" {
				env = append(env, row.Unset+"=")
			}
			row.Require(t, env...)
		})
	}
}

// Require runs the program with more in its environment.
func (u Usage) Require(t *testing.T, env ...string) {
	t.Helper()
	cmd := Command(t.Context(), strings.Fields(u.Args), env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	_ = cmd.Run() // the exit code says it
	require.Equal(t, u.Code, cmd.ProcessState.ExitCode(), &stderr)
	said := &stderr
	if u.Code == show.ExitRight {
		said = &stdout
	}
	require.Contains(t, said.String(), u.Says)
}

// NoKafka is the row of programs that need Kafka.
var NoKafka = Usage{Name: "no Kafka", Code: show.ExitUsage, Says: "OUTBOX_KAFKA_BROKERS", Unset: "OUTBOX_KAFKA_BROKERS"}

// Misuse is a row of arguments that the program refuses.
func Misuse(name, args, says string) Usage {
	return Usage{Name: name, Args: args, Code: show.ExitUsage, Says: says}
}

// Unanswered is a row of arguments with which the program fails because PostgreSQL does not answer.
// Unset names a variable that is not set, or is empty.
func Unanswered(name, args, unset string) Usage {
	return Usage{Name: name, Args: args, Code: show.ExitWrong, Says: "connect", Unset: unset}
}
