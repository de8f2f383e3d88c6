package record

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/envelope"
	"github.com/outboxgo/outbox/internal/jsonb"
)

const someTrace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

var hardTexts = []string{
	`a"b`, `a\b`, "a\nb\tc\x01\x7f", "</script>&", "주문 😀", "\u2028\u2029", "\ufffd", strings.Repeat("x", 255), `{"a":1}`, `\u0041`,
}

// OwnHeaders reads the headers that Extras has stored.
func TestHeadersRoundTrip(t *testing.T) {
	t.Parallel()
	own := map[string]string{}
	for _, text := range hardTexts {
		own[text], own["n-"+text] = "", text
	}
	attributes := map[string]string{"market": "KRW-BTC", "owner9": "é", "omitted": ""}
	x := Extras{CorrelationID: "corr", TraceID: "trace", TraceParent: someTrace, Headers: own, Attributes: attributes, OwnAttributes: map[string]string{"market": "KRW-ETH"}}
	b, rejected := x.encode("")
	require.Nil(t, rejected)
	_, err := jsonb.Check(b)
	require.NoError(t, err)
	got, err := (&envelope.Event{Headers: b}).OwnHeaders()
	require.NoError(t, err)
	require.Len(t, got, len(own)+5)
	require.Equal(t, "corr", got["correlationid"])
	require.Equal(t, []string{"trace", "KRW-ETH", "é"}, []string{got["ce_traceid"], got["ce_market"], got["ce_owner9"]})
	require.Equal(t, someTrace, got["traceparent"])
	for name, value := range own {
		require.Equal(t, value, got[name])
	}
	require.NotContains(t, own, "correlationid", "the caller's map is left alone")
}

// Most events have no extras, and encoding no extras must not allocate.
func TestNoExtras(t *testing.T) {
	// Not parallel: it counts allocations.
	var none Extras
	require.Zero(t, testing.AllocsPerRun(100, func() {
		b, rejected := none.encode("")
		require.True(t, b == nil && rejected == nil)
	}))
}
