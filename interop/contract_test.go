package interop

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"github.com/twmb/avro"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/contract"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxcontract"
)

// happened has what each event needs.
type happened struct{}

func (happened) OccurredAt() time.Time { return time.Unix(1, 0) }

// Enums of two and of three values.
type (
	size2 string
	size3 string
)

func (size2) JSONSchema() map[string]any { return map[string]any{"enum": []string{"s", "m"}} }
func (size3) JSONSchema() map[string]any { return map[string]any{"enum": []string{"s", "m", "l"}} }

func avroEnum[E any](symbols ...string) avro.SchemaOpt {
	return avro.CustomType{GoType: reflect.TypeFor[E](), Schema: &avro.SchemaNode{Type: "enum", Name: "size", Symbols: symbols}}
}

// structChange is a change of a Go struct.
type structChange struct {
	what, keeps   string // what the registry is to say: FULL, BACKWARD, FORWARD or NONE
	before, after structForms
}

// structForms are the forms of a Go struct.
type structForms struct {
	contract []byte // which has the JSON Schema
	avro     string
}

func changed[A, B outbox.DomainEvent](t *testing.T, what, keeps string) structChange {
	t.Helper()
	return structChange{what, keeps, formsOf[A](t), formsOf[B](t)}
}

const placedType = "shop.order.placed.v1"

func formsOf[E outbox.DomainEvent](t *testing.T) structForms {
	t.Helper()
	events, err := outbox.NewRegistry("shop", outbox.Event(placedType, "Order", func(E) string { return "" }))
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, outboxcontract.Export(&b, events))
	schema, err := avro.SchemaFor[E](avro.WithName("placed"), avroEnum[size2]("s", "m"), avroEnum[size3]("s", "m", "l"))
	require.NoError(t, err)
	return structForms{b.Bytes(), schema.String()}
}

