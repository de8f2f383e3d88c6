// Release checks that the modules of this repository can be released: that each
// one that is published can be got, built and used from an empty module, at the
// version that is about to be tagged, before there is a tag.
//
//	release check [-dir folder] [-archives folder] version
//	release tag [-dir folder] version
//	release tidy [-dir folder] version
//
// "release -h" says the rest.
package main

import (
	"context"
	"embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = `Checks that the modules of a repository can be released.

Usage:

	release check [-dir folder] [-archives folder] version
	        pack the published modules as the version, into a module proxy made of
	        files; get, build and run a program against each from an empty module;
	        tag a copy, and compare what the tags give; write archives of the
	        commands for each system, and the root file system of the image
	release tag [-dir folder] version
	        make the tags of the version, one for each published module
	release tidy [-dir folder] version
	        let all modules require each other at the version, and tidy them

The modules are those of the files that git knows or would add, so changes that are
not committed count. Nothing gets into the module cache of the user.
`

// programs holds one folder for each published module, under the last element of
// its path: a program or a test that uses the module.
//
//go:embed testdata/programs
var programs embed.FS

// unpublished lists the folders of the modules that no module outside requires. Every other module
// has a program.
var unpublished = []string{"bench", "bench/peers", "examples", "examples/nats", "examples/transactions", "faults", "interop", "outboxadmin/browser", "tools", "tools/deploy", "tools/lint", "tools/vuln"}

// outsideWorkspace lists the modules that go.work leaves out: the dependencies of Helm and
// of the linter must not decide about versions of ours.
var outsideWorkspace = []string{"tools/deploy", "tools/lint", "tools/vuln"}

// targets are the systems that get the commands of the root module as programs.
var targets = []string{"linux/amd64", "linux/arm64", "darwin/amd64", "darwin/arm64", "windows/amd64"}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "release: %v\n", err)
		os.Exit(1)
	}
}

// run is main with an error.
func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New(`want check, tag or tidy; "release -h" says more`)
	}
	flags := flag.NewFlagSet("release", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // main prints the error
	dir, archives := flags.String("dir", ".", ""), flags.String("archives", "", "")
	err := flags.Parse(args[1:])
	if errors.Is(err, flag.ErrHelp) || args[0] == "-h" || args[0] == "help" {
		fmt.Fprint(out, usage)
		return flag.ErrHelp
	}
	if err != nil {
		return err
	}
	if flags.NArg() != 1 {
		return fmt.Errorf("want one version, such as v0.1.0: %q", flags.Args())
	}
	r, err := open(*dir, *archives, flags.Arg(0), out)
	if err != nil {
		return err
	}
	switch args[0] {
	case "check":
		return r.check(ctx)
	case "tag":
		return r.tag(ctx)
	case "tidy":
		return r.tidy(ctx)
	}
	return fmt.Errorf("unknown command %q: want check, tag or tidy", args[0])
}

// check runs all checks, those that take no time first.
func (r *release) check(ctx context.Context) error {
	start := time.Now()
	if err := r.checkFiles(); err != nil {
		return err
	}
	r.printf("%d modules agree on %s\n", len(r.modules), r.version)
	if err := r.checkTidy(ctx); err != nil {
		return err
	}
	temp, err := os.MkdirTemp("", "outbox-release-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temp)
	if err := r.tryAll(ctx, temp); err != nil {
		return err
	}
	r.printf("ready to tag %s (%.0f s)\n", r.version, time.Since(start).Seconds())
	return nil
}

// open reads the modules under dir. The programs and lists are those of this
// repository; tests replace them.
func open(dir, archives, version string, out io.Writer) (*release, error) {
	mine, err := fs.Sub(programs, "testdata/programs")
	if err != nil {
		return nil, err
	}
	return newRelease(config{
		dir: dir, archives: archives, targets: targets, version: version, programs: mine, out: out,
		unpublished: unpublished, outsideWorkspace: outsideWorkspace,
	})
}
