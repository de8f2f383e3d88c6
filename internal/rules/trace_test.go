package rules

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A program with a relay has nothing of the traces that `make spec-traces` needs.
func TestNoTraces(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	source, program := filepath.Join(dir, "main.go"), filepath.Join(dir, "program")
	require.NoError(t, os.WriteFile(source, []byte(`package main

import (
	"context"

	"github.com/outboxgo/outbox"
)

func main() {
	relay, err := outbox.NewRelay(nil, nil, outbox.RelayConfig{})
	if err == nil {
		err = relay.Run(context.Background())
	}
	panic(err)
}
`), 0o600))
	out, err := exec.Command("go", "build", "-ldflags=-w", "-o", program, source).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command("go", "tool", "nm", program).Output()
	require.NoError(t, err)
	var relay []string
	for symbol := range strings.Lines(string(out)) {
		require.NotContains(t, symbol, "outbox/internal/trace.")
		require.NotContains(t, symbol, "/internal/relay.idsOf")
		if strings.Contains(symbol, "outbox/internal/relay.(*Session).") {
			relay = append(relay, symbol)
		}
	}
	require.NotEmpty(t, relay, "the program has a relay")
}
