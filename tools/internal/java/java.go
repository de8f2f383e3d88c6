// Package java finds the command that runs Java programs, and writes their properties.
package java

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
)

// ErrNone is returned if there is no Java.
var ErrNone = errors.New("no java command: install a Java runtime, version 17 or later, " +
	"or set JAVA_HOME; or name a running broker with OUTBOX_KAFKA_BROKERS")

// Path returns the path of the java command: that of JAVA_HOME, else the one in PATH.
func Path() (string, error) {
	if home := os.Getenv("JAVA_HOME"); home != "" {
		path := filepath.Join(home, "bin", "java")
		if _, err := os.Stat(path); err != nil {
			return "", fmt.Errorf("find java in JAVA_HOME: %w", err)
		}
		return path, nil
	}
	path, err := exec.LookPath("java")
	if err != nil {
		return "", ErrNone
	}
	return path, nil
}

var version = regexp.MustCompile(`version "(\d+)`)

// Version returns the major version of a java command, 0 if it does not tell.
func Version(ctx context.Context, path string) int {
	out, err := exec.CommandContext(ctx, path, "-version").CombinedOutput()
	found := version.FindSubmatch(out)
	if err != nil || found == nil {
		return 0
	}
	major, _ := strconv.Atoi(string(found[1])) // 0 if that is no number
	return major
}
