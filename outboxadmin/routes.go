package outboxadmin

import "net/http"

// routes are all that can be asked for, besides what is answered with "nothing is here".
var routes = []route{
	{http.MethodGet, "/{$}", Reader, (*admin).overview},
	{http.MethodGet, "/failed", Reader, (*admin).failedList},
	{http.MethodGet, "/failed/{id}", Reader, (*admin).failedOne},
	{http.MethodPost, "/failed/{id}/{action}", Operator, (*admin).failedAct},
	{http.MethodGet, "/failed/retry", Operator, bulkReview("retry")},
	{http.MethodPost, "/failed/retry", Operator, bulkAct("retry")},
	{http.MethodGet, "/failed/resolve", Operator, bulkReview("resolve")},
	{http.MethodPost, "/failed/resolve", Operator, bulkAct("resolve")},
	{http.MethodGet, "/events", Reader, (*admin).eventList},
	{http.MethodGet, "/events/{id}", Reader, (*admin).eventOne},
	{http.MethodGet, "/audit", Reader, (*admin).auditList},
	{http.MethodGet, "/assets/{name}", Reader, (*admin).asset},

	{http.MethodGet, "/api/openapi.json", Reader, (*admin).apiFile},
	{http.MethodGet, "/api/relays", Reader, (*admin).apiRelays},
	{http.MethodGet, "/api/relays/{relay}/progress", Reader, (*admin).apiProgress},
	{http.MethodGet, "/api/relays/{relay}/backlog", Reader, (*admin).apiBacklog},
	{http.MethodGet, "/api/transactions", Reader, (*admin).apiTransactions},
	{http.MethodGet, "/api/partitions", Reader, (*admin).apiPartitions},
	{http.MethodGet, "/api/failed", Reader, (*admin).apiFailedList},
	{http.MethodGet, "/api/failed/counts", Reader, (*admin).apiCounts},
	{http.MethodGet, "/api/failed/{id}", Reader, (*admin).apiFailedOne},
	{http.MethodPost, "/api/failed/{id}/retry", Operator, apiAct("retry")},
	{http.MethodPost, "/api/failed/{id}/resolve", Operator, apiAct("resolve")},
	{http.MethodPost, "/api/failed/{id}/edit", Operator, (*admin).apiEdit},
	{http.MethodPost, "/api/failed/retry", Operator, apiBulk("retry")},
	{http.MethodPost, "/api/failed/resolve", Operator, apiBulk("resolve")},
	{http.MethodPost, "/api/keys/hold", Operator, apiKey("hold")},
	{http.MethodPost, "/api/keys/release", Operator, apiKey("release")},
	{http.MethodGet, "/api/consumers", Reader, (*admin).apiConsumers},
	{http.MethodPost, "/api/consumers/pause", Operator, apiPause("pause")},
	{http.MethodPost, "/api/consumers/resume", Operator, apiPause("resume")},
	{http.MethodGet, "/api/events", Reader, (*admin).apiEvents},
	{http.MethodGet, "/api/events/{id}", Reader, (*admin).apiEvent},
	{http.MethodGet, "/api/audit", Reader, (*admin).apiAudit},
}
