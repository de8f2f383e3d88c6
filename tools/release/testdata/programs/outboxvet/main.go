// This program vets packages with the analyzers of outboxvet and with those of others.
package main

import (
	"fmt"

	"github.com/outboxgo/outbox/outboxvet"
	"golang.org/x/tools/go/analysis"
)

func main() {
	if err := analysis.Validate(outboxvet.Analyzers()); err != nil {
		panic(err)
	}
	for _, a := range outboxvet.Analyzers() {
		fmt.Println(a)
	}
}
