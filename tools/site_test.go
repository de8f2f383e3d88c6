package tools_test

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The sites of releases are beside each other, and the last one that is no pre-release is the first page.
func TestVersionsOfTheSite(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	args := []string{"site/site.py", "versions", filepath.Join(dir, "pages")}
	for _, version := range []string{"v0.9.0", "v0.10.0", "v1.0.0-rc.1", "v0.2.1"} {
		site := filepath.Join(dir, version)
		require.NoError(t, os.Mkdir(site, 0o755))
		for _, name := range []string{"index.html", "llms.txt", "404.html"} {
			require.NoError(t, os.WriteFile(filepath.Join(site, name), []byte(version), 0o600))
		}
		archive := filepath.Join(dir, "outbox_"+version+"_site.tar.gz")
		require.NoError(t, exec.CommandContext(t.Context(), "tar", "-czf", archive, "-C", site, ".").Run())
		args = append(args, archive)
	}
	out, err := exec.CommandContext(t.Context(), "python3", args...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	page := func(name string) string {
		text, err := os.ReadFile(filepath.Join(dir, "pages", name))
		require.NoError(t, err)
		return string(text)
	}
	for name, want := range map[string]string{"v0.2.1/index.html": "v0.2.1", "v0.10.0/index.html": "v0.10.0", "latest/index.html": "v0.10.0", "llms.txt": "v0.10.0", "404.html": "v0.10.0"} {
		require.Equal(t, want, page(name), name)
	}
	require.Contains(t, page("index.html"), "url=latest/")
	var versions []struct {
		Version, Title string
		Aliases        []string
	}
	require.NoError(t, json.Unmarshal([]byte(page("versions.json")), &versions))
	var names []string
	for _, v := range versions {
		names = append(names, v.Version)
		require.Equal(t, v.Version == "v0.10.0", len(v.Aliases) == 1, v.Version)
	}
	require.Equal(t, []string{"v1.0.0-rc.1", "v0.10.0", "v0.9.0", "v0.2.1"}, names)

	out, err = exec.CommandContext(t.Context(), "python3", "site/site.py", "versions", filepath.Join(dir, "pages"), "outbox.tar.gz").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "is not the archive of a site")
}
