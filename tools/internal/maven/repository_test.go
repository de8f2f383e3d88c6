package maven_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/tools/internal/maven"
)

const settings = `<?xml version="1.0" encoding="UTF-8"?>
<settings xmlns="http://maven.apache.org/SETTINGS/1.2.0">
  <mirrors>
    <mirror><id>x</id><mirrorOf>%OF%</mirrorOf><url>https://${env.TEST_HOST}/repository/</url><blocked>%BLOCKED%</blocked></mirror>
  </mirrors>
</settings>`

var repositoryTests = []struct {
	name, variable, of, blocked string // of: "" means no settings
	want                        string
}{
	{"nothing chosen", "", "", "", "https://repo.maven.apache.org/maven2"},
	{"the variable", "https://a.example/m2/", "*", "false", "https://a.example/m2"},
	{"a mirror of everything", "", "*", "false", "https://b.example/repository"},
	{"a mirror of it", "", "internal, central", "false", "https://b.example/repository"},
	{"a mirror of others", "", "*,!central", "false", "https://repo.maven.apache.org/maven2"},
	{"a mirror that blocks", "", "*", "true", "https://repo.maven.apache.org/maven2"},
}

func TestRepository(t *testing.T) {
	for _, tt := range repositoryTests {
		t.Run(tt.name, func(t *testing.T) {
			home := t.TempDir()
			t.Setenv("HOME", home)
			t.Setenv("TEST_HOST", "b.example")
			t.Setenv(maven.RepositoryEnv, tt.variable)
			if tt.of != "" {
				writeSettings(t, home, strings.NewReplacer("%OF%", tt.of, "%BLOCKED%", tt.blocked).Replace(settings))
			}
			got, err := maven.Repository()
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
}

func writeSettings(t *testing.T, home, text string) {
	t.Helper()
	require.NoError(t, os.Mkdir(filepath.Join(home, ".m2"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(home, ".m2", "settings.xml"), []byte(text), 0o600))
}

// Settings that cannot be read are an error: another repository may be forbidden.
func TestBrokenSettings(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	t.Setenv(maven.RepositoryEnv, "")
	writeSettings(t, home, "<settings>")
	_, err := maven.Repository()
	require.ErrorContains(t, err, maven.RepositoryEnv)
}
