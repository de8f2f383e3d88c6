// Package contracttest tests that the contract of a registry allows what is recorded.
package contracttest

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/outboxgo/outbox/outboxcontract"
)

// Require requires of random events of all types that their payloads are valid by the schemas of the contract.
func Require(t *testing.T, events *outbox.Registry, err error) {
	t.Helper()
	require.NoError(t, err)
	var b bytes.Buffer
	require.NoError(t, outboxcontract.Export(&b, events))
	doc, err := jsonschema.UnmarshalJSON(&b)
	require.NoError(t, err)
	c := jsonschema.NewCompiler()
	c.DefaultDraft(jsonschema.Draft7)
	c.AssertFormat()
	require.NoError(t, c.AddResource("contract.json", doc))
	seed := rand.Uint64()
	t.Log("seed", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for _, reg := range events.Registrations() {
		schema, err := c.Compile("contract.json#/components/schemas/" + reg.EventType)
		require.NoError(t, err)
		for range 200 {
			payload, err := reg.Codec.Encode(t.Context(), testenv.Fill(rng, reg.GoType).Interface()) // as Record does
			require.NoError(t, err)
			value, err := jsonschema.UnmarshalJSON(bytes.NewReader(payload))
			require.NoError(t, err)
			require.NoError(t, schema.Validate(value), "%s: %s", reg.EventType, payload)
		}
	}
}
