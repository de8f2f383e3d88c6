package main

import (
	"flag"
	"os"
	"runtime/debug"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The help of every command is available in two ways, and fits a screen.
func TestHelp(t *testing.T) {
	t.Parallel()
	d := &commandFixture{}
	pages := map[string][]string{"": nil, "flags": {"flags"}, "failures": {"failures"}, "consumer": {"consumer"}, "dlq": {"dlq"}, "migrate": {"migrate"}}
	for _, c := range commands() {
		pages[c.name] = strings.Fields(c.name)
	}
	for name, words := range pages {
		t.Run(name, func(t *testing.T) {
			text := d.ok(t, append([]string{"help"}, words...)...)
			if name == "" {
				require.Equal(t, text, d.ok(t), "outbox alone")
			}
			require.NotEmpty(t, text)
			requireNarrow(t, text)
			require.LessOrEqual(t, strings.Count(text, "\n"), 24, text)
			if name == "flags" {
				return
			}
			for _, flag := range []string{"--help", "-h"} {
				require.Equal(t, text, d.ok(t, append(words[:len(words):len(words)], flag)...))
			}
		})
	}
}

// Flags of a command do not hide those that all take, and its words make sense.
func TestCommandsAreConsistent(t *testing.T) {
	t.Parallel()
	global := newFlagSet()
	(&globals{}).define(global)
	seen := map[string]bool{}
	for _, c := range commands() {
		require.False(t, seen[c.name], c.name)
		seen[c.name] = true
		require.NotEmpty(t, c.summary, c.name)
		takesArguments := c.synopsis != "" && !strings.HasPrefix(c.synopsis, "--") // and not only flags that are required
		require.Equal(t, c.max > 0, takesArguments, c.name)
		fs := newFlagSet()
		require.NotNil(t, c.prepare(fs), c.name)
		require.NotPanics(t, func() { (&globals{}).define(fs) }, c.name)
	}
}

// docs/cli.md is the help. A flag that an earlier command has with the same description is only named.
func TestDocs(t *testing.T) {
	t.Parallel()
	described := map[string]string{} // where, by name and description
	var b strings.Builder
	b.WriteString("# The command line\n\nWhat `outbox help` says, command by command.\n\n")
	b.WriteString("    go install github.com/outboxgo/outbox/cmd/outbox@latest\n\nUntil there is a release, [install it from a checkout](../README.md#until-there-is-a-release).\n\n## Flags that all take\n\n```text\n" + flagsHelp() + "```\n")
	b.WriteString("\nFlags that commands name behind \"also\"; \"see X:\" names flags that X describes:\n\n```text\n")
	actions := newFlagSet()
	(&auditFlags{}).define(actions)
	actions.Bool("yes", false, yesUsage)
	writeFlags(&b, actions)
	b.WriteString("```\n")
	actions.VisitAll(func(f *flag.Flag) { described[f.Name+f.Usage] = "also" })
	for _, c := range commands() {
		b.WriteString("\n## outbox " + c.name + "\n\n" + strings.ToUpper(c.summary[:1]) + c.summary[1:] + ".\n\n```text\n" + shortHelp(c, described) + "```\n")
		if c.name == doctorCommand.name {
			b.WriteString("\nAll ids. The prefix `doctor.` marks checks that could not run:\n\n```text\n" +
				strings.Join(wrap(strings.Join(findingIDs(), " "), usualWidth), "\n") + "\n```\n")
		}
	}
	requireFile(t, "../../docs/cli.md", b.String())
}

// shortHelp returns the help of a command with the names alone of flags that were described before.
func shortHelp(c command, described map[string]string) string {
	all, own := newFlagSet(), newFlagSet()
	c.prepare(all)
	var places []string
	names := map[string][]string{} // by place
	all.VisitAll(func(f *flag.Flag) {
		place := described[f.Name+f.Usage]
		if place == "" {
			described[f.Name+f.Usage] = c.name
			own.Var(f.Value, f.Name, f.Usage)
			return
		}
		if names[place] == nil {
			places = append(places, place)
		}
		names[place] = append(names[place], "--"+f.Name)
	})
	_, text, _ := strings.Cut(c.helpWith(own), "\n\n") // the heading says as much as the usage
	if c.synopsis != "" {
		text = "arguments: " + c.synopsis + "\n\n" + text
	}
	for i, flags := range places {
		place := flags
		if i == 0 {
			text += "\n"
		}
		if place != "also" {
			place = "see " + place + ":"
		}
		text += strings.Join(wrap(place+" "+strings.Join(names[flags], " "), usualWidth), "\n") + "\n"
	}
	return text
}

// requireFile compares a file, or writes it under -update.
func requireFile(t *testing.T, name, want string) {
	t.Helper()
	if *update {
		require.NoError(t, os.WriteFile(name, []byte(want), 0o644))
	}
	have, err := os.ReadFile(name)
	require.NoError(t, err)
	require.Equal(t, want, string(have), "%s: go test ./cmd/outbox -update writes it", name)
}

// A wrong call ends with 2 and a hint, before a connection is made.
func TestUsage(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ args, want string }{
		{"--json", "which command?"},
		{"status", "which database? --database URL, or $DATABASE_URL"},
		{"doctor", "which database? --database URL, or $DATABASE_URL"},
		{"topics --kafka k:1", "which database? --database URL, or $DATABASE_URL"},
		{"completion bsh", `completion "bsh": want bash, zsh, fish: did you mean "bash"?`},
		{"completion bash zsh", `completion: "zsh" is too much`},
		{"staus", `there is no command "staus": did you mean "status"?`},
		{"help staus", `did you mean "status"?`},
		{"xyzzy", `there is no command "xyzzy"`},
		{"failures", "want one of list, show, count, retry, resolve, edit, hold, release"},
		{"failures --json", "want one of list"},
		{"failures lsit", `there is no command "failures lsit": did you mean "list"?`},
		{"status --wach", `there is no flag --wach: did you mean "--watch"?`},
		{"--jsn status", `there is no flag --jsn: did you mean "--json"?`},
		{"status --every", "--every wants a value"},
		{"status --every soon", `--every "soon"`},
		{"status --every 1ms", "at least 100ms"},
		{"status --watch --check", "do not go together"},
		{"status --timeout -1s", "--timeout -1s"},
		{"status here", `status: "here" is too much`},
		{"failures show", "failures show: want ID"},
		{"failures show 17", `"17" is no id`},
		{"failures list --kind relay", "want event, delivery"},
		{"failures list --relay r --group g", "nothing has both"},
		{"failures list --relay r --kind delivery", "nothing has both"},
		{"failures list --action a --kind event", "nothing has both"},
		{"failures list --after 17", "such as event-17,delivery-4"},
		{"failures list --after event-1,event-2", "such as event-17,delivery-4"},
		{"failures count --status done", "is not counted"},
		{"audit 17", `"17" is no id`},
		{"audit --limit 1001", "--limit is 1 to 1000"},
		{"audit --before -1", "must not be negative"},
		{"failures list --status ded", `did you mean "dead"?`},
		{"failures list --since yesterday", "want how long ago"},
		{"failures list --limit 0", "--limit is 1 to 1000"},
		{"failures list --aggregate /1", "want TYPE or TYPE/ID"},
		{"failures retry event-1", "--reason is missing"},
		{"failures retry --reason x", "name an ID, flags that pick failures, or --all"},
		{"failures retry event-1 --all --reason x", "not both"},
		{"failures retry --all --yes --dry-run", "contradict"},
		{"failures retry --all --rate -1", "must not be negative"},
		{"failures resolve --all --yes", "--reason is missing"},
		{"failures edit event-1 --reason x", "--payload is missing"},
		{"failures hold --reason x", "want ID"},
		{"dlq list", "want TOPIC"},
		{"dlq list t", "which Kafka?"},
		{"dlq list t --from 0", "want PARTITION:OFFSET"},
		{"dlq list t --limit 0", "at least 1"},
		{"dlq list t --kafka k:1 --kafka-user u --kafka-mechanism pain", `did you mean "plain"?`},
		{"dlq list t --kafka k:1 --kafka-mechanism plain", "wants a user and a password"},
		{"dlq list t --kafka k:1 --kafka-user u", "wants a user and a password"},
		{"dlq list t --kafka k:1 --kafka-mechanism oauthbearer", "wants a token"},
		{"dlq list t --kafka k:1 --kafka-mechanism aws-msk-iam", "wants $AWS_ACCESS_KEY_ID"},
		{"dlq list t --kafka k:1 --kafka-cert c", "go together"},
		{"topics", "which Kafka?"},
		{"topics --partitions 0", "must be positive"},
		{"topics --retention 0", "want a time"},
		{"tail --limit -1", "must not be negative"},
		{"doctor --as wrter", `did you mean "writer"?`},
		{"doctor --only nonsense", `--only "nonsense": want ids or their beginnings: database.connect, privileges.schema`},
		{"doctor --only relay.leadr", `did you mean "relay.leader"?`},
		{"doctor --only relay,topics", `--only "topics"`},
		{"doctor --skip sever", `did you mean "server"?`},
		{"doctor --skip relay.", `--skip "relay."`},
		{"doctor --only relay --skip relay", "leave nothing to look at"},
		{"doctor --only kafka.topic", "which Kafka?"},
		{"verify --limit -1", "must not be negative"},
		{"verify --history f --since 2h", "only one of them"},
		{"verify", "which Kafka?"},
		{"verify --kafka k:1", "which database?"},
		{"migrate print --from 99", "there are versions 1 to"},
		{"status --database postgres://u:hunter22@[", "--database: that is no URL"},
	} {
		t.Run(test.args, func(t *testing.T) {
			a := (&commandFixture{change: terminal}).call(t, strings.Fields(test.args)...)
			require.Equal(t, exitUsage, a.code, a.err)
			require.Contains(t, strings.Join(strings.Fields(a.err), " "), test.want)
			require.Contains(t, a.err, "See outbox help")
			require.Empty(t, a.out)
			require.NotContains(t, a.err, "hunter22")
			requireNarrow(t, a.err)
		})
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	d := &commandFixture{}
	require.Contains(t, d.ok(t, "version"), "outbox ")
	var b build
	d.json(t, &b, exitOK, "version")
	require.Contains(t, b.Go, "go1.")
	require.Equal(t, build{"v1.2.3", "abc", "2026-02-03T04:05:06Z", true, "go1.26"}, readBuild(&debug.BuildInfo{GoVersion: "go1.26",
		Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"},
			{Key: "vcs.time", Value: "2026-02-03T04:05:06Z"}, {Key: "vcs.modified", Value: "true"}}}))
}

