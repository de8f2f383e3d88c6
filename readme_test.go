package outbox_test

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// What the README shows behind its program is compiled, line by line: the tests are
// those of the shop.
func TestReadmeBlocks(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	indent := regexp.MustCompile(`(?m)^\t+`)
	var compiled string
	for _, name := range []string{"example_test.go", "outboxotel/example_test.go", "outboxadmin/example_test.go", "examples/shop/shop_test.go"} {
		source, err := os.ReadFile(name)
		require.NoError(t, err)
		compiled += indent.ReplaceAllString(string(source), "")
	}
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllSubmatch(readme, -1)[1:] // behind the program
	require.NotEmpty(t, blocks)
	for _, block := range blocks {
		require.Contains(t, compiled, indent.ReplaceAllString(string(block[1]), ""))
	}
}

// The README's program is the quickstart, letter by letter, and works when it is
// copied into an empty module that requires this one.
func TestReadmeProgram(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	program := regexp.MustCompile("(?s)```go\n(.*?)```").FindSubmatch(readme)[1]
	quickstart, err := os.ReadFile("examples/quickstart/main.go")
	require.NoError(t, err)
	require.Equal(t, string(quickstart), string(program))
	require.LessOrEqual(t, strings.Count(string(program), "\n"), 60)

	brokers := strings.Join(testenv.Brokers(t), ",")
	database := testenv.OtherDatabase(t).Config()
	here, err := os.Getwd()
	require.NoError(t, err)
	dir := t.TempDir()
	mod := fmt.Sprintf("module try\n\ngo 1.26\n\nrequire github.com/outboxgo/outbox v0.0.0\n\nreplace github.com/outboxgo/outbox => %s\n", here)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte(mod), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), program, 0o600))
	dsn, err := url.Parse(database.ConnString())
	require.NoError(t, err)
	dsn.Path = database.ConnConfig.Database
	ctx, cancel := context.WithTimeout(background, 5*time.Minute)
	defer cancel()
	for _, args := range [][]string{{"mod", "tidy"}, {"run", "."}} {
		cmd := exec.CommandContext(ctx, "go", args...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "DATABASE_URL="+dsn.String(), "KAFKA_BROKERS="+brokers, "GOWORK=off")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "go %s: %s", args[0], out)
		if args[0] == "run" {
			require.Contains(t, string(out[:min(len(out), 1000)]), "arrived: gopher ")
		}
	}
}
