package outboxhttp_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func lineOf(t *testing.T, line string) (fields map[string]any) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(line), &fields), line)
	return fields
}
