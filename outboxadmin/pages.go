package outboxadmin

import (
	"bytes"
	"embed"
	"html/template"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/outboxgo/outbox/outboxops"
)

//go:embed pages/*.html
var pageFiles embed.FS

//go:embed assets openapi.json
var assetFiles embed.FS

// frame is the common part of all pages.
type frame struct {
	Title  string
	Name   string   // of the page among several
	Names  []string // of all of them
	Base   string   // leads from here to the first page
	Here   string   // the path
	Now    time.Time
	Access Access
	Body   any
}

// CanAct is set for operators.
func (f frame) CanAct() bool { return f.Access.Role >= Operator }

// part is the data of a template, with an extra value.
type part struct {
	frame
	Part any
}

// Beside leads to the first page of another name.
func (f frame) Beside(name string) string { return f.Base + "../" + url.PathEscape(name) + "/" }

// With passes part of a page to a template of its own.
func (f frame) With(p any) part { return part{f, p} }

// Ago is a time as seen from now.
func (f frame) Ago(t time.Time) string { return relative(f.Now, t) }

var pageFuncs = template.FuncMap{
	"exact": exact, "thousands": thousands, "bytes": bytesText, "plain": plain, "plural": plural, "upTo": upTo, "tally": tallyOf, "heldOf": heldOf,
	"aggregate": aggregateLink, "key": keyLink, "fieldTime": fieldTime,
	"kind": kindLink, "stat": statOf, "groupStat": groupStat, "listText": func(q template.URL) string { return string(q) }, "selectedQuery": encode, "pauseLink": pauseLink, "groupPauseLink": groupPauseLink, "past": func(action string) string { return pastActions[action] },
	"iso":     func(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) },
	"int":     func(n int64) int { return int(n) },
	"bound":   boundText,
	"wide":    func(n int) int64 { return int64(n) },
	"shortly": short,
	"lower":   strings.ToLower,
	"owed":    owedBadge, "owedLink": owedLink, "deadLink": deadLink,
	"headers": headersShown,
	"commas":  func(s string) string { return strings.ReplaceAll(s, ",", ", ") },
}

// maxHeaders bounds the headers that a page shows: an event can have very many.
const maxHeaders = 200

// headerList are the first headers of an event by name, and the number of its other headers.
type headerList struct {
	First  []header
	Others int
}

type header struct{ Name, Value string }

func headersShown(all map[string]string) headerList {
	names := slices.Sorted(maps.Keys(all))
	list := headerList{Others: max(0, len(names)-maxHeaders)}
	for _, name := range names[:len(names)-list.Others] {
		list.First = append(list.First, header{name, all[name]})
	}
	return list
}

var pastActions = map[string]string{"retry": "retried", "resolve": "resolved", "edit": "edited", "hold": "held", "release": "released", "read": "read",
	"pause": "paused", "resume": "resumed", "rewind": "rewound", "to-kafka": "moved to Kafka", "to-postgres": "moved to PostgreSQL", "finish-cut": "finished the move of", "cancel-cut": "cancelled the move of",
	"replay": "sent again events of", "forget": "removed notes of", "forget-action": "ended an action of", "cancel": "cancelled a delayed event of", "expire": "dropped",
	"from-debezium": "moved from Debezium to", "begin-relay": "began", "to-debezium": "moved to Debezium from",
	"start-group": "began with the archive", "stop-archive": "ended the archive of"}

// stat is a number on the overview.
type stat struct {
	Name, Status, Link, Note string
	Count                    tally
}

func statOf(name string, count int64, relay, status, note string) stat {
	return stat{name, status, "failed?" + url.Values{"relay": {relay}, "status": {status}}.Encode(), note, upTo(count)}
}

// kindLink leads to the failures of the same kind.
func kindLink(c outboxops.FailureCount) string {
	return "failed?" + failedValues(outboxops.FailureFilter{Kind: c.Kind, Relay: c.Relay, Group: c.Group, Action: c.Action, Statuses: []string{c.Status}, Type: c.Type,
		Class: c.Class}).Encode()
}

// parsePages returns each page with the layout around it.
func parsePages() map[string]*template.Template {
	layout := template.Must(template.New("layout.html").Funcs(pageFuncs).ParseFS(pageFiles, "pages/layout.html", "pages/parts.html"))
	pages := map[string]*template.Template{}
	for _, name := range []string{"overview", "failed", "failed_one", "failed_gone", "consumers", "pause", "bulk", "selected", "events", "event_one", "delayed", "audit", "problem"} {
		pages[name] = template.Must(template.Must(layout.Clone()).ParseFS(pageFiles, "pages/"+name+".html"))
	}
	return pages
}

// page is an answer in HTML.
func (a *admin) page(r *http.Request, status int, page, title string, body any) answer {
	f := frame{Title: title, Name: a.cfg.Name, Names: a.cfg.Names, Base: baseOf(r.URL.Path), Here: r.URL.Path, Now: a.now(), Access: accessOf(r), Body: body}
	var b bytes.Buffer
	if err := a.pages[page].Execute(&b, f); err != nil {
		a.cfg.Logger.ErrorContext(r.Context(), "outboxadmin: page "+page, "error", err)
		return answer{status: http.StatusInternalServerError, contentType: "text/plain; charset=utf-8", body: []byte("This page cannot be shown.\n")}
	}
	return answer{status: status, contentType: "text/html; charset=utf-8", body: b.Bytes()}
}

// baseOf leads from a path back to the first page.
func baseOf(p string) string {
	return "./" + strings.Repeat("../", max(0, strings.Count(p, "/")-1))
}

// assetTypes are fixed here, because the types of hosts differ.
var assetTypes = map[string]string{
	".css":  "text/css; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".svg":  "image/svg+xml",
	".json": "application/json",
}

func assetAnswer(name string) (answer, error) {
	data, err := assetFiles.ReadFile(name)
	if err != nil {
		return answer{}, errNowhere
	}
	return answer{status: http.StatusOK, contentType: assetTypes[path.Ext(name)], body: data}, nil
}

func (a *admin) asset(r *request) (answer, error) {
	return assetAnswer("assets/" + path.Base(r.PathValue("name")))
}
