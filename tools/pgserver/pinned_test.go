package pgserver_test

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/pgserver"
)

// A repository that hands out something else is found out, before anything of it runs.
func TestChangedArchiveIsRefused(t *testing.T) {
	var asked []string
	changed := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Path)
		_, _ = w.Write([]byte("something else"))
	}))
	defer changed.Close()
	cache := t.TempDir()
	t.Setenv("OUTBOX_SERVICES_CACHE", cache)
	t.Setenv("OUTBOX_MAVEN_REPOSITORY", changed.URL)
	var log bytes.Buffer
	_, err := pgserver.Embedded(t.Context(), "", &log)
	require.Error(t, err)
	require.Contains(t, log.String(), "its SHA-256 is")
	for _, path := range asked {
		require.False(t, strings.HasSuffix(path, ".sha256"), "a checksum of the same server proves nothing")
	}
	entries, err := os.ReadDir(cache)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing but the lock")
}

// Each version has an archive for Linux.
func TestListedArchives(t *testing.T) {
	list, err := os.ReadFile("archives.txt")
	require.NoError(t, err)
	for _, version := range pgserver.Versions() {
		require.Contains(t, string(list), "-linux-amd64-"+version+".")
	}
}
