//go:build unix && !linux

package proc

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

func signalOrphan(*exec.Cmd, syscall.Signal) {}

// children returns the ids of the processes whose parent is pid.
func children(pid int) []int {
	out, err := exec.Command("pgrep", "-P", strconv.Itoa(pid)).Output()
	if err != nil {
		return nil // exit code 1: there are none
	}
	var ids []int
	for _, s := range strings.Fields(string(out)) {
		if id, err := strconv.Atoi(s); err == nil {
			ids = append(ids, id)
		}
	}
	return ids
}
