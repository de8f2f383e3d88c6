//go:build !race

package testenv

// RaceDetector reports whether the race detector is on. It multiplies memory, and has pools forget a part of what they
// get.
const RaceDetector = false
