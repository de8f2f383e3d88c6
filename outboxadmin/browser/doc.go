// Package browser drives the operators' page with a real Chromium.
package browser
