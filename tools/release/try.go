package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// tryAll uses each published module as a user does who has only its path and its version.
func (r *release) tryAll(ctx context.Context, temp string) error {
	proxy := filepath.Join(temp, "proxy")
	if err := r.buildProxy(proxy); err != nil {
		return err
	}
	tool, err := r.outsideTool(ctx, temp, proxy)
	if err != nil {
		return err
	}
	for _, m := range r.published() {
		start := time.Now()
		packages, commands, err := r.packages(ctx, m)
		if err != nil {
			return err
		}
		if err := r.try(ctx, tool, m, filepath.Join(temp, "try", m.program()), packages); err != nil {
			return fmt.Errorf("%s@%s: %w", m.path, r.version, err)
		}
		for _, command := range commands {
			if err := r.install(ctx, tool, command, temp); err != nil {
				return err
			}
		}
		r.printf("%s@%s can be got: packages built: %d, commands installed: %d, its program passes (%.0f s)\n",
			m.path, r.version, len(packages), len(commands), time.Since(start).Seconds())
	}
	if err := r.tryTags(ctx, temp, proxy); err != nil || r.archives == "" {
		return err
	}
	return r.writeArchives(ctx, tool, temp)
}

// outsideTool returns a go command that sees nothing of this repository but the proxy. It has a
// module cache of its own, because what it gets as the version is not the version yet. Modules of
// others come from the user's module cache, or else from where the user gets them. With -trimpath
// they are compiled once, and not again for each new module cache.
//
// GOPRIVATE and GONOPROXY have to be empty, which they are only without the user's file of
// settings. With any value, the go command first looks at modules that are not to come from a
// proxy, finds the root module in its cache, and does not look for a module below that.
func (r *release) outsideTool(ctx context.Context, temp, proxy string) (goTool, error) {
	names := []string{"GOPROXY", "GOMODCACHE", "GONOSUMDB", "GOSUMDB", "GOCACHE", "GOTOOLCHAIN"}
	user, err := r.userSettings(ctx, names)
	if err != nil {
		return goTool{}, err
	}
	return goTool{out: r.out, env: []string{
		"GOENV=off",
		"GOWORK=off",
		"GOPRIVATE=",
		"GONOPROXY=",
		"GOFLAGS=-modcacherw -trimpath",
		"GOBIN=" + filepath.Join(temp, "bin"),
		"GOMODCACHE=" + filepath.Join(temp, "modcache"),
		"GOPROXY=" + fileURL(proxy) + "," + fileURL(filepath.Join(user["GOMODCACHE"], "cache", "download")) + "," + user["GOPROXY"],
		"GONOSUMDB=" + strings.TrimSuffix(r.root().path+","+user["GONOSUMDB"], ","), // and what is below the path
		"GOSUMDB=" + user["GOSUMDB"],
		"GOCACHE=" + user["GOCACHE"],
		"GOTOOLCHAIN=" + user["GOTOOLCHAIN"],
	}}, nil
}

func (r *release) userSettings(ctx context.Context, names []string) (map[string]string, error) {
	user := goTool{out: r.out}
	out, err := user.run(ctx, r.dir, append([]string{"env", "-json"}, names...)...)
	if err != nil {
		return nil, err
	}
	settings := map[string]string{}
	err = json.Unmarshal([]byte(out), &settings)
	return settings, err
}

func fileURL(dir string) string {
	slashed := filepath.ToSlash(dir)
	if !strings.HasPrefix(slashed, "/") { // C:/…
		slashed = "/" + slashed
	}
	return "file://" + slashed
}

// packages returns the import paths of a module that others may use.
func (r *release) packages(ctx context.Context, m goModule) (packages, commands []string, err error) {
	tool := goTool{env: []string{"GOWORK=" + r.disk("go.work")}, out: r.out}
	out, err := tool.run(ctx, r.disk(m.dir), "list", "-find", "-f", "{{.Name}} {{.ImportPath}}", "./...")
	if err != nil {
		return nil, nil, err
	}
	for line := range strings.Lines(out) {
		name, importPath, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch {
		case slices.Contains(strings.Split(importPath, "/"), "internal"):
		case name == "main":
			commands = append(commands, importPath)
		default:
			packages = append(packages, importPath)
		}
	}
	return packages, commands, nil
}

// try gets the packages from an empty module, builds them, and runs the program.
func (r *release) try(ctx context.Context, tool goTool, m goModule, dir string, packages []string) error {
	program, err := fs.Sub(r.programs, m.program())
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if _, err := tool.run(ctx, dir, "mod", "init", "example.com/try"); err != nil {
		return err
	}
	get := []string{"get"}
	for _, p := range packages {
		get = append(get, p+"@"+r.version)
	}
	if _, err := tool.run(ctx, dir, get...); err != nil {
		return err
	}
	if _, err := tool.run(ctx, dir, append([]string{"build"}, packages...)...); err != nil {
		return err
	}
	if err := os.CopyFS(dir, program); err != nil {
		return err
	}
	return r.runProgram(ctx, tool, dir)
}

// runProgram runs what is in dir: a test, or a program.
func (r *release) runProgram(ctx context.Context, tool goTool, dir string) error {
	tests, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return err
	}
	args := []string{"run", "."}
	if len(tests) > 0 {
		args = []string{"test", "-count=1", "."}
	}
	_, err = tool.run(ctx, dir, args...)
	return err
}

// install installs a command by its version and asks it which it is.
func (r *release) install(ctx context.Context, tool goTool, command, temp string) error {
	if _, err := tool.run(ctx, temp, "install", command+"@"+r.version); err != nil {
		return err
	}
	program := filepath.Join(temp, "bin", path.Base(command))
	out, err := output(ctx, r.out, temp, nil, program, "version")
	if err != nil {
		return err
	}
	if !strings.Contains(out, r.version) {
		return errors.New(command + " was installed as " + r.version + " and says that it is: " + out)
	}
	return nil
}
