package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// contractPackage makes contracts. It links modules that the command does not.
const contractPackage = "github.com/outboxgo/outbox/outboxcontract"

// contractFile is the name of the file that is added to the package, by an overlay. It comes last, so that its init
// runs when all else of the package is initialized.
const contractFile = "zz_outbox_contract"

const contractInit = `package %s

import (
	"fmt"
	"os"

	"` + contractPackage + `"
)

func init() {
	if err := outboxcontract.Program(os.Args[1], %s); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
`

const contractMain = `package main

import _ %q

func main() {}
`

// goExport returns the contract of names in a package of Go. The go command sees a file more in the package, and a
// program that imports it; no file is written there.
func goExport(ctx context.Context, e *env, pkg string, names []string) ([]byte, error) {
	for _, name := range names {
		if !token.IsIdentifier(name) {
			return nil, usagef("%q is no name in a package of Go", name)
		}
	}
	if strings.HasPrefix(pkg, "-") {
		return nil, usagef("%q is no package of Go", pkg)
	}
	out, err := e.goTool(ctx, "list", "-find", "-f", "{{.Name}}\n{{.ImportPath}}\n{{.Dir}}", pkg)
	if err != nil {
		return nil, err
	}
	found := strings.Split(strings.TrimSpace(out), "\n")
	if len(found) != 3 {
		return nil, usagef("%q is not one package of Go", pkg)
	}
	if _, err := e.goTool(ctx, "list", "-find", contractPackage); err != nil {
		why, _, _ := strings.Cut(err.Error(), ";")
		return nil, fmt.Errorf("the module needs outboxcontract: go get %s (%s)", contractPackage, why)
	}
	temp, err := os.MkdirTemp("", "outbox-contract-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(temp)
	result := filepath.Join(temp, "contract.json")
	overlay, program, err := writeContractProgram(temp, found[0], found[1], found[2], names)
	if err != nil {
		return nil, err
	}
	if _, err := e.goTool(ctx, "run", "-overlay", overlay, program, result); err != nil {
		return nil, err
	}
	return os.ReadFile(result)
}

// writeContractProgram writes the files of the overlay, and returns it and the package to run.
func writeContractProgram(temp, name, importPath, dir string, names []string) (overlay, program string, err error) {
	files := map[string]string{filepath.Join(dir, contractFile+".go"): fmt.Sprintf(contractInit, name, strings.Join(names, ", "))}
	program = importPath
	if name != "main" { // a program inside of the package may import it, also if it is internal
		program += "/" + contractFile
		files[filepath.Join(dir, contractFile, "main.go")] = fmt.Sprintf(contractMain, importPath)
	}
	replace := map[string]string{}
	for file, text := range files {
		replace[file] = filepath.Join(temp, fmt.Sprint("file", len(replace), ".go"))
		if err := os.WriteFile(replace[file], []byte(text), 0o600); err != nil {
			return "", "", err
		}
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", "", err
	}
	overlay = filepath.Join(temp, "overlay.json")
	return overlay, program, os.WriteFile(overlay, text, 0o600)
}

// goTool runs the go command and returns its output. Its error is what the command says.
func (e *env) goTool(ctx context.Context, args ...string) (string, error) {
	const patience = 5 * time.Second
	cmd := exec.CommandContext(ctx, "go", args...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &errs, patience
	if e.environ != nil {
		cmd.Env = e.environ()
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	err := cmd.Run()
	var failed *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case errors.As(err, &failed):
		said := strings.TrimSuffix(strings.TrimSpace(errs.String()), "exit status 1")
		return "", fmt.Errorf("go %s: %s", args[0], strings.TrimSpace(cmp.Or(said, err.Error())))
	}
	return out.String(), err
}
