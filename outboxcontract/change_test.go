package outboxcontract_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/contract"
	"github.com/outboxgo/outbox/outboxcontract"
)

// holds, omits and quotes are events with a member of a type.
type (
	holds[T any] struct {
		happened
		Value T `json:"value"`
	}
	omits[T any] struct {
		happened
		Value T `json:"value,omitzero"`
	}
	quotes[T any] struct {
		happened
		Value T `json:"value,string"` //nolint:staticcheck // it quotes nothing but numbers, texts and booleans
	}
)

// Types that say their own schemas, and one that does not.
type (
	method string
	color  string
	weekly string
	marked string // has a MarshalText instead
)

func (m marked) MarshalText() ([]byte, error) { return []byte(m), nil }

func (method) JSONSchema() json.RawMessage {
	return json.RawMessage(`{"oneOf": [{"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[0-9]{20}$"}]}`)
}

func (color) JSONSchema() json.RawMessage {
	return json.RawMessage(`{"enum": ["r", "g"], "x-enum-varnames": ["Red", "Green"]}`)
}

func (weekly) JSONSchema() json.RawMessage {
	return json.RawMessage(`{"oneOf": [{"type": "string"}, {"type": "null"}]}`)
}

type withA struct {
	A int `json:"a,omitempty"`
}

func contractWith[E outbox.DomainEvent](t *testing.T) []byte {
	t.Helper()
	events, err := outbox.NewRegistry("test", outbox.Event("test.thing.changed.v1", "Thing", id[E]))
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, outboxcontract.Export(&b, events))
	return b.Bytes()
}

// A change of what encoding/json writes for a type, or reads into it, is a change of the contract.
func TestContractShowsChangesOfTypes(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		what       string
		was, is    []byte
		keeps, not string // after the change, and after the opposite one
	}{
		{"oneOf made a pointer", contractWith[holds[method]](t), contractWith[holds[*method]](t), "BACKWARD", "FORWARD"},
		{"oneOf with null made a pointer", contractWith[holds[weekly]](t), contractWith[holds[*weekly]](t), "FULL", "FULL"},
		{"other keywords, made a pointer", contractWith[holds[color]](t), contractWith[holds[*color]](t), "BACKWARD", "FORWARD"},
		{"string to int64 in quotes", contractWith[holds[string]](t), contractWith[quotes[int64]](t), "NONE", "NONE"},
		{"string in quotes", contractWith[holds[string]](t), contractWith[quotes[string]](t), "NONE", "NONE"},
		{"int64 in quotes", contractWith[holds[int64]](t), contractWith[quotes[int64]](t), "NONE", "NONE"},
		{"int32 to int64, in quotes", contractWith[quotes[int32]](t), contractWith[quotes[int64]](t), "BACKWARD", "FORWARD"},
		{"int64 to bool, in quotes", contractWith[quotes[int64]](t), contractWith[quotes[bool]](t), "NONE", "NONE"},
		{"quotes made a pointer", contractWith[quotes[int64]](t), contractWith[quotes[*int64]](t), "BACKWARD", "FORWARD"},
		{"no quotes around MarshalText", contractWith[holds[marked]](t), contractWith[quotes[marked]](t), "FULL", "FULL"},
		{"string to bytes", contractWith[holds[string]](t), contractWith[holds[[]byte]](t), "NONE", "NONE"},
		{"float32 to float64", contractWith[holds[float32]](t), contractWith[holds[float64]](t), "BACKWARD", "FORWARD"},
		{"int32 to int64", contractWith[holds[int32]](t), contractWith[holds[int64]](t), "BACKWARD", "FORWARD"},
		{"int to int64", contractWith[holds[int]](t), contractWith[holds[int64]](t), "FULL", "FULL"},
		{"int64 to uint64", contractWith[holds[int64]](t), contractWith[holds[uint64]](t), "NONE", "NONE"},
		{"uint32 to int64", contractWith[holds[uint32]](t), contractWith[holds[int64]](t), "BACKWARD", "FORWARD"},
		{"int64 to float64", contractWith[holds[int64]](t), contractWith[holds[float64]](t), "BACKWARD", "FORWARD"},
		{"object to a map of others", contractWith[omits[withA]](t), contractWith[omits[map[string]string]](t), "NONE", "NONE"},
		{"object to a map of anything", contractWith[omits[withA]](t), contractWith[omits[map[string]any]](t), "BACKWARD", "FORWARD"},
	} {
		changes := diffOf(t, tt.was, tt.is)
		require.Equal(t, tt.keeps, contract.Compatibility(changes), "%s: %v", tt.what, changes)
		changes = diffOf(t, tt.is, tt.was)
		require.Equal(t, tt.not, contract.Compatibility(changes), "not %s: %v", tt.what, changes)
	}
}

func diffOf(t *testing.T, was, is []byte) []contract.Change {
	t.Helper()
	before, err := contract.Read(was)
	require.NoError(t, err)
	after, err := contract.Read(is)
	require.NoError(t, err)
	return contract.Diff(before, after)
}

// A pointer keeps the schema that its type says, whatever keywords it has.
func TestPointersKeepOwnSchemas(t *testing.T) {
	t.Parallel()
	text := strings.Join(strings.Fields(string(contractWith[holds[*color]](t))), "")
	require.Contains(t, text, `"value":{"anyOf":[{"enum":["r","g"],"x-enum-varnames":["Red","Green"]},{"type":"null"}]}`)
}
