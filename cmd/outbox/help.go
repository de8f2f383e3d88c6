package main

import (
	"flag"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

const intro = `outbox looks after a transactional outbox: PostgreSQL, relays, Kafka.
`

const outro = `outbox help COMMAND says more; outbox help flags: flags for all, exit codes.
`

// help writes the help of a command, of a group of them, or the list of all.
func help(e *env, words []string) error {
	if len(words) == 0 {
		fmt.Fprint(e.stdout, overview())
		return nil
	}
	if len(words) == 1 && words[0] == "flags" {
		fmt.Fprint(e.stdout, flagsHelp())
		return nil
	}
	if text, ok := groupHelp(words); ok {
		fmt.Fprint(e.stdout, text)
		return nil
	}
	c, _, err := find(words)
	if err != nil {
		return err
	}
	fmt.Fprint(e.stdout, c.help())
	return nil
}

// overview lists the commands. It fits a screen of 24 lines, so some groups have one line:
// outbox help migrate, for example, lists the commands of one.
func overview() string {
	var shown []command
	for _, c := range commands() {
		group, action, _ := strings.Cut(c.name, " ")
		summary, folded := foldedGroups[group]
		switch last := len(shown) - 1; {
		case !folded:
			shown = append(shown, c)
		case last >= 0 && shown[last].name == group:
			shown[last].summary += ", " + action
		default:
			shown = append(shown, command{name: group, summary: summary + ": " + action})
		}
	}
	return intro + summaries(shown) + outro
}

// foldedGroups are the groups of commands that have one line in the overview.
var foldedGroups = map[string]string{
	"archive":  "events kept after retention",
	"consumer": "consumer groups",
	"contract": "what events look like",
	"cut":      "move groups",
	"dlq":      "dead letters of topics",
	"events":   "recorded events",
	"failures": "what fails",
	"group":    "new groups",
	"migrate":  "create the tables or bring them up to date",
}

func summaries(all []command) string {
	var b strings.Builder
	width := 0
	for _, c := range all {
		width = max(width, len(c.name))
	}
	for _, c := range all {
		name := c.name
		for _, line := range wrap(c.summary, usualWidth-width-4) {
			fmt.Fprintf(&b, "  %-*s  %s\n", width, name, line)
			name = ""
		}
	}
	return b.String()
}

// groupHelp returns the help for commands that share their first word.
func groupHelp(words []string) (string, bool) {
	if len(words) != 1 {
		return "", false
	}
	var group []command
	for _, c := range commands() {
		if strings.HasPrefix(c.name, words[0]+" ") {
			group = append(group, c)
		}
	}
	text := fmt.Sprintf("usage: outbox %s COMMAND [flags]\n\n%s\noutbox help %[1]s COMMAND says more.\n", words[0], summaries(group))
	return text, len(group) > 0
}

// help returns the output of `outbox help COMMAND`. It fits a screen of 80 by 24.
func (c command) help() string {
	fs := newFlagSet()
	c.prepare(fs)
	return c.helpWith(fs)
}

// helpWith returns the help with these flags.
func (c command) helpWith(fs *flag.FlagSet) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", strings.TrimSpace(strings.Join([]string{"usage: outbox", c.name, "[flags]", c.synopsis}, " ")))
	if c.about != "" {
		fmt.Fprintf(&b, "%s\n\n", strings.TrimSpace(c.about))
	}
	writeFlags(&b, fs)
	return strings.TrimRight(b.String(), "\n") + "\n"
}

func flagsHelp() string {
	fs := newFlagSet()
	(&globals{}).define(fs)
	var b strings.Builder
	b.WriteString("All commands take these flags, before their name or behind it:\n\n")
	writeFlags(&b, fs)
	b.WriteString(`
Mechanisms: plain, scram-sha-256, scram-sha-512, oauthbearer, aws-msk-iam (with
$AWS_ACCESS_KEY_ID, $AWS_SECRET_ACCESS_KEY, $AWS_SESSION_TOKEN, $AWS_REGION).
Passwords: $PGPASSWORD, $PGPASSFILE or in the URL; $KAFKA_PASSWORD. None is
shown.

Exit codes: 0 done; 1 error; 2 wrong usage; 3 problems found (doctor, --check).
`)
	return b.String()
}

// writeFlags writes a line for each flag.
func writeFlags(w io.Writer, fs *flag.FlagSet) {
	var names, usages []string
	width := 0
	fs.VisitAll(func(f *flag.Flag) {
		value, usage := flag.UnquoteUsage(f)
		usage = strings.TrimPrefix(usage, value+" ") // the word only names the value
		name := "--" + f.Name
		if !isSwitch(f) && value != "" {
			name += " " + value
		}
		names, usages = append(names, name), append(usages, usage)
		width = max(width, utf8.RuneCountInString(name))
	})
	for i, name := range names {
		fmt.Fprintf(w, "  %s%s  %s\n", name, strings.Repeat(" ", width-utf8.RuneCountInString(name)), usages[i])
	}
}
