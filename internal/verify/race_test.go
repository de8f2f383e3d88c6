//go:build race

package verify

// mostMemory is no bound under the race detector, which multiplies memory.
const mostMemory = 1 << 40
