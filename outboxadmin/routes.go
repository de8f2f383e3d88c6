package outboxadmin

import (
	"net/http"
	"slices"
)

// route is a route of the page or of the API.
type route struct {
	method, path string
	role         Role
	asks         source
	names        []string // of parameters, or of the fields of a form
	body         form
	payload      bool // the body may hold one
	selects      bool // the parameter [selectedName] may be repeated
	serve        func(*admin, *request) (answer, error)
}

// source is where an answer comes from.
type source int

const (
	nothing  source = iota // but this process
	database               // through a slot
)

func with(names []string, more ...string) []string { return slices.Concat(names, more) }

// get is a view, made from the database. It has the parameters that are named.
func get(path string, names []string, serve func(*admin, *request) (answer, error)) route {
	return route{method: http.MethodGet, path: path, role: Reader, asks: database, names: names, serve: serve}
}

// free is a view without the database.
func free(path string, names []string, serve func(*admin, *request) (answer, error)) route {
	return route{method: http.MethodGet, path: path, role: Reader, names: names, serve: serve}
}

// review is a view for operators.
func review(path string, names []string, serve func(*admin, *request) (answer, error)) route {
	return route{method: http.MethodGet, path: path, role: Operator, asks: database, names: names, serve: serve}
}

// submit is a form with the fields that are named.
func submit(path string, names []string, serve func(*admin, *request) (answer, error)) route {
	return route{method: http.MethodPost, path: path, role: Operator, asks: database, names: names, body: fields, serve: serve}
}

// post is an action of the API.
func post(path string, serve func(*admin, *request) (answer, error)) route {
	return route{method: http.MethodPost, path: path, role: Operator, asks: database, body: document, serve: serve}
}

// withPayload has a route take a payload.
func withPayload(rt route) route {
	rt.payload = true
	return rt
}

// selecting has a route take several failures.
func selecting(rt route) route {
	rt.selects = true
	return rt
}

// routes are all existing routes. Other requests are answered with "nothing is here".
var routes = []route{
	get("/{$}", []string{"span"}, (*admin).overview),
	get("/failed", with(filterNames, "after", "limit", "done", "n"), (*admin).failedList),
	get("/failed/{id}", []string{"done", "n", listName}, (*admin).failedOne),
	withPayload(submit("/failed/{id}/{action}", []string{"reason", "payload", listName, seenName}, (*admin).failedAct)),
	review("/failed/retry", filterNames, bulkReview("retry")),
	submit("/failed/retry", with(filterNames, seenName, "reason"), bulkAct("retry")),
	review("/failed/resolve", filterNames, bulkReview("resolve")),
	submit("/failed/resolve", with(filterNames, seenName, "reason"), bulkAct("resolve")),
	selecting(review("/failed/selected/{action}", selectedNames, (*admin).selectedReview)),
	selecting(withPayload(submit("/failed/selected/{action}", with(selectedNames, seenName, "reason", "change", "step"), (*admin).selectedAct))),
	get("/consumers", []string{"span", "done"}, (*admin).consumersPage),
	review("/consumers/{action}", pauseNames, (*admin).pauseReview),
	submit("/consumers/{action}", with(pauseNames, "reason"), (*admin).pauseAct),
	get("/events", with(searchNames, "before", "limit"), (*admin).eventList),
	get("/events/{id}", nil, (*admin).eventOne),
	get("/delayed", delayedNames, (*admin).delayedList),
	submit("/delayed/cancel", []string{"event_id", "reason"}, (*admin).delayedCancel),
	get("/audit", auditNames, (*admin).auditList),
	free("/assets/{name}", nil, (*admin).asset),

	free("/api/openapi.json", nil, (*admin).apiFile),
	get("/api/overview", nil, (*admin).apiOverview),
	get("/api/relays", nil, (*admin).apiRelays),
	get("/api/relays/{relay}/progress", []string{"span"}, (*admin).apiProgress),
	free("/api/relays/{relay}/backlog", []string{"span"}, (*admin).apiBacklog),
	get("/api/transactions", []string{"open_seconds"}, (*admin).apiTransactions),
	get("/api/partitions", nil, (*admin).apiPartitions),
	get("/api/failed", with(filterNames, "after", "limit"), (*admin).apiFailedList),
	get("/api/failed/counts", filterNames, (*admin).apiCounts),
	get("/api/failed/{id}", nil, (*admin).apiFailedOne),
	post("/api/failed/{id}/retry", apiAct("retry")),
	post("/api/failed/{id}/resolve", apiAct("resolve")),
	post("/api/failed/{id}/hold", apiAct("hold")),
	post("/api/failed/{id}/release", apiAct("release")),
	withPayload(post("/api/failed/{id}/edit", (*admin).apiEdit)),
	post("/api/failed/retry", apiBulk("retry")),
	post("/api/failed/resolve", apiBulk("resolve")),
	get("/api/consumers", nil, (*admin).apiConsumers),
	get("/api/consumers/{group}/progress", []string{"span"}, (*admin).apiGroupProgress),
	free("/api/consumers/{group}/backlog", []string{"span"}, (*admin).apiGroupBacklog),
	post("/api/consumers/pause", apiPause("pause")),
	post("/api/consumers/resume", apiPause("resume")),
	get("/api/events", with(searchNames, "before", "limit"), (*admin).apiEvents),
	get("/api/events/{id}", nil, (*admin).apiEvent),
	get("/api/events/{id}/timeline", nil, (*admin).apiTimeline),
	get("/api/audit", auditNames, (*admin).apiAudit),
}
