package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/contract"
)

// contractFixture is the contract of a registry in the tests of outboxcontract.
const contractFixture = "../../outboxcontract/testdata/contract.json"

// newContractFixture returns one whose commands have the environment of the go command.
func newContractFixture() *commandFixture {
	d := &commandFixture{vars: map[string]string{}}
	for _, variable := range os.Environ() {
		name, value, _ := strings.Cut(variable, "=")
		d.vars[name] = value
	}
	return d
}

// The registry may be in a package or in a program, and its name exported or not.
func TestContractExport(t *testing.T) {
	t.Parallel()
	d := newContractFixture()
	dir := t.TempDir()
	file := filepath.Join(dir, "shop.json")
	require.Empty(t, d.ok(t, "contract", "export", "--out", file, "../../examples/shop", "Events"))
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(text), d.ok(t, "contract", "export", "../../examples/shop", "Events"))
	require.Contains(t, string(text), `"acme.order.placed.v1"`)
	require.Contains(t, d.ok(t, "contract", "export", "../../examples/guide", "registry"), `"orderId"`)
	entries, err := os.ReadDir("../../examples/shop")
	require.NoError(t, err)
	for _, entry := range entries {
		require.NotContains(t, entry.Name(), contractFile)
	}

	for want, args := range map[string][]string{
		"undefined: Nothing": {"../../examples/shop", "Nothing"},
		"want a *outbox.Registry, or a function without arguments that returns one": {"../../examples/shop", "Place"},
		"directory not found": {"../../examples/none", "Events"},
	} {
		a := d.call(t, append([]string{"contract", "export"}, args...)...)
		require.Equal(t, exitError, a.code)
		require.Contains(t, a.err, want)
		require.Empty(t, a.out)
	}
}

// A module that does not have outboxcontract is told how to get it.
func TestContractExportWithoutModule(t *testing.T) {
	d := newContractFixture()
	d.vars["GOWORK"], d.vars["GOFLAGS"], d.vars["GOPROXY"] = "off", "", "off"
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/shop\n\ngo 1.26.0\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"), []byte("package main\n\nfunc main() {}\n"), 0o600))
	t.Chdir(dir)
	a := d.call(t, "contract", "export", ".", "registry")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, "the module needs outboxcontract: go get github.com/outboxgo/outbox/outboxcontract (go list: ")
	d.vars["PATH"] = dir
	t.Setenv("PATH", dir)
	a = d.call(t, "contract", "export", ".", "registry")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, `exec: "go": executable file not found`)
}

func TestContractCheck(t *testing.T) {
	t.Parallel()
	d := newContractFixture()
	file := filepath.Join(t.TempDir(), "contract.json")
	again := "outbox contract export --out " + file + " ../../examples/shop Events"
	a := d.call(t, "contract", "check", file, "../../examples/shop", "Events")
	require.Equal(t, exitError, a.code)
	require.Contains(t, a.err, again)
	text := []byte(d.ok(t, "contract", "export", "../../examples/shop", "Events"))
	check := func(old, with string, code int, json bool) answer {
		require.NoError(t, os.WriteFile(file, bytes.ReplaceAll(text, []byte(old), []byte(with)), 0o600))
		args := []string{"contract", "check", file, "../../examples/shop", "Events"}
		if json {
			args = append(args, "--json")
		}
		a := d.call(t, args...)
		require.Equal(t, code, a.code, a.err)
		return a
	}
	require.Equal(t, "0 changes, 0 breaking; compatibility: FULL\n", check("shop", "shop", exitOK, false).out)
	require.Contains(t, check(`"cents"`, `"euros"`, exitProblems, false).out,
		"breaks readers and writers: acme.order.placed.v1: euros: renamed to cents (readers look for the value under the other name)\n1 change, 1 breaking; compatibility: NONE\n")
	require.Contains(t, check("Readers ignore", "They ignore", exitProblems, false).out, "0 changes, 0 breaking; compatibility: FULL\n"+file+" is not the contract")
	require.Contains(t, check("Readers ignore", "They ignore", exitProblems, true).out, `"stale": true`)
	require.Contains(t, check(`"asyncapi"`, `"openapi"`, exitError, false).err, "it is no contract of outbox contract export")
}

func TestContractDiff(t *testing.T) {
	t.Parallel()
	d := &commandFixture{}
	text, err := os.ReadFile(contractFixture)
	require.NoError(t, err)
	require.Equal(t, "0 changes, 0 breaking; compatibility: FULL\n", d.ok(t, "contract", "diff", contractFixture, contractFixture))
	diff := func(old, with string) answer {
		d.stdin = strings.Replace(string(text), old, with, 1)
		require.NotEqual(t, string(text), d.stdin)
		return d.call(t, "contract", "diff", contractFixture, "-")
	}
	a := diff(`"key": "own"`, `"key": "aggregate id"`)
	require.Equal(t, answer{exitProblems, "breaks readers: PRODUCT_VIEWED: partition key was own, is aggregate id (events are in order by another key)\n1 change, 1 breaking; compatibility: BACKWARD\n", ""}, a)
	a = diff(`"ce_tenant"`, `"ce_owner"`)
	require.Equal(t, exitProblems, a.code)
	require.Contains(t, a.out, "compatible: acme.order.placed.v2: header ce_owner added\n2 changes, 1 breaking; compatibility: BACKWARD\n")
	var doc struct {
		Compatibility string
		Breaking      int
		Changes       []contract.Change
	}
	d.json(t, &doc, exitProblems, "contract", "diff", contractFixture, "-")
	require.Equal(t, "BACKWARD", doc.Compatibility)
	require.Equal(t, 1, doc.Breaking)
	require.Len(t, doc.Changes, 2)
	a = diff(`"note": {`, "\"note\": {\"description\": \"\x1b[31m\",")
	require.Equal(t, exitError, a.code, a.out)
	for _, c := range []struct{ args, want string }{{contractFixture + " none.json", "none.json: no such file"}, {contractFixture + " cli.go", "the new contract: it is no contract"},
		{"cli.go " + contractFixture, "the old contract: it is no contract"}} {
		a := d.call(t, append([]string{"contract", "diff"}, strings.Fields(c.args)...)...)
		require.Equal(t, exitError, a.code)
		require.Contains(t, a.err, c.want)
	}
}
