package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"strings"

	"github.com/twmb/franz-go/pkg/kerr"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/pg"
)

// Exit codes of the process.
const (
	exitOK       = 0
	exitError    = 1
	exitUsage    = 2
	exitProblems = 3
	exitSignal   = 128 // plus the number of the signal
)

// command is a command of the program. It keeps no state: tests run commands in their own process.
type command struct {
	name     string // one word or two
	synopsis string // the words after the name
	summary  string // for the list of commands
	about    string // for its own help, in lines of at most 80 characters
	max      int    // arguments at most
	min      int    // arguments at least
	// endless is set if --timeout bounds single steps, not the whole command: the command runs until it is
	// interrupted, or must not stop half-way.
	endless bool
	// prepare defines the flags and returns the function that runs once they are parsed.
	prepare func(fs *flag.FlagSet) func(ctx context.Context, e *env) error
}

// commands returns all of them in the order of the help.
func commands() []command {
	return []command{
		relayCommand, serveCommand, statusCommand, doctorCommand, tailCommand, eventsCommand, eventsShowCommand, delayedCommand, cancelCommand, moveCommand, topicsCommand,
		failuresListCommand, failuresShowCommand, failuresCountCommand, failuresRetryCommand, failuresResolveCommand,
		failuresEditCommand, failuresHoldCommand, failuresReleaseCommand,
		consumersCommand, consumerPauseCommand, consumerResumeCommand, consumerRewindCommand,
		cutStatusCommand, cutToKafkaCommand, cutToPostgresCommand, cutFinishCommand, cutCancelCommand, cutFromDebeziumCommand, cutToDebeziumCommand,
		dlqListCommand, dlqReplayCommand, dlqEditCommand,
		verifyCommand, replayCommand, archiveStatusCommand, archiveCreateCommand, archiveExpireCommand, groupStartCommand,
		contractExportCommand, contractCheckCommand, contractDiffCommand,
		auditCommand,
		migrateUpCommand, migrateStatusCommand, migratePrintCommand, completionCommand(), versionCommand,
	}
}

// errProblems ends a command that has shown problems and did nothing wrong itself.
var errProblems = errors.New("problems found")

// usageError is a mistake in the call of a command.
type usageError struct {
	text    string
	command string // whose help to read; empty for the general help
}

func (u *usageError) Error() string { return u.text }

func usagef(format string, args ...any) error {
	return &usageError{text: fmt.Sprintf(format, args...)}
}

// checkLimit checks the --limit of a list that is read at once.
func checkLimit(n int) error {
	if n < 1 || n > 1000 {
		return usagef("--limit is 1 to 1000")
	}
	return nil
}

// run runs a command line and returns the exit code. A command whose output cannot be written has failed.
func run(ctx context.Context, args []string, e *env) int {
	writes, stop := context.WithCancel(ctx)
	defer stop()
	out := &output{w: e.stdout, failed: stop}
	e.stdout = out
	err := dispatch(writes, args, e)
	e.close()
	if werr := out.error(); werr != nil {
		err = werr
	}
	var usage *usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errProblems):
		return exitProblems
	case errors.As(err, &usage):
		e.printError(usage.text)
		fmt.Fprintf(e.stderr, "See %s.\n", helpFor(usage.command))
		return exitUsage
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		e.printError("interrupted")
	case errors.Is(err, context.DeadlineExceeded):
		e.printError(fmt.Sprintf("%s (--timeout is %v)", errorText(err), e.timeout))
	default:
		e.printError(errorText(err))
		e.hint(err)
	}
	return exitError
}

// hint suggests a remedy for errors that have one usual cause.
func (e *env) hint(err error) {
	switch {
	case errors.Is(err, kerr.InvalidReplicationFactor):
		fmt.Fprintln(e.stderr, "The field ReplicationFactor is --replication.")
	case pg.IsUndefined(err), errors.Is(err, outbox.ErrNotMigrated):
		fmt.Fprintf(e.stderr, "Schema %s has no tables of outbox, or those of an earlier release: try --schema,\noutbox doctor, or outbox migrate up.\n", visible(e.schemaName()))
	case pg.Code(err) == "42501": // no privilege
		fmt.Fprintln(e.stderr, "The role may not do that. outbox doctor --as reader, or operator, says why.")
	}
}

