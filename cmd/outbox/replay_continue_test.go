package main

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// continuing finds the command that a replay prints.
var continuing = regexp.MustCompile(`(?m)to go on: (outbox replay .*)$`)

// startReplay records events and starts a process that replays them slowly, with pipes as its outputs.
func (d *commandFixture) startReplay(t *testing.T, events int, flags ...string) (p *relayRun, keys []string) {
	t.Helper()
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	for n := range events {
		keys = append(keys, fmt.Sprint("key ", n))
	}
	d.record(t, keys...)
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(program, append([]string{"replay", "--since", "1h", "--yes", "--reason", "it's late", "--operator", "kim"}, flags...)...)
	cmd.Env = append(d.variables(), asProgram+"=1", "HOME="+t.TempDir())
	return startProcess(t, cmd), keys
}

// goOn runs the command that the output of a replay ends with, in a shell.
func (d *commandFixture) goOn(t *testing.T, output string) string {
	t.Helper()
	found := continuing.FindAllStringSubmatch(output, -1)
	require.NotEmpty(t, found, output)
	command := found[len(found)-1][1]
	require.NotContains(t, command, "1h", "the window has moved when the command runs")
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command("sh", "-c", "outbox() { '"+program+"' \"$@\"; }\n"+command)
	cmd.Env = append(d.variables(), asProgram+"=1", "HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s", command, out)
	return command
}

// A replay that was interrupted is continued by the command that it has printed, and misses no event: also when it is
// killed, with its output in a pipe, and with --json.
func TestReplayGoesOn(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		flags  []string
		signal syscall.Signal
		lines  int // printed before the signal
		code   int
	}{
		"stopped":          {nil, syscall.SIGTERM, 1, exitError},
		"stopped, as JSON": {[]string{"--json"}, syscall.SIGTERM, 1, exitError},
		"killed":           {nil, syscall.SIGKILL, 2, -1},
		"killed, as JSON":  {[]string{"--json"}, syscall.SIGKILL, 2, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newShop(t)
			p, keys := d.startReplay(t, 80, append(tt.flags, "--rate", "10")...)
			require.Eventually(t, func() bool {
				return len(continuing.FindAllString(p.log.String(), -1)) >= tt.lines
			}, testenv.Patience, 10*time.Millisecond, "no command to go on: %s", p.log.String())
			d.received(t, keys[0])
			code, _ := p.stop(tt.signal)
			require.Equal(t, tt.code, code)
			command := d.goOn(t, p.log.String())
			if tt.lines > 1 {
				require.NotContains(t, command, "--after 0")
				require.Contains(t, command, "--after ")
			}
			found := d.received(t, keys...)
			total := 0
			for _, key := range keys {
				total += found[key]
			}
			require.Less(t, total, 2*len(keys), "events that were sent long before are not sent again")
		})
	}
}

// A relative time is another one when the replay goes on, so --after needs absolute times. In a dead-letter topic
// --from is what --after is.
func TestReplayAfterNeedsAbsoluteTimes(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	for _, args := range []string{"replay --since 2h --after 5", "replay --until 2h --after 5 --yes --reason x",
		"dlq replay a.dlq --since 2h --from 0:5", "dlq replay a.dlq --until 2h --from 0:5 --yes --reason x"} {
		a := d.call(t, strings.Fields(args)...)
		require.Equal(t, exitUsage, a.code, "%s: %s%s", args, a.out, a.err)
		require.Regexp(t, `--(since|until) 2h0m0s .*absolute.*2\d\d\d-`, strings.Join(strings.Fields(a.err), " "), args)
	}
	d.ok(t, "replay", "--since", "2026-01-02", "--after", "5")
}

// A dry run says which absolute times its relative ones are, because a later run with --yes would choose other events.
func TestDryRunsPrintAbsoluteTimes(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	const instant = `2\d\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z`
	d.record(t, "a")
	require.Regexp(t, `--since `+instant+` --until `+instant+`\n`, d.ok(t, "replay", "--since", "2h"))
	require.Regexp(t, `these times: --until `+instant+`\n`, d.ok(t, "replay"))
	require.Regexp(t, `these times: --since `+instant+`\n`, d.ok(t, "failures", "retry", "--since", "2h"))
	require.Regexp(t, `these times: --since `+instant+` --until `+instant+`\n`, d.ok(t, "failures", "resolve", "--since", "2h", "--until", "1h"))
	require.NotContains(t, d.ok(t, "failures", "retry", "--since", "2026-01-02"), "these times")
	testenv.CreateTopic(t, d.brokers, d.topic+".dlq", 1)
	require.Regexp(t, `these times: --since `+instant+`\n`, d.ok(t, "dlq", "replay", d.topic+".dlq", "--since", "2h"))
	for _, args := range [][]string{{"replay", "--since", "2h"}, {"failures", "retry", "--since", "2h"}, {"dlq", "replay", d.topic + ".dlq", "--since", "2h"}} {
		a := d.call(t, append(args, "--json")...)
		require.Equal(t, exitOK, a.code, a.err)
		require.Regexp(t, `"since": "`+instant+`"`, a.out, args)
	}
}
