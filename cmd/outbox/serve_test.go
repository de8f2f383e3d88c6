package main

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// startPages runs outbox serve as a process, and returns where it listens.
func (d *commandFixture) startPages(t testing.TB, args ...string) (p *relayRun, address string) {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(program, append([]string{"serve", "--listen", "127.0.0.1:0", "--json"}, args...)...)
	cmd.Env = []string{"DATABASE_URL=" + d.relayURL(), "OUTBOX_SCHEMA=" + d.schema, asProgram + "=1", "HOME=" + t.TempDir()}
	p = startProcess(t, cmd)
	return p, p.awaitLine("outbox: serves the operators' page")["listen"].(string)
}

func writeFile(t testing.TB, text string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// A process serves pages of several schemas and databases. Each has its own events, its name in the title, and
// links to the others. A database that does not answer leaves the other pages as they are.
func TestServe(t *testing.T) {
	t.Parallel()
	shop, bank := newShop(t), newShop(t)
	users := writeFile(t, "operator lee fedcba9876543210\n")
	databases := writeFile(t, "# name schema URL\nshop \""+shop.schema+"\"\nbank  \""+bank.schema+"\" "+bank.relayURL()+"\n\ngone public postgres://kim:hidden-password@127.0.0.1:1/db?connect_timeout=1\n")
	shop.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at) VALUES ('of-the-shop', 'host', 1, now() + interval '1 h')`)
	bank.exec(t, `INSERT INTO {s}.outbox_lease (name, holder, epoch, expires_at) VALUES ('of-the-bank', 'host', 1, now() + interval '1 h')`)
	p, address := shop.startPages(t, "--page", users, "--databases", databases)
	ask := func(path string) (int, string) {
		return get(t, address, path, func(r *http.Request) { r.SetBasicAuth("lee", "fedcba9876543210") })
	}
	status, body := ask("/outbox/shop/")
	require.Equal(t, http.StatusOK, status, body)
	require.Contains(t, body, "of-the-shop")
	require.NotContains(t, body, "of-the-bank")
	require.Contains(t, body, `<title>Overview – shop – outbox</title>`)
	require.Contains(t, body, `<a href="./../bank/">bank</a>`)
	status, body = ask("/outbox/bank/failed/event-1")
	require.Equal(t, http.StatusNotFound, status)
	require.Contains(t, body, `<a href="./../../shop/">shop</a>`)
	status, body = ask("/outbox/bank/")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "of-the-bank")
	status, _ = ask("/outbox/gone/")
	require.Equal(t, http.StatusServiceUnavailable, status)
	status, body = ask("/outbox/")
	require.Equal(t, http.StatusOK, status, "it leads to the first page")
	require.Contains(t, body, "of-the-shop")
	request, err := http.NewRequest(http.MethodGet, "http://"+address+"/outbox/", nil)
	require.NoError(t, err)
	request.SetBasicAuth("guest", "a-guess-0123456789")
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusUnauthorized, response.StatusCode)
	require.Equal(t, "no-store", response.Header.Get("Cache-Control"), "it has the headers of a page")
	require.Equal(t, "guest", p.awaitLine("outboxadmin: not authorized")["name"], "a guess is logged")
	for _, path := range []string{"/outbox/bank/", "/outbox/"} {
		status, _ = get(t, address, path, nil)
		require.Equal(t, http.StatusUnauthorized, status, path)
	}
	status, _ = get(t, address, "/livez", nil)
	require.Equal(t, http.StatusOK, status)
	require.NotContains(t, p.log.String(), "hidden-password")
	code, took := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
	require.Less(t, took, stopTime)
}

// Without a file of databases, the page is that of the schema of the flags.
func TestServeOne(t *testing.T) {
	t.Parallel()
	d := newShop(t)
	d.record(t, "only-here")
	_, address := d.startPages(t, "--page", writeFile(t, "reader kim 0123456789abcdef\n"))
	status, body := get(t, address, "/outbox/events", func(r *http.Request) { r.SetBasicAuth("kim", "0123456789abcdef") })
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, body, "only-here")
	require.Contains(t, body, "<title>Events – outbox</title>")
}

// Invalid files are refused before the process listens, without their words.
func TestServeReadsFiles(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"":                                    "no line NAME SCHEMA",
		"shop":                                "line 1: want two or three words",
		"shop public postgres://x:secret@h y": "want two or three words",
		"Shop public":                         "the name is not of a-z",
		"../x public":                         "the name is not of a-z",
		"shop public\nshop other":             "line 2: an earlier line has the name",
	} {
		_, err := readTargets(writeFile(t, text))
		require.ErrorContains(t, err, want, text)
		require.NotContains(t, err.Error(), "secret")
	}
	_, err := readTargets(filepath.Join(t.TempDir(), "none"))
	require.Error(t, err)
	d := &commandFixture{vars: map[string]string{"DATABASE_URL": "postgres://localhost/x"}}
	require.Contains(t, d.call(t, "serve").err, "--page FILE")
	require.Contains(t, d.call(t, "serve", "--page", writeFile(t, "reader kim short")).err, "at least 16 characters")
	users := writeFile(t, "reader kim 0123456789abcdef\n")
	require.Contains(t, d.call(t, "serve", "--page", users, "--stale-after", "-1s").err, "must not be negative")
	bad := d.call(t, "serve", "--page", users, "--databases", writeFile(t, "shop public postgres://:::secret"))
	require.Equal(t, exitUsage, bad.code)
	require.NotContains(t, bad.err, "secret")
}
