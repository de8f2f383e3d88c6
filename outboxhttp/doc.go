// Package outboxhttp connects outbox with HTTP: it takes trace ids from requests into
// events and log lines ([Trace]), answers the probes of an orchestrator ([Live],
// [Ready]), and sends alerts to Slack ([Slack]).
package outboxhttp
