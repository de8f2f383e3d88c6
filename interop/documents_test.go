package interop

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// document returns a page of the documents.
func document(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../docs/" + name)
	require.NoError(t, err)
	return string(text)
}

// blocks returns the code of a language in a page.
func blocks(t *testing.T, page, language string) (found []string) {
	t.Helper()
	for _, block := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(document(t, page), -1) {
		found = append(found, block[1])
	}
	require.NotEmpty(t, found, "%s has no %s", page, language)
	return found
}

// program returns a command, which fails the test where it is missing. Its libpq finds the tables of a schema.
func program(t *testing.T, db *pgxpool.Pool, schema, name string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := exec.LookPath(name)
	require.NoError(t, err, "tools/needs.sh test says how to install it")
	cmd := exec.CommandContext(t.Context(), path, args...)
	cmd.Env = os.Environ()
	if db != nil {
		c := db.Config().ConnConfig
		search := strings.ReplaceAll(pgx.Identifier{schema}.Sanitize(), " ", `\ `)
		cmd.Env = append(cmd.Env, "PGHOST="+c.Host, fmt.Sprintf("PGPORT=%d", c.Port), "PGUSER="+c.User, "PGPASSWORD="+c.Password,
			"PGDATABASE="+c.Database, "PGOPTIONS=-csearch_path="+search)
	}
	return cmd
}

// python runs a program, with a package that the Python of the system has where another one comes first in PATH.
func python(t *testing.T, db *pgxpool.Pool, schema, module, text, stdin string, args ...string) string {
	t.Helper()
	var missing []string
	for _, name := range []string{"python3", "/usr/bin/python3"} {
		if out, err := exec.CommandContext(t.Context(), name, "-c", "import "+module).CombinedOutput(); err != nil {
			missing = append(missing, fmt.Sprintf("%s: %v %s", name, err, out))
			continue
		}
		cmd := program(t, db, schema, name, append([]string{"-c", text}, args...)...)
		cmd.Stdin = strings.NewReader(stdin)
		return run(t, cmd)
	}
	require.Fail(t, "no Python with "+module+": tools/needs.sh test says how to install it", missing)
	return ""
}

func run(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	require.NoError(t, cmd.Run(), "%s%s", out.String(), errs.String())
	return out.String()
}

// orders makes the table of the examples.
func orders(t *testing.T, db *pgxpool.Pool, schema string, ids ...string) {
	t.Helper()
	table := pgx.Identifier{schema, "orders"}.Sanitize()
	exec := func(sql string, args ...any) {
		_, err := db.Exec(context.Background(), sql, args...)
		require.NoError(t, err)
	}
	exec(`CREATE TABLE ` + table + ` (id text PRIMARY KEY, paid bool NOT NULL DEFAULT false)`)
	exec(`INSERT INTO `+table+` (id) SELECT unnest($1::text[])`, ids)
}

func atoi(t *testing.T, text string) int {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(text))
	require.NoError(t, err)
	return n
}
