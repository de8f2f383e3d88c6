package outboxcontract_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxcontract"
)

var update = flag.Bool("update", false, "write testdata/contract.json")

// Versions of an event, and an event with a codec of its own.
type (
	placedV1 struct {
		happened
		ID    string  `json:"id"`
		Cents int64   `json:"cents"`
		Note  *string `json:"note,omitempty"`
	}
	placedV2 struct {
		happened
		ID    string `json:"id"`
		Money struct {
			Cents    int64  `json:"cents"`
			Currency string `json:"currency"`
		} `json:"money"`
		Lines []line `json:"lines,omitempty"`
	}
	viewed struct{ happened }
)

func toV2(placedV1) placedV2 { return placedV2{} }

var asBytes = outbox.Codec{
	ContentType: "application/x-viewed",
	Encode:      func(context.Context, any) ([]byte, error) { return nil, nil },
	Decode:      func(context.Context, []byte, any) error { return nil },
}

func shop() (*outbox.Registry, error) {
	return outbox.NewRegistry("shop",
		outbox.Event("acme.order.placed.v1", "Order", id[placedV1]),
		outbox.Event("acme.order.placed.v2", "Order", id[placedV2]).Attribute("tenant", id[placedV2]),
		outbox.Event("PRODUCT_VIEWED", "Product", id[viewed]).Topic("views").Key(id[viewed]).Codec(asBytes),
	)
}

var upcasters = []outbox.Upcaster{outbox.Upcast(toV2)}

// said is a test that keeps what Check says.
type said struct{ text string }

func (*said) Helper()                             {}
func (s *said) Fatalf(format string, args ...any) { s.text = fmt.Sprintf(format, args...) }

// The parser of AsyncAPI takes testdata/contract.json for valid.
func TestCheck(t *testing.T) {
	t.Parallel()
	const file = "testdata/contract.json"
	if *update {
		require.NoError(t, outboxcontract.Program(file, shop, upcasters))
	}
	events, err := shop()
	require.NoError(t, err)
	outboxcontract.Check(t, file, events, upcasters...)

	var s said
	outboxcontract.Check(&s, file, events)
	require.Contains(t, s.text, "breaks writers: acme.order.placed.v2: upcaster from acme.order.placed.v1 removed (handlers do not get the events of that type any more)")
	require.Contains(t, s.text, "\nIf that is meant: outbox contract export")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	for want, change := range map[string][2]string{
		" only its texts differ": {"Readers ignore", "They ignore"},
		"breaks readers and writers: acme.order.placed.v1: memo: renamed to note": {`"note"`, `"memo"`},
		" it is no contract of outbox contract export: want":                      {`"3.0.0"`, `"2.0.0"`},
		" it is no contract of outbox contract export: invalid":                   {`{`, `[`},
	} {
		other := filepath.Join(t.TempDir(), "contract.json")
		require.NoError(t, os.WriteFile(other, bytes.Replace(text, []byte(change[0]), []byte(change[1]), 1), 0o600))
		outboxcontract.Check(&s, other, events, upcasters...)
		require.Contains(t, s.text, want)
	}
	outboxcontract.Check(&s, "testdata/none.json", events)
	require.Contains(t, s.text, "outbox contract export writes the file")
}

type (
	unencodable struct {
		happened
		Lines []struct{ C chan int }
	}
	badSchema struct{ happened }
	keyed     struct {
		happened
		M map[float64]int
	}
)

func (badSchema) JSONSchema() map[string]any { return map[string]any{"type": "object", "pattern": "("} }

func TestExportErrors(t *testing.T) {
	t.Parallel()
	for want, def := range map[string]outbox.Definition{
		"outboxcontract: a.b.c.v1: outboxcontract_test.unencodable.Lines":       outbox.Event("a.b.c.v1", "A", id[unencodable]),
		"outboxcontract: a.b.c.v1: outboxcontract_test.badSchema: JSONSchema: ": outbox.Event("a.b.c.v1", "A", id[badSchema]),
		"encoding/json encodes no map[float64]int":                              outbox.Event("a.b.c.v1", "A", id[keyed]),
	} {
		events, err := outbox.NewRegistry("test", def)
		require.NoError(t, err)
		require.ErrorContains(t, outboxcontract.Export(&bytes.Buffer{}, events), want)
		require.ErrorIs(t, outboxcontract.Export(&bytes.Buffer{}, events, upcasters...), outbox.ErrUnregistered)
		var s said
		outboxcontract.Check(&s, "testdata/contract.json", events)
		require.Contains(t, s.text, want)
	}
}

func TestProgram(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "contract.json")
	events, err := shop()
	require.NoError(t, err)
	for _, values := range [][]any{{events, upcasters}, {shop, upcasters[0]}, {upcasters, func() *outbox.Registry { return events }}} {
		require.NoError(t, outboxcontract.Program(file, values...))
		outboxcontract.Check(t, file, events, upcasters...)
	}
	for want, values := range map[string][]any{
		"no name is a registry": {upcasters},
		"a int: want a *outbox.Registry, or a function without arguments that returns one": {1},
		"name 2 is a func() (*outbox.Registry, error): want upcasters":                     {events, shop},
		"the *outbox.Registry is nil":                                                      {(*outbox.Registry)(nil)},
		"context canceled":                                                                 {func() (*outbox.Registry, error) { return nil, context.Canceled }},
	} {
		require.ErrorContains(t, outboxcontract.Program(file, values...), want)
	}
}

// OrderPlaced is an event.
type OrderPlaced struct {
	ID    string    `json:"id"`
	Cents int64     `json:"cents"`
	Note  string    `json:"note,omitempty"`
	At    time.Time `json:"at"`
}

// OccurredAt is when the order was placed.
func (e OrderPlaced) OccurredAt() time.Time { return e.At }

// AggregateID is the order.
func (e OrderPlaced) AggregateID() string { return e.ID }

// The contract of a registry has a schema for each event type.
func ExampleExport() {
	events, err := outbox.NewRegistry("shop", outbox.Event("acme.order.placed.v1", "Order", OrderPlaced.AggregateID))
	if err != nil {
		panic(err)
	}
	var b bytes.Buffer
	if err := outboxcontract.Export(&b, events); err != nil {
		panic(err)
	}
	var contract struct {
		Components struct {
			Schemas map[string]struct {
				Properties map[string]json.RawMessage
				Required   []string
			}
		}
	}
	if err := json.Unmarshal(b.Bytes(), &contract); err != nil {
		panic(err)
	}
	schema := contract.Components.Schemas["acme.order.placed.v1"]
	fmt.Println("always there:", schema.Required)
	fmt.Println("optional: note:", strings.Join(strings.Fields(string(schema.Properties["note"])), ""))
	// Output:
	// always there: [id cents at]
	// optional: note: {"type":"string"}
}
