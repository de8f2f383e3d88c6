package outboxadmin

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	"github.com/outboxgo/outbox/internal/jsonb"
	"github.com/outboxgo/outbox/outboxops"
)

// An edit of many failures is a JSON merge patch (RFC 7396): each member replaces the member of the payload with
// its name, null removes it, and objects are merged.

// checkChange refuses a text that is no merge patch, or changes nothing.
func checkChange(text string) *problem {
	patch, err := decodeJSON([]byte(text))
	if object, ok := patch.(map[string]any); err != nil || !ok || len(object) == 0 {
		return &problem{http.StatusUnprocessableEntity, "That is no change", `The change is to be a JSON object with the members to replace, such as {"gift": true}; null removes a member.`}
	}
	return nil
}

// decodeJSON decodes a value that jsonb can hold, with numbers as they are written. Others would not come out as they
// are: encoding/json replaces half characters.
func decodeJSON(data []byte) (v any, err error) {
	if _, err := jsonb.Check(data); err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	return v, d.Decode(&v)
}

// errSame is the error of a change that a payload has already.
var errSame = &problem{http.StatusConflict, "Nothing changes", "Its payload has this already."}

// patched is [patched], but for a masked payload that has a change already: to say so would let a user guess what the
// mask hides.
func (a *admin) patched(f outboxops.Failure, change string) ([]byte, error) {
	after, err := patched(f, change)
	if errors.Is(err, errSame) && a.payloadOf(f.Type, f.ContentType, f.Payload, nil).Masked {
		err = nil
	}
	return after, err
}

// patched returns the payload of a failure with a change, also beside [errSame].
func patched(f outboxops.Failure, change string) ([]byte, error) {
	if f.PayloadErr != nil {
		return nil, &problem{http.StatusConflict, "That payload cannot be read", errorText(f.PayloadErr) + "."}
	}
	patch, err := decodeJSON([]byte(change))
	if err != nil {
		return nil, wrong("change", err.Error())
	}
	before, err := decodeJSON(f.Payload)
	if err != nil {
		return nil, &problem{http.StatusConflict, "That payload cannot be merged with a change", notJSON}
	}
	same, err := encodeJSON(before)
	if err != nil {
		return nil, err
	}
	after, err := encodeJSON(merged(before, patch))
	if err == nil && bytes.Equal(same, after) {
		return after, errSame
	}
	return after, err
}

// merged applies a merge patch. It changes target.
func merged(target, patch any) any {
	changes, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	object, ok := target.(map[string]any)
	if !ok {
		object = map[string]any{}
	}
	for name, value := range changes {
		if value == nil {
			delete(object, name)
		} else {
			object[name] = merged(object[name], value)
		}
	}
	return object
}

// encodeJSON encodes a value without the escapes for HTML.
func encodeJSON(v any) ([]byte, error) {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return []byte(strings.TrimSuffix(b.String(), "\n")), err
}

// tryEdits shows what a change does to each selected failure, and whether PostgreSQL and the rules of events accept
// it.
func (a *admin) tryEdits(r *request, s selection, page selectedPage) (answer, error) {
	page.Tried = true
	left := max(maxShown, a.cfg.MaxPayload)
	for _, id := range s.ids {
		row, err := a.tryEdit(r, id, page.Change)
		r.work.pause()
		if err != nil {
			return answer{}, err
		}
		if row.Payload = nil; row.After != nil { // the page holds payloads up to a limit
			if left -= len(row.After.Data); left < 0 {
				row.After.Data, row.After.Err = nil, "The payloads before it are too large to show this one too."
			}
		}
		page.Rows = append(page.Rows, row)
	}
	return a.showSelected(r, http.StatusOK, s, page)
}

// tryEdit audits that a payload is read, and tries a change in a transaction that is rolled back.
func (a *admin) tryEdit(r *request, id outboxops.FailureID, change string) (selectedRow, error) {
	row, err := a.selectedRow(r.Context(), id, "edit")
	if err != nil || row.Why != "" {
		return row, err
	}
	if a.cfg.AuditReads {
		if err := a.failed.AuditRead(r.Context(), id, auditInfo(r, readReason(r))); err != nil {
			return row, err
		}
	}
	after, err := a.patched(row.Failure, change)
	if err == nil {
		err = a.failed.CheckEdit(r.Context(), id, after, auditInfo(r, "dry run"))
	}
	if p, ours := shown(err); err != nil && ours {
		row.Why = p.text
		return row, nil
	}
	shown := a.payloadOf(row.Type, row.ContentType, after, nil)
	row.After = &shown
	return row, err
}
