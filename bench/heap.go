package main

import (
	"os"
	"runtime/metrics"
	"strconv"
	"strings"
	"time"
)

// heapLook is how often a heapWatch looks.
const heapLook = 5 * time.Millisecond

// heapWatch remembers the most memory that the heap of this process had in use:
// live objects, dead ones that are not swept yet, and the gaps between them
// (HeapInuse of [runtime.MemStats]). Reading these metrics stops no goroutine.
type heapWatch struct {
	quit chan struct{}
	most chan uint64
}

func watchHeap() *heapWatch {
	w := &heapWatch{quit: make(chan struct{}), most: make(chan uint64)}
	go w.run()
	return w
}

func (w *heapWatch) run() {
	inUse := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}}
	ticker := time.NewTicker(heapLook)
	defer ticker.Stop()
	for most := uint64(0); ; {
		metrics.Read(inUse)
		most = max(most, inUse[0].Value.Uint64()+inUse[1].Value.Uint64())
		select {
		case <-ticker.C:
		case <-w.quit:
			w.most <- most
			return
		}
	}
}

// stop ends the watch and returns the most that it has seen.
func (w *heapWatch) stop() uint64 {
	close(w.quit)
	return <-w.most
}

// residentMemory returns how much memory this process has, where /proc says so.
func residentMemory() uint64 {
	statm, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(statm))
	const resident = 1 // its number among the fields
	if len(fields) <= resident {
		return 0
	}
	pages, err := strconv.ParseUint(fields[resident], 10, 64)
	if err != nil {
		return 0
	}
	return pages * uint64(os.Getpagesize())
}
