package outboxadmin

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// payload is a payload as it is shown.
type payload struct {
	Type   string // its content type
	Size   int    // of the whole, before masking
	Data   []byte // as masked
	Masked bool
	Err    string // why it could not be read
}

// Kind is json, text or binary: how to show it.
func (p payload) Kind() string {
	switch {
	case json.Valid(p.Data):
		return "json"
	case utf8.Valid(p.Data) && !bytes.ContainsFunc(p.Data, unprintable):
		return "text"
	}
	return "binary"
}

func unprintable(r rune) bool { return r < ' ' && !strings.ContainsRune("\t\r\n", r) || r == 0x7f }

// Deeply nested JSON is shown without indentation: indented, 960 KiB of it can be 9 GB.
const (
	maxIndented = 4        // times its length
	minIndented = 64 << 10 // bytes, which it may have in any case
)

// shapeOf returns how deeply JSON is nested, and a little more than its length once it is
// indented.
func shapeOf(data []byte) (depth, printed int) {
	now, inString, escaped := 0, false, false
	for _, c := range data {
		printed++
		switch {
		case escaped:
			escaped = false
		case inString:
			escaped, inString = c == '\\', c != '"'
		case c == '"':
			inString = true
		case c == '{' || c == '[':
			now++
			depth = max(depth, now)
			printed += 1 + 2*now
		case c == '}' || c == ']':
			now--
			printed += 1 + 2*now
		case c == ',':
			printed += 1 + 2*now
		case c == ':':
			printed++
		}
	}
	return depth, printed
}

// Text is the payload for people: JSON with line breaks, text as it is, and else hex.
func (p payload) Text() string {
	switch p.Kind() {
	case "json":
		if _, printed := shapeOf(p.Data); printed > maxIndented*len(p.Data)+minIndented {
			return string(p.Data)
		}
		var b bytes.Buffer
		if err := json.Indent(&b, p.Data, "", "  "); err == nil {
			return b.String()
		}
		return string(p.Data)
	case "text":
		return string(p.Data)
	}
	return hex.Dump(p.Data)
}

// Original is the text that an operator edits. It is empty if the payload is masked or could not be read, and for the
// value of a record that is bytes although it should be JSON.
func (p payload) Original() string {
	switch {
	case p.Masked || p.Err != "":
		return ""
	case !p.IsJSON():
		return hex.EncodeToString(p.Data)
	case p.Kind() == "binary":
		return ""
	}
	return p.Text()
}

// IsJSON is set if the event holds JSON, even if a mask changes it.
func (p payload) IsJSON() bool { return p.Type == "application/json" }

// edited returns the payload that an operator wrote in place of Original.
func edited(isJSON bool, text string) ([]byte, error) {
	if isJSON {
		return []byte(text), nil
	}
	data, err := hex.DecodeString(strings.Join(strings.Fields(text), ""))
	if err != nil {
		return nil, wrong("payload", "it is not JSON, so it is written in hex: "+strings.TrimPrefix(err.Error(), "encoding/hex: "))
	}
	return data, nil
}
