package outboxadmin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/outboxgo/outbox/internal/jsonb"
)

// request is a request that was read completely and is understood. No parameter, field or member is
// dropped, and all are text that PostgreSQL takes.
type request struct {
	*http.Request

	query query  // the query, or the fields of a form
	body  []byte // JSON, or nil
	work  *work  // nil if the request needs no database
}

// form is the form of a request's body.
type form int

const (
	noBody   form = iota
	fields        // of a form
	document      // JSON
)

const (
	formType = "application/x-www-form-urlencoded"
	jsonType = "application/json"
)

const (
	// smallBody bounds a request without a payload. A form writes some characters as twelve.
	smallBody = 256 << 10
	// leastPayloadBody bounds it where it may be one, unless MaxPayload is above 1 MiB.
	leastPayloadBody = 4 << 20
	// bodyTimeout bounds how long a client may take to send it.
	bodyTimeout = 30 * time.Second
)

// read reads a request. It refuses a POST with a query, because the query would be a filter without effect.
func read(rt route, w http.ResponseWriter, r *http.Request, maxPayload int) (*request, error) {
	values, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, wrong("query", err.Error())
	}
	req := &request{Request: r, query: query{values: values}}
	if rt.body == noBody {
		return req, checkValues(values, rt)
	}
	if err := checkValues(values, route{}); err != nil {
		return nil, err
	}
	if req.body, err = readBody(rt, w, r, maxPayload); err != nil {
		return nil, err
	}
	if rt.body == fields {
		if req.query.values, err = url.ParseQuery(string(req.body)); err != nil {
			return nil, wrong("form", err.Error())
		}
		return req, checkValues(req.query.values, rt)
	}
	return req, nil
}

// readBody reads a body of the type that a route takes.
func readBody(rt route, w http.ResponseWriter, r *http.Request, maxPayload int) ([]byte, error) {
	want := map[form]string{fields: formType, document: jsonType}[rt.body]
	if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != want {
		return nil, &problem{http.StatusUnsupportedMediaType, "Of another type", "The body is to be " + want + "."}
	}
	limit := int64(smallBody)
	if rt.payload {
		limit = max(leastPayloadBody, 4*int64(maxPayload))
	}
	if s := serverOf(r); s == nil || s.ReadTimeout == 0 || s.ReadTimeout > bodyTimeout {
		// Not every wrapper of a ResponseWriter can; then the server's own timeout counts.
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTimeout))
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, limit))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return nil, err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, &problem{http.StatusRequestTimeout, "That took too long", "The request did not arrive within " + bodyTimeout.String() + "."}
	case err != nil:
		return nil, wrong("body", err.Error())
	case !isText(string(body)):
		return nil, wrong("body", notText)
	}
	return body, nil
}

const notText = "is no text that PostgreSQL takes"

// isText reports whether PostgreSQL can store a text.
func isText(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

// checkValues refuses parameters that are unknown, not text, or repeated: a mistyped filter must not pick
// everything.
func checkValues(values url.Values, rt route) error {
	for name, all := range values {
		switch {
		case !isText(name):
			return wrong("name of a parameter", notText)
		case !slices.Contains(rt.names, name):
			return wrong(fmt.Sprintf("%.100q", name), "is not a parameter of this")
		case len(all) > 1 && (!rt.selects || name != selectedName):
			return wrong(name, "is given more than once")
		case slices.ContainsFunc(all, func(text string) bool { return !isText(text) }):
			return wrong(name, notText)
		}
	}
	return nil
}

// decode reads the JSON of a request into a struct. It refuses repeated and unknown members. encoding/json
// would use the last member of a name, and ignore its case.
func (r *request) decode(v any) error {
	if _, err := membersOf(r.body); err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(r.body))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		var p *problem
		if errors.As(err, &p) {
			return p
		}
		return wrong("body", short500(strings.TrimPrefix(err.Error(), "json: ")))
	}
	return nil
}

// membersOf returns the members of a JSON object, and nothing else may be there.
func membersOf(data []byte) (map[string]json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(data))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil, wrong("body", "is no JSON object")
	}
	members := map[string]json.RawMessage{}
	for d.More() {
		token, err := d.Token()
		name, ok := token.(string)
		if err != nil || !ok {
			return nil, wrong("body", "is no JSON object")
		}
		// encoding/json treats some other characters as equal to these: ſ is equal to s.
		if strings.Trim(name, "abcdefghijklmnopqrstuvwxyz_0123456789") != "" {
			return nil, wrong(fmt.Sprintf("%.100q", name), "is not a member of this")
		}
		if _, twice := members[name]; twice {
			return nil, wrong(name, "is given more than once")
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, wrong("body", short500(err.Error()))
		}
		members[name] = value
	}
	if _, err := d.Token(); err != nil {
		return nil, wrong("body", "is no JSON object")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, wrong("body", "there is more behind the object")
	}
	return members, nil
}

// short500 cuts an error that may repeat the input.
func short500(s string) string { return fmt.Sprintf("%.500s", s) }

// jsonText is a string in JSON, and neither null nor half a character.
type jsonText string

func (t *jsonText) UnmarshalJSON(data []byte) error {
	var s string
	if err := json.Unmarshal(data, &s); err != nil || data[0] != '"' {
		return wrong("body", "a member that is to be a string is none")
	}
	if jsonb.CheckString(data) != nil { // encoding/json replaces half a character
		return wrong("body", notText)
	}
	*t = jsonText(s)
	return nil
}

// jsonBool is a boolean in JSON, and not null.
type jsonBool bool

func (b *jsonBool) UnmarshalJSON(data []byte) error {
	if text := string(data); text != "true" && text != "false" {
		return wrong("body", "a member that is to be true or false is neither")
	}
	*b = string(data) == "true"
	return nil
}

// jsonFilter is an object of strings.
type jsonFilter url.Values

func (f *jsonFilter) UnmarshalJSON(data []byte) error {
	members, err := membersOf(data)
	if err != nil {
		return err
	}
	*f = jsonFilter{}
	for name, value := range members {
		var text jsonText
		if err := text.UnmarshalJSON(value); err != nil {
			return err
		}
		(*f)[name] = []string{string(text)}
	}
	return nil
}
