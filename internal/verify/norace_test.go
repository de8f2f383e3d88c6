//go:build !race

package verify

// mostMemory bounds what a comparison needs, whatever the number of events is.
const mostMemory = 256 << 20
