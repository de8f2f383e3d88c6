package main

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// govulncheck writes a program that stands for it and ends with a code.
func govulncheck(t *testing.T, code string) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "govulncheck")
	require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\necho checked \"$@\"\nexit "+code+"\n"), 0o755)) //nolint:gosec // it is run
	return path
}

// A database that is not there is said, and fails nothing; a finding fails.
func TestRun(t *testing.T) {
	status := http.StatusOK
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
	var out strings.Builder
	require.NoError(t, run(t.Context(), server.URL, govulncheck(t, "0"), []string{"."}, &out))
	require.Contains(t, out.String(), "== .\nchecked -db "+server.URL+" ./...\n")

	require.ErrorContains(t, run(t.Context(), server.URL, govulncheck(t, "3"), []string{"."}, &out), ".: exit status 3", "a finding")
	require.ErrorContains(t, run(t.Context(), "file:///nowhere", govulncheck(t, "1"), []string{"."}, &out), "exit status 1", "an error")

	for _, gone := range []func(){func() { status = http.StatusForbidden }, server.Close} {
		gone()
		out.Reset()
		require.NoError(t, run(t.Context(), server.URL, govulncheck(t, "3"), []string{"."}, &out))
		require.Contains(t, out.String(), "vulnerability database not reachable: not checked (")
		require.NotContains(t, out.String(), "==")
	}
	http.DefaultClient.CloseIdleConnections()
}
