package show

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// The codes that the examples exit with.
const (
	ExitRight = iota // all adds up, or a signal ended the program
	ExitWrong        // it does not, or the run failed or did not finish
	ExitUsage        // wrong usage
)

// The report of a run, which is printed, says which numbers these errors are about.
var (
	ErrWrong      = errors.New("the numbers do not add up")
	ErrUnfinished = errors.New("the run ended before all was done")
)

// Program does what the arguments of a program say.
type Program func(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error

// Main runs a program as this process, and exits with a code. Ctrl-C or SIGTERM cancels the program's context.
// The second signal, unless it comes together with the first, ends the process at once.
func Main(name string, program Program) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, func() { time.AfterFunc(time.Second, stop) })
	err := program(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	os.Exit(code(ctx, name, err))
}

// code prints what went wrong, and returns the exit code.
func code(ctx context.Context, name string, err error) int {
	var usage usageError
	switch {
	case err == nil || errors.Is(err, flag.ErrHelp):
		return ExitRight
	case errors.Is(err, ErrWrong), errors.Is(err, ErrUnfinished):
		return ExitWrong
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		fmt.Fprintf(os.Stderr, "%s: ended by a signal: %v\n", name, err)
		return ExitRight
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	if errors.As(err, &usage) {
		return ExitUsage
	}
	return ExitWrong
}

type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// Parse parses the arguments, all of which are flags, and then calls check, which validates the values.
// For -h it prints the usage and the flags to help. Its error tells [Main] the exit code.
func Parse(flags *flag.FlagSet, args []string, usage string, help io.Writer, check func() error) error {
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		_, _ = fmt.Fprint(help, usage)
		flags.SetOutput(help)
		flags.PrintDefaults()
		return err
	case err == nil && flags.NArg() > 0:
		err = fmt.Errorf("%q is not a flag", flags.Arg(0))
	case err == nil:
		err = check()
	}
	if err != nil {
		return usageError{fmt.Errorf("%w; see %s -h", err, flags.Name())}
	}
	return nil
}

// Services says where PostgreSQL and Kafka are.
type Services struct {
	Postgres string
	Brokers  []string // none: there is no Kafka
}

// Environment returns the services that the environment names.
func Environment() (s Services) {
	s.Postgres = os.Getenv("OUTBOX_POSTGRES_URL")
	if brokers := os.Getenv("OUTBOX_KAFKA_BROKERS"); brokers != "" {
		s.Brokers = strings.Split(brokers, ",")
	}
	return s
}

// Require returns an error unless PostgreSQL is named, and Kafka where it is needed. The Makefile's target sets both.
func (s Services) Require(target string, kafka bool) error {
	switch {
	case s.Postgres == "" && !kafka:
		return fmt.Errorf("OUTBOX_POSTGRES_URL is not set: run it with `make %s`", target)
	case s.Postgres == "" || kafka && len(s.Brokers) == 0:
		return fmt.Errorf("OUTBOX_POSTGRES_URL and OUTBOX_KAFKA_BROKERS are not set: run it with `make %s`", target)
	}
	return nil
}

// Played returns the error of a process that plays a part for another process of its program. No signal ends
// such a process. So the error does not wrap context.Canceled, which [Main] would take for a signal.
func Played(part string, err error) error {
	if err == nil {
		return nil
	}
	return errors.New(part + ": " + err.Error())
}
