package main

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"strings"
)

// completionCommand is a function, because its command needs the list of all commands.
func completionCommand() command {
	return command{
		name: "completion", synopsis: "SHELL", min: 1, max: maxWords,
		summary: "complete command lines in bash, zsh or fish",
		about: `
Prints a script. For every shell, add a line:

  ~/.bashrc                   source <(outbox completion bash)
  ~/.zshrc, behind compinit   source <(outbox completion zsh)
  ~/.config/fish/config.fish  outbox completion fish | source`,
		prepare: func(*flag.FlagSet) func(context.Context, *env) error { return completion },
	}
}

// maxWords bounds the words of a command line that are read.
const maxWords = 1000

// askWords precedes the words of a command line, up to the word at the cursor.
const askWords = "words"

func completion(_ context.Context, e *env) error {
	if e.args[0] == askWords {
		fmt.Fprint(e.stdout, complete(e.args[1:]))
		return nil
	}
	if len(e.args) > 1 {
		return usagef("completion: %q is too much", e.args[1])
	}
	script, known := completionScripts[e.args[0]]
	if !known {
		return oneOf("completion", e.args[0], shells)
	}
	fmt.Fprint(e.stdout, script)
	return nil
}

// askFiles is the answer that the shell shall complete names of files.
const askFiles = ":file\n"

// complete returns the possible values of the last word, each with a tab and its meaning, or askFiles.
func complete(words []string) string {
	if len(words) == 0 {
		return ""
	}
	before, word := words[:len(words)-1], words[len(words)-1]
	names, fs, expects := readWords(before)
	var found [][2]string
	switch {
	case expects != nil:
		value, usage := flag.UnquoteUsage(expects)
		if value == "FILE" {
			return askFiles
		}
		found = flagValues(expects.Name, strings.TrimPrefix(usage, value+" "), value, word)
	case strings.HasPrefix(word, "-"):
		fs.VisitAll(func(f *flag.Flag) {
			value, usage := flag.UnquoteUsage(f)
			found = append(found, [2]string{"--" + f.Name, strings.TrimPrefix(usage, value+" ")})
		})
	default:
		found = nextWords(names)
	}
	var b strings.Builder
	for _, f := range found {
		if strings.HasPrefix(f[0], word) {
			fmt.Fprintf(&b, "%s\t%s\n", f[0], f[1])
		}
	}
	return b.String()
}

// readWords returns the words without flags and their values, the flags that may follow, and the flag whose
// value comes next, or nil.
func readWords(words []string) (names []string, fs *flag.FlagSet, expects *flag.Flag) {
	fs = newFlagSet()
	(&globals{}).define(fs)
	for _, word := range words {
		switch {
		case word == "=" && expects != nil: // bash makes three words of --flag=value
			continue
		case expects != nil:
			expects = nil
			continue
		case !strings.HasPrefix(word, "-"):
			names = append(names, word)
			if c, rest, err := find(names); err == nil && len(rest) == 0 {
				fs = newFlagSet()
				c.prepare(fs)
				(&globals{}).define(fs)
			}
			continue
		}
		name, _, hasValue := strings.Cut(strings.TrimLeft(word, "-"), "=")
		if f := fs.Lookup(name); f != nil && !hasValue && !isSwitch(f) {
			expects = f
		}
	}
	return names, fs, expects
}

// flagValues returns the possible values of a flag, if they are few. The values of a LIST are in its usage.
// A value with commas is completed behind the last comma.
func flagValues(name, usage, value, word string) (found [][2]string) {
	before := word[:strings.LastIndex(word, ",")+1]
	switch {
	case name == "kafka-mechanism":
		return described(mechanisms, "")
	case name == "kind":
		return described(kinds, "")
	case value == "LIST":
		list, _, _ := strings.Cut(usage, " ")
		return described(strings.Split(list, ","), before)
	}
	return nil
}

func described(words []string, prefix string) (found [][2]string) {
	for _, w := range words {
		found = append(found, [2]string{prefix + w, ""})
	}
	return found
}

// nextWords returns the words that may follow the words of a name, each with its purpose.
func nextWords(names []string) (found [][2]string) {
	helps := len(names) > 0 && names[0] == "help"
	if helps {
		names = names[1:]
	}
	for _, c := range commands() {
		words := strings.Fields(c.name)
		if len(words) <= len(names) || !slices.Equal(words[:len(names)], names) {
			continue
		}
		next, meaning := words[len(names)], c.summary
		if len(words) > len(names)+1 {
			meaning = strings.ReplaceAll(foldedGroups[next], "\n", " ")
		}
		if !slices.ContainsFunc(found, func(f [2]string) bool { return f[0] == next }) {
			found = append(found, [2]string{next, meaning})
		}
	}
	switch {
	case len(names) > 0:
	case helps:
		found = append(found, [2]string{"flags", "those that all commands take"})
	default:
		found = append(found, [2]string{"help", "what a command does"})
	}
	if slices.Equal(names, []string{"completion"}) {
		found = described(shells, "")
	}
	return found
}

var shells = []string{"bash", "zsh", "fish"}

// completionScripts ask `outbox completion words`. They run with the oldest bash and zsh that
// macOS has.
var completionScripts = map[string]string{
	"bash": `# Completes command lines of outbox: source <(outbox completion bash)
_outbox() {
  local line
  COMPREPLY=()
  while IFS= read -r line; do
    if [ "$line" = :file ]; then
      while IFS= read -r line; do COMPREPLY+=("$line"); done < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
      return
    fi
    COMPREPLY+=("${line%%$'\t'*}")
  done < <("$1" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _outbox outbox
`,
	"zsh": `# Completes command lines of outbox: source <(outbox completion zsh), behind compinit
_outbox() {
  local line
  local -a found
  for line in ${(f)"$(${words[1]} completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"}; do
    if [[ $line == :file ]]; then
      _files
      return
    fi
    found+=("${${line%%$'\t'*}//:/\\:}${${line#*$'\t'}:+:${line#*$'\t'}}")
  done
  _describe outbox found
}
compdef _outbox outbox
`,
	"fish": `# Completes command lines of outbox: outbox completion fish | source
function __outbox_words
    set -l line (commandline -opc)
    set -l program $line[1]
    set -l word (commandline -ct)
    set -e line[1]
    $program completion words -- $line "$word" 2>/dev/null
end
complete -c outbox -f -a '(__outbox_words | string match -v :file)'
complete -c outbox -n '__outbox_words | string match -q :file' -F
`,
}
