package proc

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

func signalOrphan(cmd *exec.Cmd, sig syscall.Signal) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = sig
}

// children returns the ids of the processes whose parent is pid.
func children(pid int) []int {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat") // the pattern is well formed
	var ids []int
	for _, path := range stats {
		b, err := os.ReadFile(path)
		if err != nil {
			continue // ended since
		}
		// "id (name) state parent ...", and the name may hold anything.
		rest := b[bytes.LastIndexByte(b, ')')+1:]
		var state string
		var parent int
		if _, err := fmt.Fscan(bytes.NewReader(rest), &state, &parent); err != nil || parent != pid {
			continue
		}
		if id, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}
