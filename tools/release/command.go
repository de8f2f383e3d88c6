package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/outboxgo/outbox/tools/internal/progress"
)

// goTool runs the go command.
type goTool struct {
	env []string  // added to that of this process
	out io.Writer // for a line now and then while it runs
}

// run returns what the command printed to its standard output, without the last
// newline. An error holds what it printed elsewhere.
func (g goTool) run(ctx context.Context, dir string, args ...string) (string, error) {
	return output(ctx, g.out, dir, g.env, "go", args...)
}

func output(ctx context.Context, progressTo io.Writer, dir string, env []string, name string, args ...string) (string, error) {
	shown := shorten(append([]string{filepath.Base(name)}, args...))
	stop := progress.Heartbeat(progressTo, func() string { return shown })
	defer stop()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s%s", shown, err, &stdout, &stderr)
	}
	return strings.TrimSuffix(stdout.String(), "\n"), nil
}

// shorten returns a command line that fits on a line.
func shorten(words []string) string {
	line := strings.Join(words, " ")
	if len(line) > 60 {
		line = line[:60] + " …"
	}
	return line
}
