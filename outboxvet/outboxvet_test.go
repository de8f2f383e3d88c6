package outboxvet_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/outboxgo/outbox/outboxvet"
	"golang.org/x/tools/go/analysis"
	"golang.org/x/tools/go/analysis/analysistest"
	"golang.org/x/tools/go/analysis/passes/inspect"
)

// The analyzers report the lines in testdata that say so, and no others. They are one
// analyzer here: the packages that testdata imports are loaded from their source, because
// facts are collected there, and that takes most of the time. This module has no
// testenv.Long, which would bring along the root.
func TestAnalyzers(t *testing.T) {
	if os.Getenv("OUTBOX_TEST_QUICK") != "" {
		t.Skip("left for make test-all")
	}
	t.Parallel()
	dir, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	all := &analysis.Analyzer{
		Name:      "all",
		Doc:       "all analyzers",
		Requires:  []*analysis.Analyzer{inspect.Analyzer},
		FactTypes: outboxvet.Registration.FactTypes,
		Run: func(pass *analysis.Pass) (any, error) {
			var all []error
			for _, a := range outboxvet.Analyzers() {
				_, err := a.Run(pass)
				all = append(all, err)
			}
			return nil, errors.Join(all...)
		},
	}
	analysistest.Run(t, dir, all, "./...")
}

// The drivers accept the analyzers: their names, documentation and requirements.
func TestValidate(t *testing.T) {
	t.Parallel()
	if err := analysis.Validate(outboxvet.Analyzers()); err != nil {
		t.Fatal(err)
	}
}
