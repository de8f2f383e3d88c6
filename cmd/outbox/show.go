package main

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// errText is the text of an error, if it is one.
func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// writeFields writes names and values below each other, and wraps long values.
func (e *env) writeFields(fields [][2]string) {
	const width = 11
	for _, f := range fields {
		for i, line := range wrap(visible(f[1]), max(e.width, usualWidth)-width) {
			name := ""
			if i == 0 {
				name = f[0]
			}
			e.printf("%s\n", strings.TrimRight(name+strings.Repeat(" ", width-len(name))+line, " "))
		}
	}
}

// writeHeaders writes headers below the fields of an event.
func (e *env) writeHeaders(headers map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		e.printf("header     %s: %s\n", visible(name), visible(headers[name]))
	}
}

// writePayload writes a payload, or why it could not be read.
func (e *env) writePayload(contentType string, payload []byte, reason error) {
	switch {
	case reason != nil:
		e.printf("%s\n\n", visible(reason.Error()))
	case payload != nil:
		e.printf("%s\n\n", payloadText(contentType, payload))
	}
}

// payloadText is a payload for people.
func payloadText(contentType string, payload []byte) string {
	var pretty bytes.Buffer
	if json.Indent(&pretty, payload, "", "  ") == nil {
		lines := strings.Split(pretty.String(), "\n")
		for i, line := range lines {
			lines[i] = visible(line)
		}
		return strings.Join(lines, "\n")
	}
	return count(len(payload)) + " bytes of " + visible(contentType) + " (--json has them)"
}
