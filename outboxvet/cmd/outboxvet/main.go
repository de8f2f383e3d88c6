// Outboxvet finds mistakes in programs that use outbox. It runs alone or by go vet:
//
//	outboxvet ./...
//	go vet -vettool=$(which outboxvet) ./...
//
// "outboxvet help" lists the checks, and "outboxvet version" prints its version.
package main

import (
	"fmt"
	"os"
	"runtime/debug"

	"github.com/outboxgo/outbox/outboxvet"
	"golang.org/x/tools/go/analysis/multichecker"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == "version" {
		version := "(unknown)"
		if info, ok := debug.ReadBuildInfo(); ok {
			version = info.Main.Version
		}
		fmt.Fprintln(os.Stdout, "outboxvet", version)
		return
	}
	multichecker.Main(outboxvet.Analyzers()...)
}