type (
	// placed is the event before each change.
	placed struct {
		happened `avro:",inline"`
		ID       string  `json:"id" avro:"id"`
		Count    int32   `json:"count" avro:"count"`
		Size     size2   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	numbered struct {
		ID    string `json:"id" avro:"id"`
		Count int32  `json:"count" avro:"count"`
	}
)

// structChanges returns changes of placed: six that are compatible, and ten that are not.
func structChanges(t *testing.T) []structChange {
	t.Helper()
	type optionalAdded struct {
		placed  `avro:",inline"`
		Voucher *string `json:"voucher,omitempty" avro:"voucher"`
	}
	type optionalRemoved struct {
		numbered `avro:",inline"`
		happened `avro:",inline"`
		Size     size2 `json:"size" avro:"size"`
	}
	type reordered struct {
		happened `avro:",inline"`
		Note     *string `json:"note,omitempty" avro:"note"`
		Size     size2   `json:"size" avro:"size"`
		Count    int32   `json:"count" avro:"count"`
		ID       string  `json:"id" avro:"id"`
	}
	type fieldsRenamed struct {
		happened `avro:",inline"`
		OrderID  string  `json:"id" avro:"id"`
		Pieces   int32   `json:"count" avro:"count"`
		Size     size2   `json:"size" avro:"size"`
		Remark   *string `json:"note,omitempty" avro:"note"`
	}
	type embedded struct {
		happened `avro:",inline"`
		numbered `avro:",inline"`
		Size     size2   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	type objectAdded struct {
		placed `avro:",inline"`
		Gift   *numbered `json:"gift,omitempty" avro:"gift"`
	}
	type requiredAdded struct {
		placed `avro:",inline"`
		Cents  int64 `json:"cents" avro:"cents"`
	}
	type requiredRemoved struct {
		happened `avro:",inline"`
		ID       string  `json:"id" avro:"id"`
		Size     size2   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	type renamed struct {
		happened `avro:",inline"`
		ID       string  `json:"id" avro:"id"`
		Count    int32   `json:"pieces" avro:"pieces"`
		Size     size2   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	type retyped struct {
		happened `avro:",inline"`
		ID       string  `json:"id" avro:"id"`
		Count    string  `json:"count" avro:"count"`
		Size     size2   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	type madeRequired struct {
		happened `avro:",inline"`
		ID       string `json:"id" avro:"id"`
		Count    int32  `json:"count" avro:"count"`
		Size     size2  `json:"size" avro:"size"`
		Note     string `json:"note" avro:"note"`
	}
	type madeOptional struct {
		happened `avro:",inline"`
		ID       *string `json:"id,omitempty" avro:"id"`
		Count    int32   `json:"count" avro:"count"`
		Size     size2   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	type widened struct {
		happened `avro:",inline"`
		ID       string  `json:"id" avro:"id"`
		Count    int64   `json:"count" avro:"count"`
		Size     size2   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	type enumWidened struct {
		happened `avro:",inline"`
		ID       string  `json:"id" avro:"id"`
		Count    int32   `json:"count" avro:"count"`
		Size     size3   `json:"size" avro:"size"`
		Note     *string `json:"note,omitempty" avro:"note"`
	}
	return []structChange{
		changed[placed, optionalAdded](t, "optional member added", "FULL"),
		changed[placed, optionalRemoved](t, "optional member removed", "FULL"),
		changed[placed, reordered](t, "fields in another order", "FULL"),
		changed[placed, fieldsRenamed](t, "Go fields renamed, members not", "FULL"),
		changed[placed, embedded](t, "members moved to an embedded struct", "FULL"),
		changed[placed, objectAdded](t, "optional object added", "FULL"),
		changed[placed, requiredAdded](t, "required member added", "FORWARD"),
		changed[placed, madeRequired](t, "optional member made required", "FORWARD"),
		changed[widened, placed](t, "int64 made int32", "FORWARD"),
		changed[enumWidened, placed](t, "enum value removed", "FORWARD"),
		changed[placed, requiredRemoved](t, "required member removed", "BACKWARD"),
		changed[placed, madeOptional](t, "required member made optional", "BACKWARD"),
		changed[placed, widened](t, "int32 made int64", "BACKWARD"),
		changed[placed, enumWidened](t, "enum value added", "BACKWARD"),
		changed[placed, renamed](t, "required member renamed", "NONE"),
		changed[placed, retyped](t, "int32 made string", "NONE"),
	}
}

// keeps are the rules of a registry that a change keeps, by what is the most of them.
var keeps = map[string]string{"FULL": "yes yes yes", "BACKWARD": "yes no no", "FORWARD": "no yes no", "NONE": "no no no"}

// What `outbox contract diff` says of a change of a Go struct is what a schema registry says of its Avro schemas. For
// JSON Schemas, which are open or closed, the registry allows less: never what diff calls breaking.
func TestContractDiffAgreesWithTheRegistry(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	registry := schemaRegistry{testenv.SchemaRegistry(t), &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(registry.client.CloseIdleConnections)
	var table strings.Builder
	w := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "change\tcontract diff\tbreaks\tBACKWARD FORWARD FULL: diff\tAvro\tJSON open\tJSON closed")
	for _, c := range structChanges(t) {
		changes := diffOf(t, c.before.contract, c.after.contract)
		diff := keeps[contract.Compatibility(changes)]
		avro := registry.rules(t, "AVRO", c.before.avro, c.after.avro)
		open := registry.rules(t, "JSON", payloadSchema(t, c.before.contract, false), payloadSchema(t, c.after.contract, false))
		closed := registry.rules(t, "JSON", payloadSchema(t, c.before.contract, true), payloadSchema(t, c.after.contract, true))
		said := "compatible"
		if c.keeps != "FULL" {
			said = "breaking"
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", c.what, said, breaksOf(changes), diff, avro, open, closed)
		require.Equal(t, keeps[c.keeps], diff, "%s: %v", c.what, changes)
		require.Equal(t, diff, avro, c.what)
		for i, rule := range strings.Fields(diff) {
			require.False(t, rule == "no" && (strings.Fields(open)[i] == "yes" || strings.Fields(closed)[i] == "yes"), "%s: JSON allows more", c.what)
		}
	}
	require.NoError(t, w.Flush())
	t.Log("\n" + table.String())
}

func diffOf(t *testing.T, before, after []byte) []contract.Change {
	t.Helper()
	was, err := contract.Read(before)
	require.NoError(t, err)
	is, err := contract.Read(after)
	require.NoError(t, err)
	return contract.Diff(was, is)
}

// breaksOf returns who breaks by changes.
func breaksOf(changes []contract.Change) string {
	var all []string
	for _, c := range changes {
		all = append(all, c.Breaks...)
	}
	slices.Sort(all)
	return cmp.Or(strings.Join(slices.Compact(all), ", "), "-")
}

// payloadSchema returns the JSON Schema of the event, as a document of its own, open or closed.
func payloadSchema(t *testing.T, document []byte, closed bool) string {
	t.Helper()
	var doc struct {
		Components struct{ Schemas map[string]map[string]any }
	}
	require.NoError(t, json.Unmarshal(document, &doc))
	all := doc.Components.Schemas
	if closed {
		for _, schema := range all {
			schema["additionalProperties"] = false
		}
	}
	own := all[placedType]
	delete(all, placedType)
	delete(all, "outbox.headers")
	own["definitions"] = all
	text, err := json.Marshal(own)
	require.NoError(t, err)
	return strings.ReplaceAll(string(text), "#/components/schemas/", "#/definitions/")
}

// schemaRegistry is a registry at an address.
type schemaRegistry struct {
	url    string
	client *http.Client
}

// rules registers a schema and returns whether another one keeps the rules BACKWARD, FORWARD and FULL.
func (r schemaRegistry) rules(t *testing.T, kind, before, after string) string {
	t.Helper()
	subject := "contract-" + uuid.NewString()
	schema := func(text string) map[string]any { return map[string]any{"schema": text, "schemaType": kind} }
	r.call(t, http.MethodPost, "/subjects/"+subject+"/versions", schema(before), nil)
	var said []string
	for _, rule := range []string{"BACKWARD", "FORWARD", "FULL"} {
		r.call(t, http.MethodPut, "/config/"+subject, map[string]any{"compatibility": rule}, nil)
		var answer struct {
			Compatible *bool `json:"is_compatible"`
		}
		r.call(t, http.MethodPost, "/compatibility/subjects/"+subject+"/versions/latest", schema(after), &answer)
		require.NotNil(t, answer.Compatible)
		said = append(said, map[bool]string{true: "yes", false: "no"}[*answer.Compatible])
	}
	return strings.Join(said, " ")
}

func (r schemaRegistry) call(t *testing.T, method, path string, body map[string]any, answer any) {
	t.Helper()
	text, err := json.Marshal(body)
	require.NoError(t, err)
	req, err := http.NewRequestWithContext(t.Context(), method, r.url+path, bytes.NewReader(text))
	require.NoError(t, err)
	req.Header.Set("Content-Type", "application/vnd.schemaregistry.v1+json")
	res, err := r.client.Do(req)
	require.NoError(t, err)
	defer res.Body.Close()
	got, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, res.StatusCode, "%s %s: %s", method, path, got)
	if answer != nil {
		require.NoError(t, json.Unmarshal(got, answer))
	}
}
