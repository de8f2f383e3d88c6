package main

import (
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The completion of a word depends on the words before it.
func TestCompletion(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ line, want, not string }{
		{"", "status doctor failures consumers audit dlq completion help", "list --json"},
		{"st", "status", "doctor"},
		{"failures ", "list show retry resolve", "failed status"},
		{"failures re", "retry resolve release", "list"},
		{"--schema s failures l", "list", "show"},
		{"help ", "status failures flags", "help"},
		{"help failures ", "list show", "status"},
		{"-", "--database --json", "--check"},
		{"topics --", "--create --retention --kafka", "--watch"},
		{"topics t --cr", "--create", "--check"},
		{"topics --retention ", "", "t"},
		{"failures list --status ", "waiting failed parked dead resolved done", "--type list"},
		{"failures list --kind ", "event delivery", "list"},
		{"failures list --status waiting,d", "waiting,dead", "dead"},
		{"failures list --status = de", "dead", "waiting"},
		{"topics --kafka-mechanism scram", "scram-sha-256 scram-sha-512", "plain"},
		{"topics --kafka-ca ", ":file", "topics"},
		{"completion ", "bash zsh fish", "words"},
		{"nonsense ", "", "status"},
		{"status --nonsense ", "", "status"},
	} {
		found := map[string]bool{}
		for line := range strings.Lines((&commandFixture{}).ok(t, append([]string{"completion", "words", "--"}, strings.Split(test.line, " ")...)...)) {
			word, _, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
			found[word] = true
		}
		for _, want := range strings.Fields(test.want) {
			require.True(t, found[want], "%q: %s is not in %v", test.line, want, found)
		}
		for _, not := range strings.Fields(test.not) {
			require.False(t, found[not], "%q: %s is in %v", test.line, not, found)
		}
		if test.want == "" {
			require.Empty(t, found, test.line)
		}
	}
}

// Completion reaches every command and every flag.
func TestCompletionKnowsAll(t *testing.T) {
	t.Parallel()
	for _, c := range commands() {
		words := strings.Fields(c.name)
		for n, word := range words {
			require.Contains(t, complete(append(words[:n:n], word)), word+"\t", c.name)
		}
		fs := newFlagSet()
		c.prepare(fs)
		fs.VisitAll(func(f *flag.Flag) {
			require.Contains(t, complete(append(words[:len(words):len(words)], "--"+f.Name)), "--"+f.Name+"\t")
		})
	}
}

// Bash takes the words from the script. It runs with the options of make's shell, too.
func TestBashCompletes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program := "#!/bin/sh\n" + asProgram + "=1 exec '" + os.Args[0] + "' \"$@\"\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "outbox"), []byte(program), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ca with space.pem"), nil, 0o644))
	for line, want := range map[string]string{
		"outbox failures l":             "list",
		"outbox failures list --kind d": "delivery",
		"outbox topics --cre":           "--create",
		"outbox completion ":            "bash\nzsh\nfish",
		"outbox topics --kafka-ca ca":   "ca with space.pem",
		"outbox nonsense ":              "",
	} {
		cmd := exec.Command("bash", "-euo", "pipefail", "-c", `source <(outbox completion bash)
COMP_WORDS=($1); [[ $1 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_outbox outbox "${COMP_WORDS[COMP_CWORD]}"
printf '%s\n' ${COMPREPLY[@]+"${COMPREPLY[@]}"}`, "test", line)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, want, strings.TrimSpace(string(out)), line)
	}
}