// Flags may come before the command, between its words and behind them.
func TestFlagsStandAnywhere(t *testing.T) {
	t.Parallel()
	fs := newFlagSet()
	var g globals
	g.define(fs)
	words, err := parse(fs, strings.Fields("a --json b --schema=s -- --kafka"), true)
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b", "--kafka"}, words)
	require.True(t, g.json)
	require.Equal(t, "s", g.schema)
	a := (&commandFixture{}).call(t, "--json", "migrate", "--schema", "x", "print")
	require.Equal(t, exitUsage, a.code, "but not within its name")
	require.Equal(t, exitOK, (&commandFixture{}).call(t, "--json", "migrate", "print").code)
}

func TestTimes(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC)
	for text, want := range map[string]time.Time{
		"90m": now.Add(-90 * time.Minute), "7d": now.Add(-7 * 24 * time.Hour),
		"2026-01-02T03:04:05Z": time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		"2026-01-02":           time.Date(2026, 1, 2, 0, 0, 0, 0, time.Local),
	} {
		var w when
		require.NoError(t, w.Set(text))
		require.True(t, want.Equal(w.time(now)), text)
	}
	require.Error(t, new(when).Set("-5m"))
	for text, d := range map[string]time.Duration{"0s": -1, "12ms": 12 * time.Millisecond, "1.2s": 1234 * time.Millisecond,
		"2m03s": 123 * time.Second, "3h04m": 184 * time.Minute, "2d05h": 53 * time.Hour} {
		require.Equal(t, text, length(d))
	}
	require.Equal(t, "-", age(time.Time{}, now))
	for text, n := range map[string]int{"0": 0, "999": 999, "1,000": 1000, "-12,345": -12345, "1,234,567": 1234567} {
		require.Equal(t, text, count(n))
	}
}

