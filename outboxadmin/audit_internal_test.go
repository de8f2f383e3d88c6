package outboxadmin

import (
	"bytes"
	"maps"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/tables"
)

// The page has a word for each action in outbox_audit.
func TestAuditActionsHaveWords(t *testing.T) {
	t.Parallel()
	require.ElementsMatch(t, tables.AuditActions, slices.Collect(maps.Keys(pastActions)))
}

// The audit names a partition that was dropped, also where keys of events are masked.
func TestAuditOfPartitions(t *testing.T) {
	t.Parallel()
	h := newAdminFixture(t, func(c *Config) {
		c.Mask = func(text Text) []byte {
			if text.Kind == TextKey {
				return bytes.Repeat([]byte("*"), len(text.Value))
			}
			return text.Value
		}
	})
	_, err := h.db.Exec(t.Context(), `INSERT INTO `+pgx.Identifier{h.schema, "outbox_audit"}.Sanitize()+` (operator, action, reason, relay, parking_key)
		VALUES ('kim', 'expire', 'five years are over', '', '/old.outbox_archive_2011_01')`)
	require.NoError(t, err)
	require.Contains(t, h.get("/audit?action=expire"), "dropped partition old.outbox_archive_2011_01<")
	require.Contains(t, h.get("/api/audit?action=expire"), `"key":"old.outbox_archive_2011_01"`)
}
