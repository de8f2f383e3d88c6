// Package outboxhttp connects outbox with HTTP: it takes trace ids from requests into
// events and log lines ([Trace]), and answers the probes of an orchestrator ([Live],
// [Ready]).
package outboxhttp
