//go:build !race

package itest

// raceDetector reports whether the race detector is on. It has pools forget a part of what they get.
const raceDetector = false
