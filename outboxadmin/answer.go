package outboxadmin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// answer is a whole response. It is sent when the database is not needed any more, so who
// reads slowly keeps no connection.
type answer struct {
	status      int
	contentType string
	location    string // of a redirect, or empty
	wait        bool   // come again in a moment
	body        []byte
}

// redirectTo leads on from a form, relative to its address.
func redirectTo(location string) answer {
	return answer{status: http.StatusSeeOther, location: location}
}

// done answers an action of the API.
var done = answer{status: http.StatusNoContent}

func jsonAnswer(status int, v any) (answer, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return answer{}, fmt.Errorf("encode the answer: %w", err)
	}
	return answer{status: status, contentType: jsonType, body: append(body, '\n')}, nil
}

// okJSON answers with a value as JSON.
func okJSON(v any) (answer, error) { return jsonAnswer(http.StatusOK, v) }

// writeTimeout bounds how long a client may take for an answer.
const writeTimeout = 30 * time.Second

// send writes an answer, as far as the client takes it.
func send(w http.ResponseWriter, r *http.Request, out answer) {
	if s := serverOf(r); s == nil || s.WriteTimeout == 0 || s.WriteTimeout > writeTimeout {
		// Not every wrapper of a ResponseWriter can; then the server's own timeout counts.
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeTimeout))
	}
	for name, value := range map[string]string{"Content-Type": out.contentType, "Location": out.location} {
		if value != "" {
			w.Header().Set(name, value)
		}
	}
	if out.wait {
		w.Header().Set("Retry-After", retryAfter)
	}
	w.WriteHeader(out.status)
	_, _ = w.Write(out.body) // the client may be gone
}

// serverOf returns the server of a request; nil if it did not come through one.
func serverOf(r *http.Request) *http.Server {
	s, _ := r.Context().Value(http.ServerContextKey).(*http.Server)
	return s
}

// problem is an error that is shown.
type problem struct {
	status      int
	title, text string
}

func (p *problem) Error() string { return p.title + ": " + p.text }

var errNowhere = &problem{http.StatusNotFound, "Nothing is here", "The address leads to no page. It may have been cut off on its way to you."}

// wrong is an error of who asks: something about a field.
func wrong(field, text string) error {
	return &problem{http.StatusBadRequest, "That cannot be asked", field + ": " + text}
}

// shown returns the problem to show for an error. It returns false for an error that the user cannot fix.
func shown(err error) (*problem, bool) {
	var p *problem
	var field *outbox.FieldError
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &p):
		return p, true
	case errors.Is(err, outboxops.ErrNotFound):
		return &problem{http.StatusNotFound, "It is not here",
			"There is no such failure or event now. A failed event leaves the list once it is sent, or some time after it was resolved. Retention removes recorded events."}, true
	case errors.Is(err, outboxops.ErrStatus):
		return &problem{http.StatusConflict, "Not possible any more", trimmed(err) + "."}, true
	case errors.As(err, &field):
		return &problem{http.StatusUnprocessableEntity, "That payload cannot be stored", trimmed(err) + "."}, true
	case errors.As(err, &large):
		return &problem{http.StatusRequestEntityTooLarge, "That is too much", fmt.Sprintf("At most %s are read here.", bytesText(int(large.Limit)))}, true
	case errors.Is(err, outbox.ErrEmpty), errors.Is(err, outbox.ErrMalformed), errors.Is(err, outbox.ErrTooLong), errors.Is(err, outbox.ErrNUL), errors.Is(err, outbox.ErrUTF8):
		return &problem{http.StatusUnprocessableEntity, "Something is missing, malformed or too long", trimmed(err) + "."}, true
	case errors.Is(err, context.DeadlineExceeded):
		return &problem{http.StatusGatewayTimeout, "That took too long",
			"The database had no answer in time. Ask for less: a shorter time, or an event id. An action may have been done: check the audit before you repeat it."}, true
	}
	return &problem{http.StatusServiceUnavailable, "The database did not answer",
		"The log of the service says why. Try again in a moment; events are not affected by this page."}, false
}

// partly is an error in the middle of an action on many failures.
type partly struct {
	error

	action string
	done   int // failures that are changed. The answer to the last commit may be lost.
}

func (p *partly) Unwrap() error { return p.error }

// inTheMiddle returns an error of an action on many failures as [partly], unless it was refused before the first one.
func inTheMiddle(err error, action string, done int) error {
	if _, ours := shown(err); err == nil || ours && done == 0 && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return &partly{err, action, done}
}

// maybeDone is the end of what is said of an action whose end is not known.
const maybeDone = "may have been done: check the audit before you repeat it."

// explained is the text of a problem, with what the request may have changed, and how many failures it surely has.
func explained(r *http.Request, err error, p *problem, ours bool) (text string, changed *int) {
	text = p.text
	if !ours && r.Method == http.MethodPost {
		text = "The log of the service says why. The action " + maybeDone
	}
	if some := (*partly)(nil); errors.As(err, &some) {
		return fmt.Sprintf("%s %s before this error. %s", plural(int64(some.done), "failure is", "failures are"), pastActions[some.action], text), &some.done
	}
	return text, nil
}

// trimmed is an error of outbox without the name of its package.
func trimmed(err error) string { return strings.TrimPrefix(err.Error(), "outbox: ") }

// failure is the answer that shows an error.
func (a *admin) failure(r *http.Request, err error) answer {
	p, ours := shown(err)
	if !ours && r.Context().Err() == nil {
		a.cfg.Logger.ErrorContext(r.Context(), "outboxadmin: request failed", slog.String("path", r.URL.Path), slog.Any("error", err))
	}
	text, changed := explained(r, err, p, ours)
	var out answer
	if isAPI(r) {
		out, _ = jsonAnswer(p.status, apiError{Error: text, Events: changed}) // neither is an error
	} else {
		out = a.page(r, p.status, "problem", p.title, struct{ Title, Text string }{p.title, text})
	}
	out.wait = errors.Is(err, errBusy)
	return out
}
