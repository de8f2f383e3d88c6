package outboxadmin

import (
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/outboxgo/outbox/internal/testenv"
	"github.com/stretchr/testify/require"
)

// asOperator returns a pool whose connections have the privileges of the operator in
// docs/roles.md, in the schema of a relayFixture.
func asOperator(t *testing.T, h *adminFixture) *pgxpool.Pool {
	t.Helper()
	doc, err := os.ReadFile("../docs/roles.md")
	require.NoError(t, err)
	suffix := fmt.Sprintf("_%.8s", uuid.NewString())
	schema := pgx.Identifier{h.schema}.Sanitize()
	sql := "SET LOCAL search_path = " + schema + ";"
	for _, block := range regexp.MustCompile("(?s)```sql\n(CREATE ROLE outbox_(?:reader|operator);.*?)```").FindAllSubmatch(doc, -1) {
		sql += string(block[1])
	}
	sql = strings.ReplaceAll(sql, "SCHEMA public", "SCHEMA "+schema)
	sql = regexp.MustCompile(`\boutbox_(reader|operator)\b`).ReplaceAllString(sql, "outbox_${1}"+suffix)
	require.NoError(t, pgx.BeginFunc(t.Context(), h.db, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		return err
	}))
	admin := h.db
	t.Cleanup(func() {
		for _, sql := range []string{"DROP OWNED BY outbox_operator" + suffix, "DROP OWNED BY outbox_reader" + suffix,
			"DROP ROLE outbox_operator" + suffix + ", outbox_reader" + suffix} {
			_, err := admin.Exec(background, sql)
			require.NoError(t, err)
		}
	})
	return testenv.Pool(t, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["role"] = "outbox_operator" + suffix })
}

// The privileges of the operator in docs/roles.md are enough for all pages and actions, in a
// schema with quotes in its name, too.
func TestPrivilegesOfOperator(t *testing.T) {
	t.Parallel()
	testenv.Direct(t) // a session with a role
	db := testenv.Pool(t, nil)
	schema := fmt.Sprintf(`we"ird 's $1 {schema} %%, %.8s`, uuid.NewString())
	t.Cleanup(func() {
		_, err := db.Exec(background, "DROP SCHEMA IF EXISTS "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
		require.NoError(t, err)
	})
	h := newAdminFixtureIn(t, db, schema, nil)
	handler, err := New(asOperator(t, h), Config{Authorize: authorize, Schema: h.schema, AuditReads: true})
	require.NoError(t, err)
	h.handler = http.StripPrefix(prefix, handler)
	for _, rt := range everything(t) {
		if rt.method == http.MethodGet && !strings.Contains(rt.path, "nowhere") && !strings.Contains(rt.path, "//") && !strings.Contains(rt.path, "..") {
			h.get(strings.NewReplacer("/events/1", "/events/4099001", "/consumers/pause", "/consumers/pause?group=stats", "/selected/retry", "/selected/retry?id=event-1").Replace(rt.path))
		}
	}
	for _, action := range []string{"release", "hold", "edit", "resolve"} {
		require.Equal(t, http.StatusSeeOther, h.post("/failed/event-1/"+action, "reason", "because", "payload", "{}").Code, action)
	}
	require.Equal(t, http.StatusSeeOther, h.post("/failed/retry", confirmed(h.get("/failed/retry?status=dead"), "because")...).Code)
	for path, body := range map[string]map[string]any{
		"/api/consumers/pause": {"group": "stats", "reason": "x"}, "/api/failed/event-1/hold": {"reason": "x"},
		"/api/failed/retry": {"filter": map[string]any{"status": "dead"}, "reason": "x"},
	} {
		require.Contains(t, []int{http.StatusOK, http.StatusNoContent, http.StatusNotFound, http.StatusConflict}, h.call(path, body).Code, path)
	}
	require.Empty(t, h.log.String())
}