// On a terminal each row fits on a line, with any content.
func TestTable(t *testing.T) {
	t.Parallel()
	d := &commandFixture{}
	d.change = func(e *env) {
		terminal(e)
		tab := table{head: []string{"ID", "NAME", "TEXT"}, flex: []int{1, 2}}
		tab.add("1", strings.Repeat("n", 60), strings.Repeat("é", 70))
		tab.add("2", "bell\a", "red\x1b[31m")
		e.writeTable(tab)
		e.outTTY = false
		e.writeTable(tab)
	}
	out := d.call(t, "version")
	lines := strings.Split(out.out, "\n")
	requireNarrow(t, strings.Join(lines[:3], "\n"))
	require.Contains(t, lines[1], "…")
	require.NotContains(t, out.out, "\x1b")
	require.Contains(t, lines[2], "bell·")
	require.Contains(t, lines[4], strings.Repeat("é", 70), "and all of it elsewhere")
}

// Work that takes long shows a bar on a terminal and lines elsewhere, now and then.
func TestProgress(t *testing.T) {
	t.Parallel()
	for _, tty := range []bool{true, false} {
		now := time.Now()
		var b strings.Builder
		e := &env{stderr: &b, errTTY: tty, now: func() time.Time { return now }}
		p := e.progress("retried", 3000)
		for done := 100; done <= 3000; done += 100 {
			p.show(done)
			now = now.Add(300 * time.Millisecond)
		}
		p.end()
		if tty {
			require.Contains(t, b.String(), "\rretried [###############...............] 1,500 of 3,000")
			require.True(t, strings.HasSuffix(b.String(), "\r\x1b[K"), "and goes")
		} else {
			require.Equal(t, "retried 1,800 of 3,000\n", b.String())
		}
	}
}
