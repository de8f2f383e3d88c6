package outboxadmin

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// payload is what is shown of one.
type payload struct {
	Type   string // its content type
	Size   int    // of the whole, before masking
	Data   []byte // as masked
	Masked bool
	Err    string // why it could not be read
}

// payloadOf masks a payload, or shows why it could not be read. Every payload that leaves
// this package comes from here.
func (a *admin) payloadOf(eventType, contentType string, data []byte, err error) payload {
	p := payload{Type: contentType, Size: len(data), Data: data, Err: errorText(err)}
	if a.cfg.MaskPayload != nil && err == nil {
		p.Data = a.cfg.MaskPayload(eventType, data)
		p.Masked = !bytes.Equal(p.Data, data)
	}
	return p
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

// Text is the payload for people: JSON with line breaks, text as it is, and else hex.
func (p payload) Text() string {
	switch p.Kind() {
	case "json":
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

// Original is what an operator edits: nothing of what is masked or could not be read.
func (p payload) Original() string {
	if p.Masked || p.Err != "" {
		return ""
	}
	if p.Kind() == "binary" || !p.IsJSON() {
		return hex.EncodeToString(p.Data)
	}
	return p.Text()
}

// IsJSON is set if the event holds JSON, whatever a mask makes of it.
func (p payload) IsJSON() bool { return p.Type == "application/json" }

// edited is what an operator wrote in the place of Original.
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
