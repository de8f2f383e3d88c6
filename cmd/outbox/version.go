package main

import (
	"context"
	"flag"
	"runtime"
	"runtime/debug"
	"strings"
)

var versionCommand = command{
	name:    "version",
	summary: "print the version",
	prepare: func(*flag.FlagSet) func(context.Context, *env) error { return version },
}

// build describes how the program was built.
type build struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Time     string `json:"time,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go"`
}

func version(_ context.Context, e *env) error {
	b := thisBuild()
	if e.json {
		return e.writeJSON(b)
	}
	text := "outbox " + b.Version
	if b.Revision != "" {
		text += " " + strings.TrimSpace(b.Revision[:min(12, len(b.Revision))]+" "+b.Time)
	}
	if b.Modified {
		text += " (modified)"
	}
	e.printf("%s, %s\n", text, b.Go)
	return nil
}

// thisBuild returns the build of this program.
func thisBuild() build {
	if info, ok := debug.ReadBuildInfo(); ok {
		return readBuild(info)
	}
	return build{Version: "(unknown)", Go: runtime.Version()}
}

func readBuild(info *debug.BuildInfo) build {
	b := build{Version: info.Main.Version, Go: info.GoVersion}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			b.Revision = s.Value
		case "vcs.time":
			b.Time = s.Value
		case "vcs.modified":
			b.Modified = s.Value == "true"
		}
	}
	return b
}
