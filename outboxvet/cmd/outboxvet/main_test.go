package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// finding needs facts about a package that the program imports.
const finding = "the event type example.com/vet/shop.Canceled is not registered: example.com/vet/shop/shop.go:"

// The command finds the same alone and as a tool of go vet, and says its version.
func TestCommand(t *testing.T) {
	if os.Getenv("OUTBOX_TEST_QUICK") != "" {
		t.Skip("left for make test-all")
	}
	t.Parallel()
	program := filepath.Join(t.TempDir(), "outboxvet")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	work, err := filepath.Abs("../../testdata/go.work")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		command []string
		fails   bool
		prints  string
	}{
		{"the version", []string{program, "version"}, false, "outboxvet "},
		{"alone", []string{program, "./programs/main"}, true, finding},
		{"go vet", []string{"go", "vet", "-vettool=" + program, "./programs/main"}, true, finding},
		{"go vet of a program that has no mistake", []string{"go", "vet", "-vettool=" + program, "./programs/consumer"}, false, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), tt.command[0], tt.command[1:]...)
			cmd.Dir = filepath.Dir(work)
			cmd.Env = append(os.Environ(), "GOWORK="+work)
			out, err := cmd.CombinedOutput()
			if (err != nil) != tt.fails || !strings.Contains(string(out), tt.prints) || tt.prints == "" && len(out) > 0 {
				t.Errorf("error %v, and:\n%s", err, out)
			}
		})
	}
}
