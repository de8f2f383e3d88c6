package interop

import (
	"bufio"
	"bytes"
	"context"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/stretchr/testify/require"
)

var waitsForDebezium = regexp.MustCompile(`publication and slot (\S+),`)

// The services of examples/ordering, most of which are killed, do all that they do with a relay. Nothing but the
// decoder of their records is another.
func carriesSaga(d *debezium) {
	program := filepath.Join(d.TempDir(), "ordering")
	built, err := exec.Command("go", "build", "-C", "../examples", "-o", program, "./ordering").CombinedOutput()
	require.NoError(d, err, "%s", built)
	postgres, err := url.Parse(d.db.Config().ConnString())
	require.NoError(d, err)
	postgres.Path = "/" + d.db.Config().ConnConfig.Database
	cmd := exec.CommandContext(context.Background(), program, "-debezium", "-orders=60", "-patience=60s")
	cmd.Env = append(os.Environ(), "OUTBOX_POSTGRES_URL="+postgres.String(), "OUTBOX_KAFKA_BROKERS="+strings.Join(d.brokers, ","))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	require.NoError(d, err)
	require.NoError(d, cmd.Start())
	defer func() { _ = cmd.Process.Kill() }() // after a failure; otherwise it has ended
	var out strings.Builder
	for lines := bufio.NewScanner(stdout); lines.Scan(); out.WriteString(lines.Text() + "\n") {
		if found := waitsForDebezium.FindStringSubmatch(lines.Text()); found != nil {
			d.schema, d.publication, d.name = found[1], found[1], found[1]
			d.start(nil)
		}
	}
	err = cmd.Wait()
	d.Log(out.String(), stderr.String())
	require.NoError(d, err)
	require.Contains(d, out.String(), "killed: customers, inventory, notification, orders\n")
	require.Regexp(d, `60 orders: [1-9]\d* completed, [1-9]\d* cancelled because stock was short`, out.String())
}
