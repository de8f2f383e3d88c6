package maven

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// RepositoryEnv names the environment variable that chooses the repository.
const RepositoryEnv = "OUTBOX_MAVEN_REPOSITORY"

// central is Maven Central.
const central = "https://repo.maven.apache.org/maven2"

// Repository returns the address of the repository to download from, without a slash
// at the end: that of [RepositoryEnv], else the mirror of Maven Central in the user's
// settings of Maven (~/.m2/settings.xml), else Maven Central itself. A proxy is the
// business of the variables that net/http knows, such as HTTPS_PROXY.
func Repository() (string, error) {
	address := os.Getenv(RepositoryEnv)
	if address == "" {
		var err error
		if address, err = mirror(); err != nil {
			return "", fmt.Errorf("look for a mirror of Maven Central (or name one with %s): %w", RepositoryEnv, err)
		}
	}
	if address == "" {
		address = central
	}
	return strings.TrimRight(address, "/"), nil
}

// settings is the part of Maven's settings.xml that names mirrors.
type settings struct {
	Mirrors []struct {
		Of      string `xml:"mirrorOf"`
		URL     string `xml:"url"`
		Blocked bool   `xml:"blocked"`
	} `xml:"mirrors>mirror"`
}

// mirror returns "" if the user has no settings, or none for Maven Central.
func mirror() (string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return "", nil //nolint:nilerr // without a home directory there are no settings
	}
	text, err := os.ReadFile(filepath.Join(home, ".m2", "settings.xml"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var s settings
	if err := xml.Unmarshal(text, &s); err != nil {
		return "", fmt.Errorf("settings.xml: %w", err)
	}
	for _, m := range s.Mirrors {
		if !m.Blocked && ofCentral(m.Of) {
			return os.Expand(strings.TrimSpace(m.URL), environment), nil
		}
	}
	return "", nil
}

// ofCentral reports whether a mirrorOf, such as "*,!internal", includes Maven Central.
func ofCentral(of string) bool {
	names := strings.Split(strings.ReplaceAll(of, " ", ""), ",")
	if slices.Contains(names, "!central") {
		return false
	}
	return slices.ContainsFunc(names, func(name string) bool {
		return slices.Contains([]string{"*", "central", "external:*"}, strings.TrimSpace(name))
	})
}

// environment replaces ${env.NAME}, as Maven does.
func environment(name string) string {
	if variable, ok := strings.CutPrefix(name, "env."); ok {
		return os.Getenv(variable)
	}
	return "${" + name + "}"
}
