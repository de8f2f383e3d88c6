package java

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// CheckSettings refuses settings that would not be one line each of a file of
// properties, and those that are fixed.
func CheckSettings(settings map[string]string, fixed []string) error {
	var errs []error
	for name, value := range settings {
		switch {
		case slices.Contains(fixed, name):
			errs = append(errs, fmt.Errorf("setting %s cannot be changed", name))
		case name == "" || strings.ContainsAny(name, " \t\r\n=:#!\\"):
			errs = append(errs, fmt.Errorf("setting %q: not a name", name))
		case strings.ContainsAny(value, "\r\n"):
			errs = append(errs, fmt.Errorf("setting %s: more than one line", name))
		}
	}
	return errors.Join(errs...)
}

// Properties returns settings as a file of properties, sorted by name.
func Properties(settings map[string]string) []byte {
	var lines []string
	for name, value := range settings {
		lines = append(lines, name+"="+strings.ReplaceAll(value, `\`, `\\`)+"\n")
	}
	slices.Sort(lines)
	return []byte(strings.Join(lines, ""))
}
