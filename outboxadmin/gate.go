package outboxadmin

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"path"
	"strings"
	"time"

	"github.com/outboxgo/outbox"
	"github.com/outboxgo/outbox/outboxops"
)

// route is one thing that can be asked for.
type route struct {
	method, path string
	role         Role
	serve        func(*admin, http.ResponseWriter, *http.Request) error
}

// policy lets a page load what is served beside it, and nothing else.
const policy = "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; " +
	"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

func secure(h http.Header) {
	h.Set("Content-Security-Policy", policy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	// With no-referrer a browser sends forms with "Origin: null", which is refused
	// where it does not say Sec-Fetch-Site, as over plain HTTP.
	h.Set("Referrer-Policy", "same-origin")
}

type accessKey struct{}

// accessOf returns who sends a request.
func accessOf(r *http.Request) Access {
	access, _ := r.Context().Value(accessKey{}).(Access)
	return access
}

// ServeHTTP is the only way in: it serves only users that Authorize knows.
func (a *admin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	secure(w.Header())
	access, err := a.cfg.Authorize(r)
	if err != nil {
		a.cfg.Logger.InfoContext(r.Context(), "outboxadmin: not authorized", slog.Any("error", err))
	}
	if err != nil || access.Role < Reader {
		if a.cfg.Challenge != "" {
			w.Header().Set("WWW-Authenticate", a.cfg.Challenge)
		}
		deny(w, r, http.StatusUnauthorized, "Sign in first.")
		return
	}
	if access.Operator == "" {
		a.cfg.Logger.ErrorContext(r.Context(), "outboxadmin: Authorize returned an Access without Operator")
		deny(w, r, http.StatusForbidden, "You have no name here.")
		return
	}
	if err := a.origin.Check(r); err != nil {
		deny(w, r, http.StatusForbidden, "This request comes from another site.")
		return
	}
	if r.URL.Path == "" { // the prefix without its slash, from which relative links would lead astray
		w.Header().Set("Location", path.Base(originalPath(r))+"/")
		w.WriteHeader(http.StatusPermanentRedirect)
		return
	}
	r = r.WithContext(context.WithValue(r.Context(), accessKey{}, access))
	if clean := path.Clean(r.URL.Path); clean != r.URL.Path { // the mux would redirect, and leave out the prefix
		a.answer(w, r, errNowhere)
		return
	}
	a.mux.ServeHTTP(w, r)
}

// originalPath is the path before a prefix was taken off.
func originalPath(r *http.Request) string {
	whole, _, _ := strings.Cut(r.RequestURI, "?")
	return whole
}

// deny answers who may not come in: he gets no page.
func deny(w http.ResponseWriter, r *http.Request, status int, text string) {
	if isAPI(r) {
		writeJSON(w, status, apiError{Error: text})
		return
	}
	http.Error(w, text, status)
}

func isAPI(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/api/") }

// maxBody bounds what is sent to us: a payload is at most about 1 MiB, and a form
// writes some characters as three.
const maxBody = 4 << 20

// patience bounds what is asked of the database for a view.
const patience = 15 * time.Second

// handler serves a route to those who may have it.
func (a *admin) handler(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if access := accessOf(r); access.Role < rt.role {
			a.answer(w, r, &problem{http.StatusForbidden, "Only for operators",
				"You are signed in as a " + access.Role.String() + ", who may look at everything. To act on events takes the role of an operator."})
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, max(maxBody, 4*int64(a.cfg.MaxPayload)))
		if r.Method != http.MethodPost {
			ctx, cancel := context.WithTimeout(r.Context(), patience)
			defer cancel()
			r = r.WithContext(ctx)
		}
		if err := rt.serve(a, w, r); err != nil {
			a.answer(w, r, err)
		}
	})
}

// problem is an error that is shown.
type problem struct {
	status      int
	title, text string
}

func (p *problem) Error() string { return p.title + ": " + p.text }

var errNowhere = &problem{http.StatusNotFound, "Nothing is here", "The address leads to no page. It may have been cut off on its way to you."}

func (a *admin) nothingHere(http.ResponseWriter, *http.Request) error { return errNowhere }

// wrong is an error of who asks: something about a field.
func wrong(field, text string) error {
	return &problem{http.StatusBadRequest, "That cannot be asked", field + ": " + text}
}

// shown says how to show an error. It returns false for one that the user can do nothing
// about.
func shown(err error) (*problem, bool) {
	var p *problem
	var field *outbox.FieldError
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &p):
		return p, true
	case errors.Is(err, outboxops.ErrNotFound):
		return &problem{http.StatusNotFound, "It is not here any more",
			"A failed event leaves this list once it is sent, or some time after it was resolved; a recorded one when retention removes it."}, true
	case errors.Is(err, outboxops.ErrStatus):
		return &problem{http.StatusConflict, "Not possible any more", trimmed(err) + "."}, true
	case errors.As(err, &field):
		return &problem{http.StatusUnprocessableEntity, "That payload cannot be stored", trimmed(err) + "."}, true
	case errors.As(err, &large):
		return &problem{http.StatusRequestEntityTooLarge, "That is too much", "At most 4 MiB are read."}, true
	case errors.Is(err, outbox.ErrEmpty), errors.Is(err, outbox.ErrMalformed), errors.Is(err, outbox.ErrTooLong), errors.Is(err, outbox.ErrNUL), errors.Is(err, outbox.ErrUTF8):
		return &problem{http.StatusUnprocessableEntity, "Something is missing, malformed or too long", trimmed(err) + "."}, true
	case errors.Is(err, context.DeadlineExceeded):
		return &problem{http.StatusGatewayTimeout, "That took too long",
			"The database had no answer within " + patience.String() + ". Ask for less: a shorter time, or an event id."}, true
	}
	return &problem{http.StatusServiceUnavailable, "The database did not answer as it should",
		"The log of the service says why. Try again in a moment; events are not affected by this page."}, false
}

// trimmed is an error of outbox without the name of its package.
func trimmed(err error) string { return strings.TrimPrefix(err.Error(), "outbox: ") }

// answer shows an error.
func (a *admin) answer(w http.ResponseWriter, r *http.Request, err error) {
	p, ours := shown(err)
	if !ours && r.Context().Err() == nil {
		a.cfg.Logger.ErrorContext(r.Context(), "outboxadmin: request failed", slog.String("path", r.URL.Path), slog.Any("error", err))
	}
	if isAPI(r) {
		writeJSON(w, p.status, apiError{Error: p.text})
		return
	}
	a.render(w, r, p.status, "problem", p.title, struct{ Title, Text string }{p.title, p.text})
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // to who may have gone
}
