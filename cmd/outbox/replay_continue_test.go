package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
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
	return d.replayProcess(t, flags...), keys
}

// replayProcess starts a process that replays what was recorded.
func (d *commandFixture) replayProcess(t *testing.T, flags ...string) *relayRun {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(program, append([]string{"replay", "--since", "1h", "--yes", "--reason", "it's late", "--operator", "kim"}, flags...)...)
	cmd.Env = append(d.variables(), asProgram+"=1", "HOME="+t.TempDir())
	return startProcess(t, cmd)
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

// A group that runs meanwhile handles each event once more, also if a replay with --again is killed after the group has
// handled events again, and is continued by the command that it has printed.
func TestReplayAgainGoesOn(t *testing.T) {
	t.Parallel()
	d := newShop(t).withKafka(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 1)
	testenv.CreateTopic(t, d.brokers, outbox.DeadLetterTopic(d.topic), 1)
	want := map[string]int{}
	for n := range 40 {
		want[fmt.Sprint("key ", n)] = 1
	}
	d.record(t, slices.Collect(maps.Keys(want))...)
	d.relay(t)
	group := "stats-" + d.topic
	handled := d.startGroup(t, group)
	await := func(what func(map[string]int, int) bool) {
		t.Helper()
		require.Eventually(t, func() bool { return what(handled()) }, testenv.Patience, 10*time.Millisecond)
	}
	await(func(byKey map[string]int, _ int) bool { return maps.Equal(want, byKey) })

	p := d.replayProcess(t, "--group", group, "--again", "--rate", "10")
	await(func(_ map[string]int, total int) bool { return total >= len(want)+5 })
	code, _ := p.stop(syscall.SIGKILL)
	require.Equal(t, -1, code)
	command := d.goOn(t, p.log.String())

	d.record(t, "last") // behind all that was sent again
	await(func(byKey map[string]int, _ int) bool { return byKey["last"] > 0 })
	for key := range want {
		want[key] = 2
	}
	want["last"] = 1
	byKey, _ := handled()
	require.Equal(t, want, byKey)
	require.Regexp(t, ` --again=2\d\d\d-\S+Z `, command)
}

// startGroup runs a consumer group. The function returns how many events of each key it has handled, and of all.
func (d *commandFixture) startGroup(t *testing.T, group string) func() (byKey map[string]int, total int) {
	t.Helper()
	events, err := outbox.NewRegistry("test", outbox.Event("test.thing.happened.v1", "Thing", happened.aggregateID).Topic(d.topic))
	require.NoError(t, err)
	var mu sync.Mutex
	handled, all := map[string]int{}, 0
	c, err := outbox.NewConsumer(d.db, testenv.KafkaOpts(d.brokers), events, group, outbox.ConsumerConfig{
		HandlerConfig: outbox.HandlerConfig{Schema: d.schema, Logger: slog.New(slog.DiscardHandler), From: outbox.FromStart},
	}, outbox.Handle("COUNTED", func(_ context.Context, _ pgx.Tx, e happened, _ outbox.Metadata) error {
		mu.Lock()
		defer mu.Unlock()
		handled[e.Key]++
		all++
		return nil
	}))
	require.NoError(t, err)
	testenv.Run(t, c.Run)
	return func() (map[string]int, int) {
		mu.Lock()
		defer mu.Unlock()
		return maps.Clone(handled), all
	}
}

// A relative time is another one when the replay goes on, so --after needs absolute times. In a dead-letter topic
// --from is what --after is.
func TestReplayAfterNeedsAbsoluteTimes(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.vars["KAFKA_BROKERS"] = strings.Join(d.brokers, ",")
	for _, args := range []string{"replay --since 2h --after 5", "replay --until 2h --after 5 --yes --reason x",
		"replay --since 2026-01-02 --group g --again=2h --after 5",
		"dlq replay a.dlq --since 2h --from 0:5", "dlq replay a.dlq --until 2h --from 0:5 --yes --reason x"} {
		a := d.call(t, strings.Fields(args)...)
		require.Equal(t, exitUsage, a.code, "%s: %s%s", args, a.out, a.err)
		require.Regexp(t, `--(since|until|again) 2h0m0s .*absolute.*2\d\d\d-`, strings.Join(strings.Fields(a.err), " "), args)
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
	for _, again := range []string{"--again", "--again=2h", "--again=2026-01-02"} {
		require.Regexp(t, `these times: --until `+instant+` --again=2\d\d\d-\S+Z\n`, d.ok(t, "replay", "--group", "g", again))
	}
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
