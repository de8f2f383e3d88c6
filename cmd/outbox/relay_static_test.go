package main

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/outboxgo/outbox/internal/testenv"
)

// nobody is the user of the image.
const nobody = 65532

// The program that the Dockerfile builds works as in the image: it is the first process of its process
// tree, and its root is empty and read-only. A stop while it works loses no events.
func TestRelayInAnEmptyRoot(t *testing.T) {
	testenv.Long(t)
	t.Parallel()
	if testing.Short() {
		t.Skip("-short: builds the command")
	}
	if runtime.GOOS != "linux" {
		t.Skip("images are for Linux")
	}
	root := buildAsDockerfile(t)
	d := newShop(t).withKafka(t)
	testenv.CreateTopic(t, d.brokers, d.topic, 3)
	start := func() *relayRun {
		cmd := exec.Command("/outbox", "relay")
		cmd.Env, cmd.Dir = d.variables(), "/"
		cmd.SysProcAttr = inContainer(root)
		return startProcess(t, cmd)
	}
	p := start()
	address := p.address()
	var keys []string
	record := func(n int) {
		for range n {
			keys = append(keys, fmt.Sprint(len(keys)))
		}
		d.record(t, keys[len(keys)-n:]...)
	}
	record(10)
	d.received(t, keys...)
	for _, path := range []string{"/livez", "/readyz", "/metrics"} {
		status, body := get(t, address, path, nil)
		require.Equal(t, http.StatusOK, status, body)
	}
	record(5_000)
	code, took := p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
	require.Less(t, took, stopTime)
	record(10)
	p = start()
	d.received(t, keys...)
	code, _ = p.stop(syscall.SIGTERM)
	require.Equal(t, exitOK, code)
	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	require.Len(t, entries, 1, "it writes nothing")
}

// The image is made from a compiler that its digest names, and from nothing else.
func TestImageIsPinned(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../Dockerfile")
	require.NoError(t, err)
	var bases []string
	for _, from := range regexp.MustCompile(`(?m)^(?:FROM|ARG GO_IMAGE=)\s*(\S+)`).FindAllSubmatch(text, -1) {
		bases = append(bases, string(from[1]))
	}
	require.Len(t, bases, 3)
	require.Regexp(t, `^golang:1\.[0-9.]+@sha256:[0-9a-f]{64}$`, bases[0])
	require.Equal(t, []string{"${GO_IMAGE}", "scratch"}, bases[1:])
}

// buildAsDockerfile builds with the line of the Dockerfile, and returns a folder with the command alone.
func buildAsDockerfile(t testing.TB) (root string) {
	t.Helper()
	text, err := os.ReadFile("../../Dockerfile")
	require.NoError(t, err)
	require.Contains(t, string(text), fmt.Sprintf("USER %d:%[1]d\n", nobody))
	line := regexp.MustCompile(`(?m)^RUN (.* go build .*) -o /out/outbox (\S+)$`).FindStringSubmatch(string(text))
	require.NotNil(t, line, "no line builds the command")
	root = t.TempDir()
	build := exec.Command("sh", "-c", line[1]+" -o '"+filepath.Join(root, "outbox")+"' "+line[2])
	build.Dir = "../.."
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Chmod(root, 0o555))
	t.Cleanup(func() { _ = os.Chmod(root, 0o755) })
	return root
}

// inContainer starts a process as a container does. Who is not root needs a user namespace for that.
func inContainer(root string) *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Chroot: root, Cloneflags: syscall.CLONE_NEWPID, Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	if os.Getuid() != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: nobody, HostID: os.Getuid(), Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: nobody, HostID: os.Getgid(), Size: 1}}
		attr.Credential.NoSetGroups = true
	}
	return attr
}
