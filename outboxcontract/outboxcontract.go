// Package outboxcontract writes the contract of a service: an AsyncAPI 3 document of the events in its registry. The
// document has the topics, keys, headers and CloudEvents attributes of all event types, and a JSON Schema for each Go
// type that is encoded as JSON. Commit it, and compare it in the build:
//
//   - [Check] compares it with the registry, in a test. So does the command outbox contract check.
//   - The command outbox contract export writes it.
//   - The command outbox contract diff compares two of them, and says who breaks.
//
// A schema says what encoding/json writes for a struct. The schema of a type with a MarshalJSON of its own allows
// anything, unless the type has a method JSONSchema:
//
//	func (Status) JSONSchema() json.RawMessage {
//		return json.RawMessage(`{"enum": ["open", "paid"]}`)
//	}
//
// The method has a value receiver. It may return whatever encoding/json writes as a JSON Schema without references.
//
// The contract of an event type with another codec than [outbox.JSON] has no schema.
package outboxcontract

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/contract"
)

// Export writes the contract of a registry. The same registry gives the same bytes. With the upcasters of the
// handlers, a new version of an event type is compatible.
func Export(w io.Writer, events *outbox.Registry, upcasters ...outbox.Upcaster) error {
	text, err := export(events, upcasters)
	if err != nil {
		return err
	}
	_, err = w.Write(text)
	return err
}

func export(events *outbox.Registry, upcasters []outbox.Upcaster) ([]byte, error) {
	doc, err := newDocument(events, upcasters)
	if err != nil {
		return nil, fmt.Errorf("outboxcontract: %w", err)
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(doc); err != nil {
		return nil, fmt.Errorf("outboxcontract: %w", err)
	}
	return b.Bytes(), nil
}

// T is what [Check] needs of a test.
type T interface {
	Helper()
	Fatalf(format string, args ...any)
}

// Check fails a test if a file is not the contract of a registry. The message says who breaks by the change.
func Check(t T, file string, events *outbox.Registry, upcasters ...outbox.Upcaster) {
	t.Helper()
	is, err := export(events, upcasters)
	if err != nil {
		t.Fatalf("%v", err)
		return
	}
	was, err := os.ReadFile(file)
	switch {
	case err != nil:
		t.Fatalf("%v: outbox contract export writes the file", err)
	case !bytes.Equal(was, is):
		t.Fatalf("%s is not the contract of the registry:%s\nIf that is meant: outbox contract export writes the file.", file, changes(was, is))
	}
}

// changes returns a line for each change.
func changes(was, is []byte) string {
	before, err := contract.Read(was)
	if err != nil {
		return " " + err.Error()
	}
	after, err := contract.Read(is)
	if err != nil {
		return " " + err.Error()
	}
	var b strings.Builder
	for _, c := range contract.Diff(before, after) {
		fmt.Fprintf(&b, "\n%s", c)
	}
	if b.Len() == 0 {
		return " only its texts differ"
	}
	return b.String()
}

// Program is the body of the program that the command outbox contract export makes and runs. It writes the contract
// into a file.
// The values are a registry, or a function that returns one, and upcasters.
func Program(file string, values ...any) error {
	var events *outbox.Registry
	var upcasters []outbox.Upcaster
	for i, value := range values {
		var err error
		switch v := value.(type) {
		case outbox.Upcaster:
			upcasters = append(upcasters, v)
		case []outbox.Upcaster:
			upcasters = slices.Concat(upcasters, v)
		default:
			if events != nil {
				return fmt.Errorf("name %d is a %T: want upcasters: outbox.Upcaster or []outbox.Upcaster", i+1, value)
			}
			events, err = registryOf(value)
		}
		if err != nil {
			return err
		}
	}
	if events == nil {
		return fmt.Errorf("no name is a registry")
	}
	text, err := export(events, upcasters)
	if err != nil {
		return err
	}
	return os.WriteFile(file, text, 0o600)
}

// registryOf returns the registry that a value is or returns.
func registryOf(value any) (events *outbox.Registry, err error) {
	switch v := value.(type) {
	case *outbox.Registry:
		events = v
	case func() *outbox.Registry:
		events = v()
	case func() (*outbox.Registry, error):
		if events, err = v(); err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("a %T: want a *outbox.Registry, or a function without arguments that returns one", value)
	}
	if events == nil {
		return nil, fmt.Errorf("the %T is nil", value)
	}
	return events, nil
}