// errorText removes the prefix that the line has already, also from an error that came through several packages.
func errorText(err error) string {
	return strings.ReplaceAll(strings.TrimPrefix(err.Error(), "outbox: "), ": outbox: ", ": ")
}

func helpFor(command string) string {
	if command == "" {
		return "outbox help"
	}
	return "outbox help " + command
}

// dispatch finds the command and runs it.
func dispatch(ctx context.Context, args []string, e *env) error {
	leading := newFlagSet()
	e.define(leading)
	words, err := parse(leading, args, false)
	switch {
	case errors.Is(err, flag.ErrHelp), err == nil && len(words) > 0 && words[0] == "help":
		return help(e, helpWords(words))
	case err != nil:
		return err
	case len(args) == 0:
		return help(e, nil)
	case len(words) == 0:
		return usagef("which command?")
	}
	c, rest, err := find(words)
	if err != nil {
		if asksForHelp(words) {
			return help(e, words[:1])
		}
		return err
	}
	fs := newFlagSet()
	runs := c.prepare(fs)
	e.define(fs)
	e.args, err = parse(fs, rest, true)
	if errors.Is(err, flag.ErrHelp) {
		return help(e, strings.Fields(c.name))
	}
	if err == nil {
		err = c.checkArgs(e.args)
	}
	if err == nil && c.name != relayCommand.name { // relay names all variables
		e.warnOfSchema()
	}
	if err == nil {
		err = c.run(ctx, e, runs)
	}
	var usage *usageError
	if errors.As(err, &usage) {
		usage.command = c.name
	}
	return err
}

// helpWords leaves out the word help itself.
func helpWords(words []string) []string {
	if len(words) > 0 && words[0] == "help" {
		return words[1:]
	}
	return words
}

func asksForHelp(words []string) bool {
	return len(words) > 1 && (words[1] == "-h" || words[1] == "-help" || words[1] == "--help" || words[1] == "help")
}

func (c command) run(ctx context.Context, e *env, runs func(context.Context, *env) error) error {
	if err := e.checkGlobals(); err != nil {
		return err
	}
	if !c.endless && e.timeout > 0 {
		bounded, cancel := context.WithTimeout(ctx, e.timeout)
		defer cancel()
		ctx = bounded
	}
	return runs(ctx, e)
}

func (c command) checkArgs(args []string) error {
	switch {
	case len(args) < c.min:
		return usagef("%s: want %s", c.name, c.synopsis)
	case len(args) > c.max:
		return usagef("%s: %q is too much", c.name, args[c.max])
	}
	return nil
}

// find returns the command that words begin with, and the words after its name.
func find(words []string) (command, []string, error) {
	var group []string // commands that begin with the first word
	for _, c := range commands() {
		name := strings.Fields(c.name)
		if len(words) >= len(name) && strings.Join(words[:len(name)], " ") == c.name {
			return c, words[len(name):], nil
		}
		if name[0] == words[0] {
			group = append(group, name[1])
		}
	}
	switch {
	case len(group) > 0 && (len(words) == 1 || strings.HasPrefix(words[1], "-")):
		return command{}, nil, &usageError{fmt.Sprintf("%s: want one of %s", words[0], strings.Join(group, ", ")), words[0]}
	case len(group) > 0:
		return command{}, nil, &usageError{fmt.Sprintf("there is no command %q%s", words[0]+" "+words[1], suggest(words[1], group)), words[0]}
	}
	return command{}, nil, usagef("there is no command %q%s", words[0], suggest(words[0], firstWords()))
}

func firstWords() (all []string) {
	for _, c := range commands() {
		all = append(all, strings.Fields(c.name)[0])
	}
	return append(all, "help")
}

// suggest returns a question about the nearest of some words, if one is near.
func suggest(word string, of []string) string {
	const longest = 100 // longest part of a mistyped word to show
	if len(word) > longest {
		return ""
	}
	best, distance := "", len(word)/3+2
	for _, candidate := range of {
		if d := edits(word, candidate); d < distance {
			best, distance = candidate, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(": did you mean %q?", best)
}

// edits returns the number of letters to insert, remove or replace to make b from a.
func edits(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
