// Testall runs the tests of several Go modules, one after the other.
//
//	testall module... [-left module...] [-rest file] -- [arguments of go test]
//	testall -only file [-unraced module...] -- [arguments of go test]
//
// A module that fails does not keep the others from running. It prints what go test
// prints, failures as soon as they happen, and a summary at the end: what failed in
// which module, how long each module and the slowest tests took, and what was skipped
// and why. The modules after -left are not tested; the summary has the number of their tests.
// -rest writes to a file which modules and tests were left for make test-all, and -only tests
// what such a file has. The modules after -unraced get no -race.
//
// When all modules have ended, a test that failed is run once more by itself, and so is
// a package that ended early or failed without a failed test. What passes then is
// printed as FLAKY with its first output and does not count as failed.
//
// It exits with 0 if all tests passed, the first or the second time, 1 if some failed,
// 2 if its arguments are wrong, and 128 + n if signal n ended it.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"regexp"
	"slices"
	"syscall"
	"time"

	"github.com/outboxgo/outbox/tools/internal/proc"
)

// leftFlag stands before the modules that are left for another run, restFlag before the file that gets the names of
// what is left, onlyFlag before one that has them, and unracedFlag before the modules without the race detector.
const (
	leftFlag    = "-left"
	restFlag    = "-rest"
	onlyFlag    = "-only"
	unracedFlag = "-unraced"
)

const (
	exitFailed = 1
	exitUsage  = 2
	exitSignal = 128 // plus the number of the signal
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// arguments are what the program is told.
type arguments struct {
	tested  []*selection
	left    []string // modules
	rest    string   // a file; may be ""
	unraced []string // modules
	flags   []string // of go test
}

const usage = "usage: testall module... [-left module...] [-rest file] -- [arguments of go test]\n" +
	"       testall -only file [-unraced module...] -- [arguments of go test]"

var errUsage = errors.New(usage)

// runFlag matches the flag that selects tests.
var runFlag = regexp.MustCompile(`^--?(test\.)?run(=.*)?$`)

func parse(args []string) (a arguments, err error) {
	dash := slices.Index(args, "--")
	if dash < 1 {
		return a, errUsage
	}
	args, a.flags = args[:dash], args[dash+1:]
	if args[0] == onlyFlag {
		if len(args) > 3 && args[2] == unracedFlag {
			args, a.unraced = args[:2], args[3:]
		}
		if len(args) != 2 {
			return a, errUsage
		}
		if slices.ContainsFunc(a.flags, runFlag.MatchString) {
			return a, fmt.Errorf("%s selects the tests, so -run cannot\n%w", onlyFlag, errUsage)
		}
		a.tested, err = readRest(args[1])
		return a, err
	}
	if i := slices.Index(args, restFlag); i >= 0 {
		if len(args) != i+2 {
			return a, errUsage
		}
		args, a.rest = args[:i], args[i+1]
	}
	if i := slices.Index(args, leftFlag); i >= 0 {
		args, a.left = args[:i], args[i+1:]
	}
	for _, dir := range args {
		a.tested = append(a.tested, &selection{dir: dir})
	}
	if len(a.tested) == 0 {
		return a, errUsage
	}
	return a, nil
}

// raceFlag matches the flag that turns the race detector on.
var raceFlag = regexp.MustCompile(`^--?race(=true)?$`)

// flagsOf returns the arguments of go test for a module.
func (a arguments) flagsOf(dir string) []string {
	if !slices.Contains(a.unraced, dir) {
		return a.flags
	}
	return slices.DeleteFunc(slices.Clone(a.flags), raceFlag.MatchString)
}

// run is main with an exit code.
func run(args []string, stdout, stderr io.Writer) int {
	asked, err := parse(args)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return exitUsage
	}
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	defer signal.Stop(signals)

	var results []*module
	stopped := syscall.Signal(0)
	for _, of := range asked.tested {
		fmt.Fprintf(stdout, "== %s\n", of.dir)
		m := newModule(of, asked.flagsOf(of.dir), stdout)
		stopped = m.run(signals, stderr)
		results = append(results, m)
		if stopped != 0 {
			break
		}
	}
	var flaky []*suspect
	if stopped == 0 {
		flaky, stopped = runAgain(suspects(results), signals, stdout, stderr)
	}
	summarize(stdout, results, asked.tested[len(results):], asked.left, flaky)
	if asked.rest != "" {
		err = writeRest(asked.rest, results, asked.left)
	}
	switch {
	case stopped != 0:
		return exitSignal + int(stopped)
	case err != nil:
		fmt.Fprintln(stderr, err)
		return exitFailed
	case slices.ContainsFunc(results, (*module).failed):
		return exitFailed
	}
	return 0
}

// run runs go test in the module's directory and reads its events. A signal is passed
// on to go test and to what it started, and then returned; a second one kills them.
func (m *module) run(signals <-chan os.Signal, stderr io.Writer) (stoppedBy syscall.Signal) {
	began := time.Now()
	defer func() { m.took = time.Since(began) }()
	cmd := exec.Command("go", slices.Concat([]string{"test", "-json"}, m.args, m.patterns)...)
	cmd.Dir, cmd.Stderr = m.dir, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // so that a signal reaches the tests, too
	events, output, err := os.Pipe()
	if err != nil {
		m.err = fmt.Errorf("make a pipe: %w", err)
		return 0
	}
	defer events.Close()
	cmd.Stdout = output
	ended, err := proc.Launch(cmd, syscall.SIGKILL)
	output.Close()
	if err != nil {
		m.err = fmt.Errorf("start go test: %w", err)
		return 0
	}
	read := make(chan error, 1)
	go func() { read <- m.read(events) }()
	stoppedBy, err = m.await(cmd.Process.Pid, ended, signals)
	m.err = <-read
	var exit *exec.ExitError
	if err != nil && (!errors.As(err, &exit) || !m.failed() && stoppedBy == 0) {
		m.err = errors.Join(m.err, fmt.Errorf("go test: %w", err))
	}
	return stoppedBy
}

// await waits for go test to end, and says from time to time what it is doing.
func (m *module) await(pid int, ended <-chan error, signals <-chan os.Signal) (stoppedBy syscall.Signal, err error) {
	beat := time.NewTicker(quietTime)
	defer beat.Stop()
	for {
		select {
		case err := <-ended:
			return stoppedBy, err
		case s := <-signals:
			sig := s.(syscall.Signal) // as all are that Notify was asked for
			if stoppedBy == 0 {
				stoppedBy = sig
			} else {
				sig = syscall.SIGKILL
			}
			_ = syscall.Kill(-pid, sig) // it may just have ended
		case <-beat.C:
			m.beat()
		}
	}
}
