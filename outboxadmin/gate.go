package outboxadmin

import (
	"context"
	"log/slog"
	"net/http"
	"path"
	"strings"

	"github.com/outboxgo/outbox/internal/check"
)

// policy lets a page load files of its own origin, and nothing else.
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

// accessOf returns the user of a request.
func accessOf(r *http.Request) Access {
	access, _ := r.Context().Value(accessKey{}).(Access)
	return access
}

// ServeHTTP is the only way in: it serves only users that Authorize knows.
func (a *admin) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	secure(w.Header())
	access, err := a.cfg.Authorize(r)
	if err != nil {
		a.logins.fail(r, err)
	}
	if err != nil || access.Role < Reader {
		if a.cfg.Challenge != "" {
			w.Header().Set("WWW-Authenticate", a.cfg.Challenge)
		}
		deny(w, r, http.StatusUnauthorized, "Sign in first.")
		return
	}
	if err := check.Operator(access.Operator); err != nil {
		a.cfg.Logger.ErrorContext(r.Context(), "outboxadmin: Authorize returned an Access whose Operator is no name", slog.Any("error", err))
		deny(w, r, http.StatusForbidden, "You have no name here.")
		return
	}
	if err := a.origin.Check(r); err != nil || isEmbedded(r.Header) {
		deny(w, r, http.StatusForbidden, "This request comes from another site.")
		return
	}
	if r.URL.Path == "" { // the prefix without its slash, from which relative links would lead astray
		w.Header().Set("Location", path.Base(originalPath(r))+"/")
		w.WriteHeader(http.StatusPermanentRedirect)
		return
	}
	r = r.WithContext(context.WithValue(r.Context(), accessKey{}, access))
	if !isText(r.URL.Path) {
		send(w, r, a.failure(r, wrong("path", notText)))
		return
	}
	if clean := path.Clean(r.URL.Path); clean != r.URL.Path { // the mux would redirect, and leave out the prefix
		send(w, r, a.failure(r, errNowhere))
		return
	}
	a.mux.ServeHTTP(w, r)
}

// isEmbedded reports whether a page of another site sends a request, other than by a link that
// is followed: as an image, in a frame or by a script. It would see nothing of the answer,
// but have the database search, and audit reads in the name of who is signed in.
func isEmbedded(h http.Header) bool {
	switch h.Get("Sec-Fetch-Site") {
	case "cross-site", "same-site":
		return h.Get("Sec-Fetch-Mode") != "navigate" || h.Get("Sec-Fetch-Dest") != "document"
	}
	return false // same origin, entered by the user, or a browser that does not send the header
}

// originalPath is the path before the prefix was removed.
func originalPath(r *http.Request) string {
	whole, _, _ := strings.Cut(r.RequestURI, "?")
	return whole
}

// deny answers a request without access; its sender gets no page.
func deny(w http.ResponseWriter, r *http.Request, status int, text string) {
	if isAPI(r) {
		out, _ := jsonAnswer(status, apiError{Error: text}) // a string is no error
		send(w, r, out)
		return
	}
	send(w, r, answer{status: status, contentType: "text/plain; charset=utf-8", body: []byte(text + "\n")})
}

func isAPI(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, "/api/") }

// handler serves a route.
func (a *admin) handler(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		exit, ok := a.slots.enter(rt)
		if !ok {
			send(w, r, a.failure(r, errBusy))
			return
		}
		defer exit() // after the answer is sent
		out, err := a.serve(rt, w, r)
		if err != nil {
			out = a.failure(r, err)
		}
		send(w, r, out)
	})
}

// serve returns the answer to a request. It reads the request before it uses the database, so a slow client
// keeps no connection.
func (a *admin) serve(rt route, w http.ResponseWriter, r *http.Request) (answer, error) {
	if access := accessOf(r); access.Role < rt.role {
		return answer{}, &problem{http.StatusForbidden, "Only for operators",
			"You are signed in as a " + access.Role.String() + ", who may see everything. To act on events takes the role of an operator."}
	}
	req, err := read(rt, w, r, a.cfg.MaxPayload)
	if err != nil || rt.asks == nothing {
		if err != nil {
			return answer{}, err
		}
		return rt.serve(a, req)
	}
	free, err := a.slots.take(r.Context(), rt)
	if err != nil {
		return answer{}, err
	}
	defer free.end()
	work := newWork(r.Context(), a.cfg.QueryTimeout, free)
	defer work.end()
	req.Request, req.work = r.WithContext(work.ctx), work
	if err := a.readClock(work.ctx); err != nil {
		return answer{}, work.explain(err)
	}
	out, err := rt.serve(a, req)
	return out, work.explain(err)
}
