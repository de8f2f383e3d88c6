package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/outboxgo/outbox/internal/contract"
)

var contractExportCommand = command{
	name:     "contract export",
	synopsis: "PACKAGE NAME [UPCASTERS…]", min: 2, max: maxWords,
	summary: "write the contract of a registry, an AsyncAPI document",
	about: `
The contract has topics, keys, headers, and JSON Schemas of Go types. NAME is a
registry in PACKAGE, such as ./events Registry, or a function without arguments
that returns one. UPCASTERS are variables of HandlerConfig.Upcasters: with them,
new versions of events are compatible. It runs a small program with go run,
which needs once:

  go get ` + contractPackage + `

Commit the contract, and check it in CI.`,
	endless: true,
	prepare: func(fs *flag.FlagSet) func(context.Context, *env) error {
		out := fs.String("out", "", "`FILE` to write (standard output)")
		return func(ctx context.Context, e *env) error { return contractExport(ctx, e, *out) }
	},
}

var contractCheckCommand = command{
	name:     "contract check",
	synopsis: "FILE PACKAGE NAME [UPCASTERS…]", min: 3, max: maxWords,
	summary: "compare a file with the contract of a registry, in CI",
	about: `
Shows what outbox contract diff shows, and exits with 3 after any change, also a
compatible one: then export FILE again.`,
	endless: true,
	prepare: func(*flag.FlagSet) func(context.Context, *env) error { return contractCheck },
}

var contractDiffCommand = command{
	name:     "contract diff",
	synopsis: "OLD NEW", min: 2, max: 2,
	summary: "show which readers and writers a change of the contract breaks",
	about: `
Compares files of outbox contract export; - is standard input. Readers break if
consumers built with OLD cannot use events of NEW. Writers break if consumers
built with NEW cannot use events of OLD: recorded already, or of services that
are not updated yet. The last line is FULL (neither), BACKWARD (readers break),
FORWARD (writers break) or NONE. It exits with 3 if anything breaks.

  git show origin/main:contract.json | outbox contract diff - contract.json`,
	prepare: func(*flag.FlagSet) func(context.Context, *env) error { return contractDiff },
}

func contractExport(ctx context.Context, e *env, out string) error {
	text, err := goExport(ctx, e, e.args[0], e.args[1:])
	if err != nil {
		return err
	}
	if out != "" {
		return os.WriteFile(out, text, 0o644) //nolint:gosec // it is committed
	}
	_, err = e.stdout.Write(text)
	return err
}

func contractCheck(ctx context.Context, e *env) error {
	file := e.args[0]
	again := "outbox contract export --out " + strings.Join(e.args, " ") + " writes it"
	was, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%w: %s", err, again)
	}
	is, err := goExport(ctx, e, e.args[1], e.args[2:])
	if err != nil {
		return err
	}
	changes, err := contractChanges(was, is)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	same := bytes.Equal(was, is)
	if err := e.showChanges(changes, map[string]any{"stale": !same}); err != nil || same {
		return err
	}
	if !e.json {
		e.say(visible(file) + " is not the contract of the registry. If that is meant: " + visible(again) + ".")
	}
	return errProblems
}

func contractDiff(_ context.Context, e *env) error {
	var texts [2][]byte
	for i, name := range e.args {
		var err error
		if name == "-" {
			texts[i], err = io.ReadAll(e.stdin)
		} else {
			texts[i], err = os.ReadFile(name)
		}
		if err != nil {
			return err
		}
	}
	changes, err := contractChanges(texts[0], texts[1])
	if err != nil {
		return err
	}
	if err := e.showChanges(changes, map[string]any{}); err != nil {
		return err
	}
	if contract.Compatibility(changes) != "FULL" {
		return errProblems
	}
	return nil
}

func contractChanges(was, is []byte) ([]contract.Change, error) {
	before, err := contract.Read(was)
	if err != nil {
		return nil, fmt.Errorf("the old contract: %w", err)
	}
	after, err := contract.Read(is)
	if err != nil {
		return nil, fmt.Errorf("the new contract: %w", err)
	}
	return contract.Diff(before, after), nil
}

// showChanges shows the changes of a contract. With --json, they are a part of doc.
func (e *env) showChanges(changes []contract.Change, doc map[string]any) error {
	breaking := 0
	for _, c := range changes {
		if len(c.Breaks) > 0 {
			breaking++
		}
	}
	if e.json {
		doc["compatibility"], doc["breaking"], doc["changes"] = contract.Compatibility(changes), breaking, changes
		return e.writeJSON(doc)
	}
	for _, c := range changes {
		e.say(visible(c.String()))
	}
	e.printf("%s, %d breaking; compatibility: %s\n", plural(int64(len(changes)), "change", "changes"), breaking, contract.Compatibility(changes))
	return nil
}
