package orders

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestEventsDifferAndRepeat(t *testing.T) {
	a, b := New(1), New(2)
	require.NotEqual(t, a.Customer, b.Customer)
	a.At = time.Time{}
	again := New(1)
	again.At = time.Time{}
	require.Equal(t, a, again)
	notes := map[string]struct{}{}
	for _, e := range NewMany(0, 1000) {
		notes[e.(Placed).Note] = struct{}{}
	}
	require.Greater(t, len(notes), 990)
}

func TestEventNumber(t *testing.T) {
	for _, payload := range []string{`{"n": 42, "note": "1,2"}`, `{"n":42,"note":"1,2"}`} {
		n, err := Number([]byte(payload))
		require.NoError(t, err)
		require.Equal(t, 42, n)
	}
	_, err := Number([]byte(`{"order":"n"}`))
	require.Error(t, err)
}
