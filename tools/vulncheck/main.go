// Command vulncheck looks for known vulnerabilities in what the modules of this project call.
//
//	vulncheck GOVULNCHECK MODULE…
//
// GOVULNCHECK is the program, MODULE a folder with a go.mod. It fails if govulncheck finds
// something that is called, or fails itself. Where the database of vulnerabilities cannot
// be reached, behind a proxy for example, it says so and succeeds: nothing was checked then.
// GOVULNDB names another database.
package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	database = "https://vuln.go.dev"
	patience = 10 * time.Second
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: vulncheck GOVULNCHECK MODULE…")
		os.Exit(2)
	}
	if err := run(context.Background(), cmp.Or(os.Getenv("GOVULNDB"), database), os.Args[1], os.Args[2:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "vulncheck:", err)
		os.Exit(1)
	}
}

// run checks the modules if the database answers.
func run(ctx context.Context, database, program string, modules []string, w io.Writer) error {
	if err := reach(ctx, database); err != nil {
		fmt.Fprintf(w, "vulnerability database not reachable: not checked (%v)\n", err)
		return nil
	}
	program, err := filepath.Abs(program)
	if err != nil {
		return err
	}
	for _, module := range modules {
		fmt.Fprintf(w, "== %s\n", module)
		cmd := exec.CommandContext(ctx, program, "-db", database, "./...")
		cmd.Dir, cmd.Stdout, cmd.Stderr = module, w, w
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w", module, err)
		}
	}
	return nil
}

// reach asks for the first file that govulncheck asks for.
func reach(ctx context.Context, database string) error {
	if strings.HasPrefix(database, "file:") {
		return nil // govulncheck says what is wrong with it
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(database, "/")+"/index/modules.json.gz", http.NoBody)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", request.URL.Host, response.Status)
	}
	_, err = io.Copy(io.Discard, response.Body)
	return err
}
